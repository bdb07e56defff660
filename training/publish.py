"""
Publishes finished runs, built datasets and the page on the Hub, with card, licence and results, and lists them in a
collection.

    python -m mamba3_nplr.publish FOLDER [FOLDER ...] [--owner NAME] [--dry_run]

The token is that of `hf auth login`, or HF_TOKEN; a dry run needs neither token nor network. A run that is not
evaluated, or a folder that is half written, in use or was changed since, is refused before anything is uploaded. Of a
run only the files that it has written itself are uploaded, whatever else lies beside them.
"""

import argparse
import contextlib
import json
from collections.abc import Collection, Iterator
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError
from huggingface_hub.utils import validate_repo_id

from ..datasets_scripts import build
from ..modeling.hub.checksums import changed_files
from ..modeling.hub.contents import CONTENTS, LINK, damaged_files, describe_damage, read_contents
from ..modeling.hub.errors import clear_errors
from ..modeling.hub.folder_lock import FolderInUseError, folder_lock
from . import record
from .checkpoints import UNFINISHED
from .space import is_page, plan_space
from .upload import Upload, licence, plan_run

DATASET_NAME = "state-tracking"
SPACE_NAME = "shell-game"
EDITABLE = (record.CARD_FILE, record.PLOT)  # what readers look at; results are as they were found, or refused
UNKNOWN_OWNER = "OWNER"  # in a dry run, which asks nobody whose the token is


class RefusedError(ValueError):
    """A folder that must not be published; the message says why, and what to do."""


def plan(
    folder: Path,
    owner: str,
    name: str | None = None,
    allow_uncommitted: bool = False,
    allow_edited: Collection[str] = (),
) -> Upload:
    """
    What publishing a folder would upload. Nothing of the Hub is needed for it.

    Args:
        folder: Of a finished run, of built datasets, or of the page.
        owner, name: Of the repository; the name is by default that of the settings of the run.
        allow_uncommitted: Whether a run of code that is in no commit may be published.
        allow_edited: Names of `EDITABLE` files of a run that may have been changed since.
    """
    if (folder / build.SETTINGS).exists():
        return plan_dataset(folder, f"{owner}/{name or DATASET_NAME}")
    if not folder.is_dir():
        raise RefusedError(f"{folder} is not there.")
    if is_page(folder):
        return plan_page(folder, f"{owner}/{name or SPACE_NAME}")
    check_files(folder, allow_edited)
    summary = json.loads((folder / record.RESULTS).read_text(encoding="utf-8"))
    check_run(folder, summary, allow_uncommitted)
    default = "-".join([summary["task"], summary["model"], summary["preset"], f"seed{summary['seed']}"])
    return plan_run(folder, f"{owner}/{name or default}", summary)


def check_files(folder: Path, allow_edited: Collection[str]) -> None:
    """Refuses a run whose files are not those that were evaluated."""
    if not (folder / record.RESULTS).exists():
        raise RefusedError(
            f"{folder} is not evaluated: it has no {record.RESULTS}. A run gets one when it finishes "
            "(train_hf.py --resume_from_checkpoint resumes one); its single checkpoints have none."
        )
    damaged = damaged_files(folder)
    if CONTENTS not in damaged:
        damaged = not_listed(folder) | damaged
    allowed = [name for name in allow_edited if damaged.get(name) != LINK and (folder / name).is_file()]
    refused = {name: what for name, what in damaged.items() if name not in allowed}
    if (folder / UNFINISHED).exists():
        refused[UNFINISHED] = "shows that a run was stopped while it was writing"
    if refused:
        edited = " ".join(f"--allow_edited {name}" for name in EDITABLE if name in refused)
        raise RefusedError(
            f"{folder} is not what was evaluated: {describe_damage(refused)}. The command of the run with "
            "--resume_from_checkpoint evaluates its last checkpoint again and writes all files again."
            + (f" What was edited on purpose is published with {edited}" if edited else "")
        )


def not_listed(folder: Path) -> dict[str, str]:
    """What a finished run lists with a checksum, and this one does not."""
    listed = read_contents(folder)
    needed = {record.RESULTS, record.RUN, record.CARD_FILE, *listed}
    return {name: f"has no checksum in {CONTENTS}" for name in needed if "sha256" not in listed.get(name, {})}


def check_run(folder: Path, summary: dict, allow_uncommitted: bool) -> None:
    """Refuses a run that has found nothing, or that nobody else could repeat."""
    if not summary["results"]:
        raise RefusedError(f"{folder} is not evaluated: there are no results.")
    revision = summary["environment"]["git"] or ""
    if revision.endswith("+") and not allow_uncommitted:
        raise RefusedError(
            f"{folder} was trained by code with uncommitted changes (revision {revision}), which nobody else has. Give "
            "--allow_uncommitted to publish it all the same."
        )


