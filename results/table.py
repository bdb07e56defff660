"""
The runs in results/runs beside the paper's figures, and what makes each file in results/, as Markdown.

    python results/table.py > results/README.md
"""

import json
import re
import statistics
from collections import defaultdict
from pathlib import Path

from mamba3_nplr.datasets_scripts.tasks import make_task
from mamba3_nplr.training.record import MATHEMATICS

HERE = Path(__file__).parent

# What the paper calls a model.
PAPER_NAMES = {
    "mamba3": "Mamba-3 (1 block)",
    "mamba3_2": "Mamba-3 (2 blocks)",
    "mamba3_4": "Mamba-3 (4 blocks)",
    "nplr": "Mamba-3 + NPLR",
    "nplr_norope": "Mamba-3 + NPLR without RoPE",
    "deltaproduct_2": "DeltaProduct (n_h=2)",
    "deltaproduct_4": "DeltaProduct (n_h=4)",
    "gdp_2": "GDP (n_h=2)",
    "gdp_4": "GDP (n_h=4)",
    "gdn": "Gated DeltaNet (beta<2)",
    "ids4": "IDS4",
}

INTRODUCTION = """# Results

In per cent: ours (the mean over seeds, with their number if there are several) and, after the slash, the paper's figure
where it has one. Each file in `runs/` holds one run with all its figures, the command that made it and the versions it
ran with. The [other files](#the-files-of-this-folder) are listed at the end.
"""

# Every file in this folder but the programs: what makes it, and what it is.
FILES = {
    "README.md": ("make results", "this page; with `docs/comparison.png`"),
    "z5.png": ("make results", "the loss of the runs on Z5"),
    "runs/TASK-MODEL-seedSEED.json": (
        "make results/runs/TASK-MODEL-seedSEED.json",
        "one run of the paper; `make reproduce` makes all",
    ),
    "main.json": ("make results/main.json", "the comparison in the README of the repository"),
    "sanity.json": ("make results/sanity.json", "every model on short words"),
    "cpu.json": ("make results/cpu.json", "the block on a processor with each scan; with `docs/cpu.png`"),
    "models.json": ("make results/models.json", "a training step of each model"),
    "trainer.json": ("make results/trainer.json", "the training program beside a bare loop"),
    "step.json": ("make results/step.json", "a step of a whole policy in a control loop"),
    "busy.json": ("make results/busy.json", "a training step beside other work"),
    "data.json": ("make results/data.json", "batches beside training steps, and the reader of columns"),
    "import_time.json": ("make results/import_time.json", "the import of the package"),
    "gpu.json": ("make results/gpu.json", "the scan on a GPU, which it needs"),
    "kernels.json": ("make results/kernels.json", "registers and spills of the Triton kernels, compiled"),
    "runs.txt": (None, "the runs that `make reproduce` works through, in order of priority"),
    "paper.json": (None, "the figures of the paper, copied by hand"),
}


def read_runs() -> dict[tuple[str, str], dict[str, list[dict]]]:
    """All runs by today's mathematics, by task with what was changed of it and of the model, and by model."""
    runs = defaultdict(lambda: defaultdict(list))
    for path in sorted((HERE / "runs").glob("*.json")):
        summary = json.loads(path.read_text(encoding="utf-8"))
        if summary.get("mathematics", 1) != MATHEMATICS:  # those without a number are of the first
            continue
        runs[summary["task"], changed_settings(summary)][summary["model"]].append(summary)
    return runs


def changed_settings(summary: dict) -> str:
    """What the command of a run says of its task and model, where that is not the task's default."""
    default = make_task(summary["task"])
    of_task, of_model = (re.findall(rf"--{part}\.(\w+) (\S+)", summary["command"]) for part in ("task", "model"))
    of_task = [(name, value) for name, value in of_task if str(getattr(default, name)) != value]
    return ", ".join(f"{name} {value}" for name, value in [*of_task, *of_model])


def of_words(paper: dict, group: str, name: str, size: str) -> float | None:
    """The paper's figure for a model on words of a length, where it has one."""
    for title, rows in paper["length_extrapolation_final_accuracy"].items():
        if title.startswith(f"{group} {name} ("):
            return {str(row[0]): row[1] for row in rows}.get(size)
    table, column = paper["group_words_final_accuracy"], f"{group} L={size}"
    return table[name][table["columns"].index(column)] if name in table and column in table["columns"] else None


def of_episodes(paper: dict, training: str, name: str, size: str) -> float | None:
    """The same on standard or extended episodes, after direct training or with a curriculum."""
    table, column = paper["shell_overall_success"], f"{size} {training}"
    return table[name][table["columns"].index(column)] if name in table and column in table["columns"] else None


