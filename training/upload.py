"""What goes to the Hub: folders of this package as one commit each, and checkpoints during a run."""

import json
import re
import shlex
import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import CommitOperationAdd, HfApi
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import CONFIG_NAME

from ..modeling.hub.contents import read_contents
from ..modeling.hub.errors import clear_errors
from . import record
from .arguments import parse_run
from .model_card import with_code
from .models import auto_loader

# The files of a model, among those that a run has written; what else it has written stays where it is.
MODEL_FILES = ("*.safetensors", "*.safetensors.index.json", "*.py", "config.json")


@dataclass(frozen=True)
class Upload:
    """
    Args:
        repo_id, repo_type: The repository; the type is "model", "dataset" or "space".
        files: Paths in the repository -> a file, or contents made for the repository.
        message: Of the commit.
        note: What it is, in a few words, for an index.
    """

    repo_id: str
    repo_type: str
    files: dict[str, Path | bytes]
    message: str
    note: str = ""

    def describe(self) -> str:
        """What would be uploaded: a line for each file, and the sum."""
        sizes = {name: len(x) if isinstance(x, bytes) else x.stat().st_size for name, x in self.files.items()}
        lines = [f"{self.repo_type} {self.repo_id}", f"  commit: {self.message}"]
        lines += [f"  {size:>13,}  {name}" for name, size in sizes.items()]
        return "\n".join([*lines, f"  {sum(sizes.values()):>13,}  bytes in {len(sizes)} files"])

    def push(self, api: HfApi, revision: str | None = None) -> str:
        """Adds everything in one commit: whatever happens, the repository holds all of it or nothing."""
        operations = [
            CommitOperationAdd(path_in_repo=name, path_or_fileobj=x if isinstance(x, bytes) else str(x))
            for name, x in self.files.items()
        ]
        with self.clear_errors():
            return api.create_commit(
                self.repo_id, operations, commit_message=self.message, repo_type=self.repo_type, revision=revision
            ).commit_url

    def clear_errors(self):
        return clear_errors(self.repo_id, "uploaded", "The repository holds all of it or nothing.")


def written_files(folder: Path, *names: str) -> dict[str, Path]:
    """The files of the model that a run has written into a folder, and those of `names`. A user's are never among."""
    patterns = (*MODEL_FILES, *names)
    return {x: folder / x for x in read_contents(folder) if "/" not in x and any(fnmatchcase(x, y) for y in patterns)}


def plan_run(folder: Path, repo_id: str, summary: dict) -> Upload:
    """A finished run, with its card speaking of the repository."""
    card = (folder / record.CARD_FILE).read_text(encoding="utf-8")
    card = re.sub(r'^checkpoint = ".*"$', f'checkpoint = "{repo_id}"', card, flags=re.MULTILINE)
    files = written_files(folder, record.RUN, record.RESULTS, record.PLOT)
    if "auto_map" not in json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8")):
        run = parse_run(shlex.split(summary["command"])[2:])
        files |= code_of(folder, auto_loader(run.task))
        card = with_code(card, run, repo_id)
    made = {record.CARD_FILE: card.encode(), "LICENSE": licence()}
    split, figures = list(summary["results"].items())[-1]
    metric = summary["metric"]
    note = f"{summary['parameters']:,} parameters; {metric.replace('_', ' ')} {100 * figures[metric]:.1f} % on {split}"
    return Upload(repo_id, "model", files | made, f"{summary['model']} on {summary['task']}", note)


def code_of(folder: Path, loader) -> dict[str, bytes]:
    """The code of a model that lies without it, and the configuration that names it."""
    with TemporaryDirectory() as made:
        loader.from_pretrained(folder).save_pretrained(made)
        paths = [path for path in sorted(Path(made).iterdir()) if path.suffix in (".py", ".json")]
        return {path.name: path.read_bytes() for path in paths}


def licence() -> bytes:
    """The text of this package's licence, under which what it publishes stands too."""
    # An editable installation leaves a second record of the package in its folder, without the text.
    texts = (found.read_text("licenses/LICENSE") for found in distributions(name="mamba3_nplr"))
    return next(text for text in texts if text).encode()


class PushCheckpoints(TrainerCallback):
    """
    Uploads the model of each checkpoint, so that the repository's history has them all. An upload that fails is
    reported and skipped: training continues, and the next one holds all that matters.

    Args:
        names: Further files of a checkpoint to upload.
    """

    def __init__(self, api: HfApi, repo_id: str, names: tuple[str, ...], revision: str | None = None):
        self.api, self.repo_id, self.names, self.revision = api, repo_id, names, revision

    def on_save(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        checkpoint = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        try:
            files = written_files(checkpoint, *self.names)
            upload = Upload(self.repo_id, "model", files, f"Step {state.global_step}")
            upload.push(self.api, self.revision)
        except Exception as error:
            print(f"{checkpoint} could not be uploaded: {error}", file=sys.stderr)
