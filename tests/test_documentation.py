"""The Python examples of the README and of every page in docs/ run, page by page, with a Hub to push to."""

import json
import pkgutil
import re
import shlex
import subprocess
import textwrap
from importlib.util import find_spec

import numpy as np
import pytest

from helpers.hub_client import TOKENS, run_script
from helpers.hub_server import HubServer
from helpers.places import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("mamba3_nplr", "configuration", "modeling", "datasets_scripts", "training")

# Each page has a namespace and a folder of its own, so that it can be read, and tried, alone.
SESSION = textwrap.dedent(
    """
    import json, os, torch

    root, pages = os.getcwd(), {}
    for page, blocks in json.load(open("blocks.json")).items():
        os.chdir(os.path.join(root, page))
        torch.manual_seed(0)
        pages[page] = {}
        for block in blocks:
            exec(compile(block, page, "exec"), pages[page])
    """
)
CHECKS = textwrap.dedent(
    """
    assert pages["README"]["action"].shape == (2,) and pages["README"]["actions"].shape == (8, 2)
    assert pages["tasks"]["batch"]["labels"].shape == (64, 64)
    assert pages["environment"]["successes"].shape == (64,) and pages["environment"]["pixels"].shape == (3, 32, 64)
    own = pages["fine_tuning"]
    os.chdir(os.path.join(root, "fine_tuning"))
    track = own["pipeline"]("state-tracking", model="switch/checkpoint-60")
    for row in own["words"]:
        assert " ".join(entry["label"] for entry in track(row["symbols"])) == row["labels"], row
    assert own["policy"].config.observation_size == 9 and own["policy"].config.action_size == 3
    pulled = pages["hub"]
    assert type(pulled["policy"]).__name__ == "Mamba3NPLRForBehaviorCloning"
    assert len(pulled["words"]) == 2 and pulled["words"].column_names == ["symbols", "labels"]
    """
)


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def losses(folder):
    [state] = folder.glob("checkpoint-60/trainer_state.json")
    return [entry["loss"] for entry in json.loads(state.read_text())["log_history"] if "loss" in entry]


def test_the_examples_run(tmp_path):
    pages = {page.stem: blocks(page, "python") for page in PAGES}
    pages = {page: found for page, found in pages.items() if found}
    assert set(pages) == {"README", "environment", "fine_tuning", "hub", "inference", "tasks"}
    for page in pages:
        (tmp_path / page).mkdir()
    (tmp_path / "README" / "checkpoints").symlink_to(ROOT / "checkpoints")
    [table] = blocks(ROOT / "docs" / "fine_tuning.md", "csv")
    own = tmp_path / "fine_tuning"
    (own / "words.csv").write_text(table)
    observations = np.random.default_rng(0).normal(size=(4, 20, 9))
    np.save(own / "observations.npy", observations)
    np.save(own / "actions.npy", observations[..., :3].cumsum(1) / 4)
    (tmp_path / "blocks.json").write_text(json.dumps(pages))
    with HubServer(tmp_path / "hub_server", TOKENS) as hub:
        done = run_script(hub, tmp_path, SESSION + CHECKS)
    assert "[0, 2, 3, 1, 4]\ntorch.Size([2, 120]) torch.Size([2, 64, 120])" in done.stdout
    assert "'token': 'press', 'element'" in done.stdout and "'label': 'LABEL_" in done.stdout
    assert hub.repository("user/policy").private and "mamba3_nplr_pipelines.py" in hub.repository("user/policy").files()
    assert hub.repository("user/words", "datasets").private
    for folder in ("switch", "policy"):  # it learns
        found = losses(own / folder)
        assert found[-1] < 0.5 * found[0], found


@pytest.mark.parametrize("page", [*PAGES, ROOT / "results" / "README.md"], ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    """Files that a page links to are there, and headings too."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        name, _, heading = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), f"{page.name} links to {target}"
        if heading:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in [re.sub(r"[^\w -]", "", x).lower().replace(" ", "-") for x in headings], target


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.stem)
def test_files_and_modules_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    places = "|".join((*FOLDERS, "benchmarks", "demo", "docs", "results", "tests"))
    for name in re.findall(rf"(?<![\w/.])(?:{places})/[\w/.-]+\.\w+", text):
        assert (ROOT / name).exists() or name.startswith("results/runs/"), name
    for name in re.findall(r"\bmamba3_nplr(?:\.\w+)+", text):
        assert pkgutil.resolve_name(name), name


def test_the_page_of_the_architecture_has_every_file():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = set()
    for folder, section in re.findall(r"^### `([\w/]+)/`\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL):
        cells = " ".join(line.split("|")[1] for line in section.splitlines() if line.startswith("|"))
        listed |= {f"{folder}/{name}" for name in re.findall(r"`([\w.]+)`", cells)}
    folders = [ROOT / folder for folder in (*FOLDERS[1:], "demo")]
    files = {path for folder in folders for kind in ("py", "h", "cpp") for path in folder.rglob(f"*.{kind}")}
    assert listed == {str(path.relative_to(ROOT)) for path in files if path.name != "__init__.py"}


def test_commands_that_sources_name_exist():
    folders = [ROOT / folder for folder in (*FOLDERS, "benchmarks", "demo", "results", "tests")]
    sources = [path for folder in folders for path in folder.rglob("*.py")]
    for path in (*sources, ROOT / "train_hf.py", ROOT / "Makefile"):
        text = path.read_text(encoding="utf-8")
        modules = re.findall(r"-m (mamba3_nplr(?:\.\w+)+)", text)
        programs = re.findall(r"python ((?:benchmarks|demo|results|tests)/[\w/]+\.py)", text)
        missing = [name for name in modules if find_spec(name) is None]
        missing += [name for name in programs if not (ROOT / name).exists()]
        assert not missing, path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_make_has_the_targets_that_a_page_names(page):
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"^make ([\w/.-]+)", "\n".join(blocks(page, "bash")), re.MULTILINE)
    for target in {*targets, *re.findall(r"`make ([\w/.-]+)", text)}:
        subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, check=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_trainings_that_a_page_names_could_start(page, tmp_path, monkeypatch):
    """Those of one process that need no file; only their arguments are looked at."""
    from mamba3_nplr.training.arguments import parse_run

    monkeypatch.chdir(tmp_path)
    for line in re.findall(r"^python train_hf.py (--(?!config).*)", "\n".join(blocks(page, "bash")), re.MULTILINE):
        assert parse_run(shlex.split(line, comments=True)).args.max_steps


WITHOUT_COMMAND = ["runs.txt", "exact.txt", "paper.json", "remarks.md"]


def test_every_result_is_listed_with_the_command_that_makes_it():
    page = ROOT / "results" / "README.md"
    section = page.read_text(encoding="utf-8").partition("## The files of this folder")[2]
    listed = dict(re.findall(r"^\| `([^`]+)` \| (?:`([^`]+)`)?", section, re.MULTILINE))
    files = {path.name for path in page.parent.iterdir() if path.suffix not in ("", ".py")}
    assert files <= set(listed)
    assert [name for name, command in listed.items() if not command] == WITHOUT_COMMAND
    for name, command in listed.items():
        if command:
            name, command = (x.replace("TASK-MODEL-seedSEED", "z5-nplr-seed7") for x in (name, command))
            planned = subprocess.run([*command.split(), "-n"], cwd=ROOT, capture_output=True, text=True, check=True)
            assert f"results/{name}" in planned.stdout, command


def test_the_readme_is_read_in_one_sitting():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 200
