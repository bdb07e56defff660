"""The files of results/: what makes each, and what it was measured on."""

import json
from pathlib import Path

from cells import markdown

HERE = Path(__file__).resolve().parent

# Every file in this folder but the programs: what makes it, and what it is.
FILES = {
    "README.md": ("make results", "this page; with `docs/comparison.png`"),
    "words.png": ("make results", "accuracy on group words against length and position"),
    "swaps.png": ("make results", "success in the shell game by number of swaps"),
    "jitter.png": ("make results", "success in the shell game with random timing"),
    "z5.png": ("make results", "the loss of the runs on Z5"),
    "drift.png": ("make results", "how far the exact model drifts with a part changed"),
    "runs/TASK-MODEL-seedSEED.json": (
        "make results/runs/TASK-MODEL-seedSEED.json",
        "one run of the paper; `make reproduce` makes all",
    ),
    "rollouts/TASK-MODEL-seedSEED.json": (
        "make results/rollouts/TASK-MODEL-seedSEED.json",
        "a policy of `checkpoints/` that acts in its environment",
    ),
    "exact/": ("make exact", "runs of words of groups and of the shell game with the exact options"),
    "drift/NAME.json": ("make results/drift/NAME.json", "how far a model of `make exact` drifts in words"),
    "long_games/TASK-MODEL-seedSEED.json": (
        "make results/long_games/TASK-MODEL-seedSEED.json",
        "a policy of `checkpoints/` in very long episodes",
    ),
    "main.json": ("make results/main.json", "the comparison in the README of the repository"),
    "sanity.json": ("make results/sanity.json", "every model on short words"),
    "cpu.json": ("make results/cpu.json", "the block on a processor with each scan; with `docs/cpu.png`"),
    "models.json": ("make results/models.json", "a training step of each model"),
    "trainer.json": ("make results/trainer.json", "the training program beside a bare loop"),
    "instructions.json": ("make results/instructions.json", "instructions of the compiled mixer, counted"),
    "step.json": ("make results/step.json", "a step of a whole policy in a control loop"),
    "busy.json": ("make results/busy.json", "a training step beside other work"),
    "data.json": ("make results/data.json", "batches beside training steps, and the reader of columns"),
    "import_time.json": ("make results/import_time.json", "the import of the package"),
    "gpu.json": ("make results/gpu.json", "the scan on a GPU, which it needs"),
    "kernels.json": ("make results/kernels.json", "registers and spills of the Triton kernels, compiled"),
    "costs.json": ("make results/costs.json", "what a run would take on one core, from measured updates"),
    "runs.txt": (None, "the runs that `make reproduce` works through, in order of priority"),
    "exact.txt": (None, "the runs that `make exact` works through"),
    "paper.json": (None, "the figures of the paper, copied by hand"),
    "remarks.md": (None, "what was tried where runs lie outside the paper's range, by hand"),
}


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
    rows = []
    for name, (command, description) in FILES.items():
        measured = command == f"make results/{name}" and "TASK" not in name
        rows.append([f"`{name}`", f"`{command}`" if command else "", description, origin(name) if measured else ""])
    return markdown(["file", "made by", "what it is", "measured on"], rows)