def of_jitter(paper: dict, name: str, size: str) -> float | None:
    """The same on episodes of random timing with so many swaps."""
    figures = paper["shell_jitter_success"].get(name, {})
    return 100.0 if int(size) <= figures.get("perfect_through", 0) else figures.get(f"K={size}")


# How the paper's figure for a model, by the name that it has there, and a size of test sequences is found.
PAPER_FIGURES = {
    "z5": lambda paper, name, size: of_words(paper, "Z5", name, size),
    "s5_generators": lambda paper, name, size: of_words(paper, "S5", name, size),
    "shell": lambda paper, name, size: of_episodes(paper, "direct", name, size),
    "shell_curriculum": lambda paper, name, size: of_episodes(paper, "curriculum", name, size),
    "shell_jitter": of_jitter,
}


def paper_figure(paper: dict, task: str, model: str, split: str) -> float | None:
    """The paper's figure for a model on a test set, if there is one."""
    find = PAPER_FIGURES.get(task)
    return find(paper, PAPER_NAMES.get(model), split.removeprefix("test_")) if find else None


def cell(ours: list[float], paper: float | None) -> str:
    mean = f"{100 * statistics.mean(ours):.2f}" + (f" ({len(ours)})" if len(ours) > 1 else "")
    return mean if paper is None else f"{mean} / {paper:.2f}"


def task_table(task: str, title: str, models: dict[str, list[dict]], paper: dict) -> str:
    splits = list(next(iter(models.values()))[0]["results"])
    lines = [f"| model | seeds | {' | '.join(splits)} |", "| --- " * (len(splits) + 2) + "|"]
    for model, runs in models.items():
        cells = []
        for split in splits:
            ours = [run["results"][split][run["metric"]] for run in runs if split in run["results"]]
            cells.append(cell(ours, paper_figure(paper, task, model, split)) if ours else "")
        lines.append(f"| {model} | {', '.join(str(run['seed']) for run in runs)} | {' | '.join(cells)} |")
    return f"## {title}, {next(iter(models.values()))[0]['metric'].replace('_', ' ')}\n\n" + "\n".join(lines)


def has_swaps(run: dict) -> bool:
    return "success_by_swaps" in run["results"].get("test_standard", {})


def swaps_table(task: str, title: str, models: dict[str, list[dict]], paper: dict) -> str:
    """Success for each number of swaps of the standard episodes, of which the paper has five after direct training."""
    reference = paper["shell_standard_by_swaps"]
    counts = [name.removeprefix("K=") for name in reference["columns"] if name.startswith("K=")]
    lines = [f"| model | {' | '.join(f'K = {count}' for count in counts)} |", "| --- " * (len(counts) + 1) + "|"]
    for model, runs in models.items():
        figures = reference.get(PAPER_NAMES.get(model)) if task == "shell" else None
        cells = []
        for column, count in enumerate(counts):
            ours = [run["results"]["test_standard"]["success_by_swaps"][count] for run in runs]
            cells.append(cell(ours, figures[column] if figures else None))
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return f"## {title}, success by number of swaps (standard episodes)\n\n" + "\n".join(lines)


def origin(name: str) -> str:
    """What a file was measured on and with which code, as far as it says so."""
    if not (HERE / name).exists():
        return "not measured yet"
    content = json.loads((HERE / name).read_text(encoding="utf-8"))
    # A comparison says it of each model.
    parts = [part for part in (content, *content.values()) if isinstance(part, dict)]
    found = next((part["environment"] for part in parts if "environment" in part), None)
    if found is None:
        return "not recorded"
    git = found["git"]
    revision = f"revision {git[:10]}{'+' * git.endswith('+')}" if git else "no revision"
    return f"{found.get('processor') or found['machine']}, torch {found['torch']}, {revision}"


def files_table() -> str:
    lines = ["| file | made by | what it is | measured on |", "| --- | --- | --- | --- |"]
    for name, (command, description) in FILES.items():
        measured = command == f"make results/{name}" and "TASK" not in name
        made_by = f"`{command}`" if command else ""
        lines.append(f"| `{name}` | {made_by} | {description} | {origin(name) if measured else ''} |")
    return "## The files of this folder\n\n" + "\n".join(lines)


def main() -> None:
    paper = json.loads((HERE / "paper.json").read_text(encoding="utf-8"))
    parts = [INTRODUCTION]
    for (task, settings), models in read_runs().items():
        title = f"{task} ({settings})" if settings else task
        parts.append(task_table(task, title, models, paper))
        if all(has_swaps(run) for runs in models.values() for run in runs):
            parts.append(swaps_table(task, title, models, paper))
    parts.append(files_table())
    print("\n\n".join(part.strip() for part in parts))


if __name__ == "__main__":
    main()