def plan_dataset(folder: Path, repo_id: str) -> Upload:
    expected = build.read_checksums(folder)
    # The settings are written first, the card last.
    if build.SETTINGS not in expected or not (folder / "README.md").exists():
        raise RefusedError(f"{folder} is a build that was stopped: give the same build command again, and it resumes.")
    problems = changed_files(folder, expected)
    if problems:
        raise RefusedError(f"{folder} is not what was built: {'; '.join(problems)}. Build it again.")
    card = (folder / "README.md").read_text(encoding="utf-8").replace("PATH_OR_REPOSITORY", repo_id)
    files = {name: folder / name for name in (*expected, build.CHECKSUMS)}
    made = {"README.md": card.encode(), "LICENSE": licence()}
    tasks = json.loads((folder / build.SETTINGS).read_text(encoding="utf-8"))["tasks"]
    return Upload(repo_id, "dataset", files | made, "State-tracking tasks", f"The tasks: {', '.join(tasks)}")


def plan_page(folder: Path, repo_id: str) -> Upload:
    try:
        return plan_space(folder, repo_id)
    except ValueError as error:
        raise RefusedError(str(error)) from error


def publish(uploads: list[Upload], api: HfApi, private: bool, revision: str | None, collection: str) -> None:
    """
    Args:
        collection: Title of the collection of the owner that lists what was published; empty for none.
    """
    for upload in uploads:
        with upload.clear_errors():
            sdk = {"space_sdk": "gradio"} if upload.repo_type == "space" else {}
            api.create_repo(upload.repo_id, repo_type=upload.repo_type, private=private, exist_ok=True, **sdk)
            if revision:
                api.create_branch(upload.repo_id, branch=revision, repo_type=upload.repo_type, exist_ok=True)
        print(f"{upload.repo_id}: {upload.push(api, revision)}")
    if collection:
        list_in_collection(uploads, api, private, collection)


def list_in_collection(uploads: list[Upload], api: HfApi, private: bool, title: str) -> None:
    owner = uploads[0].repo_id.partition("/")[0]
    with clear_errors(f"The collection {owner}/{title}", "written", "All uploads are done."):
        index = api.create_collection(title, namespace=owner, private=private, exists_ok=True)
        for upload in uploads:
            api.add_collection_item(index.slug, upload.repo_id, upload.repo_type, note=upload.note, exists_ok=True)
    print(f"{title}: {index.url}")


def token_owner(api: HfApi) -> str:
    with clear_errors("The name of the token's user", "asked for", "Nothing has been uploaded."):
        return api.whoami()["name"]


def describe(uploads: list[Upload], owner: str, collection: str) -> str:
    """What `publish` would do, for a dry run."""
    lines = [upload.describe() for upload in uploads]
    if collection:
        lines.append(f"collection {owner}/{collection}: lists all of them")
    if owner == UNKNOWN_OWNER:
        lines.append(
            f"{owner} stands for the user of the token. README.md names its repository, and so is as much longer or "
            "shorter as that name; --owner NAME shows its exact size."
        )
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mamba3_nplr.publish",
        description="Publishes finished runs, built datasets and the page on the Hub, with card, licence and results.",
    )
    parser.add_argument("folders", metavar="FOLDER", nargs="+", type=Path, help="of a run, datasets or the page")
    parser.add_argument("--owner", help="user or organization (default: the user whose token is used)")
    parser.add_argument(
        "--name", help=f"of the repository, for a single FOLDER (default: from the run, {DATASET_NAME} or {SPACE_NAME})"
    )
    parser.add_argument("--private", action="store_true", help="make new repositories private")
    parser.add_argument("--revision", help="branch to commit to, made if it is not there (default: main)")
    parser.add_argument(
        "--collection", default="mamba3_nplr", help="that lists them (default: %(default)s; '' for none)"
    )
    parser.add_argument("--allow_uncommitted", action="store_true", help="also runs of code that is in no commit")
    parser.add_argument(
        "--allow_edited",
        action="append",
        default=[],
        choices=EDITABLE,
        metavar="FILE",
        help=f"also runs whose {' or '.join(EDITABLE)} was edited since; results never",
    )
    parser.add_argument(
        "--dry_run", action="store_true", help="upload nothing, ask nobody; show exactly what would be uploaded"
    )
    return parser


@contextlib.contextmanager
def nobody_writes(folder: Path) -> Iterator[None]:
    """Refuses a folder in which a run or a build goes on, and keeps others from starting there."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(folder_lock(folder))
        except FolderInUseError as error:
            raise RefusedError(str(error)) from error
        except OSError:
            pass  # there is no such folder, or nobody here can write into it
        yield


def publish_folders(given: argparse.Namespace) -> None:
    api = HfApi()
    owner = given.owner or (UNKNOWN_OWNER if given.dry_run else token_owner(api))
    uploads = [plan(folder, owner, given.name, given.allow_uncommitted, given.allow_edited) for folder in given.folders]
    for upload in uploads:
        validate_repo_id(upload.repo_id)
    if given.dry_run:
        print(describe(uploads, owner, given.collection))
    else:
        publish(uploads, api, given.private, given.revision, given.collection)


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser()
    given = parser.parse_args(arguments)
    if given.name and len(given.folders) > 1:
        parser.error("--name is for a single FOLDER: several need several names.")
    try:
        with contextlib.ExitStack() as held:
            for folder in dict.fromkeys(folder.resolve() for folder in given.folders):
                held.enter_context(nobody_writes(folder))
            publish_folders(given)
    except RefusedError as error:
        parser.exit(2, f"publish: {error}\n")
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        parser.exit(
            1,
            f"publish: {error}\nEach repository is as it was, or holds all of its upload; the same command resumes.\n",
        )


if __name__ == "__main__":
    main()
