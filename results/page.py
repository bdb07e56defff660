"""
The page of results: the paper's tables with our runs, from what is in this folder alone.

    python results/page.py results/README.md
"""

import argparse
import re
from pathlib import Path

import exact_tables
import tables
from cells import Cells, Place, markdown, read_costs
from claims import CLAIMS, Claim
from files import files_table, origin
from kept import CONFIGURATION, all_kept
from mamba3_nplr.datasets_scripts.tasks import make_task
from mamba3_nplr.training.record import mean_figure
from paper import ABOVE, BELOW, CONDITIONS, PAPER_NAMES, Paper
from records import Records, read_records

HERE = Path(__file__).resolve().parent

READING = """\
Figures are per cent: ours, the mean over seeds with their number in brackets, and after the slash the paper's. An empty
cell has in italics the minutes that a run would take on one core ({processor}), without its tests.

{above} and {below} mark what lies above or below the paper's range. Where the paper gives the smallest and the largest
of its runs, in whichever table or sentence, these are the range. Where it gives only a mean, the spread of its seeds is
not known, and the range is as far from the mean as two draws of the test words or episodes take one model 19 times in
20. A mark is in brackets where luck may be the reason: that of the seed, where the paper gives only a mean and ours is
one seed, or several of which some reach the range; or that of the test words, where these alone may take a figure so
far from the paper's smallest or largest. And one in 20 of the figures beside a mean is marked by chance."""

SIZES = """\
Of the models for the shell game, computed from the configurations; ≠ marks what does not round to the paper's. The
state is that of the recurrence. Beside it a model keeps what the next step needs of the last one: in Mamba-3 its B, u
and phases; in Gated DeltaNet the last three tokens of the convolution, for which the paper counts four (2,048); in IDS4
a power of two by which its product is scaled."""

DIFFERENCES = """\
Optimizer, learning rate, schedule, clipping and the last checkpoint are the paper's. Where the paper says nothing, the
choice is marked (ours):

- **Models:** a LayerNorm before each block, a residual connection and a last LayerNorm around Mamba-3, with and without
  reflections, which give the paper's parameter counts (ours); initial weights, the reflection's first strength of 1
  among them (ours). The other models are our own code of their equations, with the paper's sizes.
- **Seeds:** ours are as many as each cell says, the paper's three, and five in its curves on S5.
- **Precision:** float32 (ours)."""

DATA = {
    "z5": "none",
    "s5_generators": "none",
    "shell": "slots at x = -1, -0.5, 0, 0.5, 1; a cosine path, a lift of 0.5, the lifted cup at random; a demonstrator"
    " that rests at the centre until the cue (ours)",
    "shell_curriculum": "as `shell`",
    "shell_jitter": "as `shell`",
}

MODELS = """\
Weights, configurations and cards of the best and the worst seed, by the mean over all test sets; after
`import mamba3_nplr` they load as any other, such as by
`AutoModelForSequenceClassification.from_pretrained("checkpoints/...")`."""

EXACT = """\
Beyond the paper: `nplr_exact`, trained by `--preset exact` on words of up to 64 letters, three minutes a run. Final
accuracy on 512 words of each length, the mean over seeds with their number; in square brackets the smallest and the
largest. The seeds are others than those that the recipe was found with. With 100,000 letters there are 128 words, and
in brackets the number of seeds that have read them (`make results/drift/NAME.json`). [The page on it](../docs/exact.md)
says what makes it last, and where it does not. `make exact` trains all runs of this section."""

PEERS = """\
The other models with the same words and updates, learning rate and schedule, with and without label smoothing and the
term by which a state lasts:"""

PARTS = """\
With a part changed, one seed. *Unexplained* is the median over the heads that are read of what label and token do not
say of what they read, after words of 64 and of 8,192 letters; *growth* the size of the largest state after 8,192
letters over that after 64; *mirrors* and *decay* the largest distance, over letters and heads, of a reflection from a
whole one or none, and of a decay from 1; *a letter* and *two* what angles have wrong, in radians a letter, the median
over heads: how far a state is from where it was after the worst letter, or the worst two in turn, as often as its order
says. The one is of phases and of each mirror by itself, the other of the angles between mirrors as well. Both count all
that a state holds, read or not: a small number shows exact angles, a large one not that they are wrong.
`make results/drift/NAME.json` measures them."""

EPISODES = """\
The shell game, trained with `--preset exact_episodes` on episodes of 16 windows with at most 16 swaps. Success by the
number of windows: with fixed timing (`shell`) they hold any number of swaps, with random timing (`shell_jitter`) all of
them hold one."""

LONG_GAMES = """\
Policies in 128 episodes with far more windows, with fixed and with random timing whatever they were trained with, and
in standard episodes with a wait of so many frames more before the cue. *Moved* is how far what heads read is then from
where it was before that wait, as a part of its variance over episodes, the median over heads: 0 is still, 2 is lost.
`make results/long_games/NAME.json` measures them."""

ACTING = """\
Beyond the paper: `shell_hand`, where a hand that an action moves hides the cups it covers, and `shell_pixels`, where
the game is seen as pictures of 3 x 32 x 64 bytes ([what they are](../docs/environment.md#actions-that-matter)). One
seed each, with the paper's training; on pixels with 9,000 updates, over 60 % of which the largest number of swaps grows
from 1 to 16. *Recorded* are 4,096 episodes with the recorded hand, if there is one; *its own* the first 1,024 of them,
in which the policy sees what its own actions lead to. K is the number of swaps in standard episodes.
`make results/rollouts/TASK-MODEL-seedSEED.json` lets a policy act."""

COMMANDS = """\
```bash
make reproduce OPTIONS=--dry_run   # how long each run of results/runs.txt would take here
make reproduce                     # trains those that are open; RUNS='z5-*-seed0' some of them
make results                       # this page and its figures from what is in results/runs
make results/costs.json            # measures what the empty cells cost
```

[The page on training](../docs/training.md#the-papers-runs) has more: several GPUs, Slurm, single runs."""


def summary(cells: Cells) -> str:
    """What holds and what does not, and how much of the paper is covered."""
    groups = {True: [], False: [], None: []}
    for claim in CLAIMS:
        holds = claim.holds(cells.records)
        evidence = f" ({claim.evidence(cells.records, cells.paper)})" if holds is not None else ""
        groups[holds].append(claim.text + evidence + (otherwise(claim, cells) if holds is False else ""))
    names = {True: "What the paper says and holds here", False: "What does not hold here", None: "What is not run yet"}
    lines = [f"**{names[key]}:** {'; '.join(group)}." for key, group in groups.items() if group]
    marks = list(cells.marks.values())
    outside = [mark for mark in marks if mark]
    by_seed = [mark for mark in outside if mark.startswith("(")]
    lines.append(
        f"**How much:** of the {len(marks) + len(cells.empty):,} figures of the paper here we have {len(marks):,}; "
        f"{len(marks) - len(outside):,} lie in its range, {len(outside) - len(by_seed):,} outside, and "
        f"{len(by_seed):,} outside where luck may be the reason."
    )
    return "\n\n".join(lines)


def otherwise(claim: Claim, cells: Cells) -> str:
    """With which of the settings that the paper leaves open, or others, a claim holds that else does not."""
    found = claim.settings_with_which_it_holds(cells.records)
    figures = [f"{changes} ({claim.evidence(records, cells.paper)})" for changes, records in found.items()]
    return f", but does with {', and with '.join(figures)}" if figures else ""


def outside_section(cells: Cells, remarks: dict[str, str]) -> str:
    """Every mark, by task and model, with what was tried."""
    kinds = {}
    for place, mark in cells.marks.items():
        if mark:
            kinds.setdefault((place.task, place.model), []).append(f"{name_of(place)} {mark}")
    for key in remarks:
        kinds.setdefault(tuple(key.split("-")), [])
    if not kinds:
        return "Nothing."
    parts = []
    for (task, model), marked in kinds.items():
        places = f": {', '.join(marked)}" if marked else ""
        said = remarks.get(f"{task}-{model}") or tried(cells, task, model, marked)
        parts.append(f"**`{task}`, {tables.title(model)}**{places}.\n{said}".strip())
    return "\n\n".join(parts)


def tried(cells: Cells, task: str, model: str, marked: list[str]) -> str:
    """What there is to say of a model for which nobody wrote a remark."""
    others = [changes for name, other, changes in cells.records.variations if (name, other) == (task, model)]
    if others:
        return f"Tried: {'; '.join(others)} ([below](#other-settings))."
    return "No other settings were tried." if any(BELOW in mark for mark in marked) else ""


def name_of(place: Place) -> str:
    split = place.split.removeprefix("test_")
    return split if place.swaps is None else f"{split} K = {place.swaps}"


def read_remarks(path: Path) -> dict[str, str]:
    """The sections of a page by their headings."""
    parts = re.split(r"^## (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {name.strip(): text.strip() for name, text in zip(parts[::2], parts[1::2], strict=True)}


def differences_table(cells: Cells) -> str:
    rows = []
    for task, paper in cells.paper.tables["training"].items():
        runs = [run for model in PAPER_NAMES for run in cells.records.of(task, model)]
        batch, tests, updates = paper["batch_size"], paper["tests"], {None: paper["updates"]} | paper.get("except", {})
        theirs = [updates.get(run["model"], updates[None]) for run in runs]
        rows.append(
            [
                f"task `{task}`",
                difference([(run["batch_size"], batch) for run in runs], f"{batch:,}"),
                difference(
                    [(run["updates"], count) for run, count in zip(runs, theirs, strict=True)],
                    ", ".join(f"{count:,}{f' for `{model}`' if model else ''}" for model, count in updates.items()),
                ),
                DATA[task],
                difference([(make_task(task).test_size, tests)], f"{tests:,}"),
            ]
        )
    return markdown(["", "batch", "updates", "words or episodes", "test words or episodes"], rows)


def difference(pairs: list[tuple[int, int]], paper: str) -> str:
    """
    Args:
        pairs: What a run of ours has, and what that of the paper.
        paper: The paper's in words.
    """
    if not pairs:
        return f"no run yet ({paper})"
    ours = sorted({ours for ours, theirs in pairs if ours != theirs})
    return f"{', '.join(f'{x:,}' for x in ours)}, the paper's {paper}" if ours else f"none ({paper})"


def runs_table(records: Records) -> str:
    rows = []
    everything = [run for runs in (*records.runs.values(), *records.variations.values()) for run in runs]
    for run in sorted(everything, key=lambda run: run["name"]):
        seconds, git = run.get("seconds"), run["environment"].get("git")
        rows.append(
            [
                f"[{run['name']}](runs/{run['name']}.json)",
                f"{run['updates']:,}",
                "" if run["last_loss"] is None else f"{run['last_loss']:.2g}",
                f"{seconds / 60:.0f}" if seconds else "not recorded",
                run["environment"].get("processor") or run["environment"]["machine"],
                git[:10] + "+" * git.endswith("+") if git else "",
            ]
        )
    return markdown(["run", "updates", "last loss", "minutes", "processor", "revision"], rows)


def listed_runs() -> list[str]:
    lines = (HERE / "runs.txt").read_text(encoding="utf-8").splitlines()
    return [line.split()[0] for line in lines if line.strip() and not line.startswith("#")]


def make_page() -> str:
    records = read_records(HERE / "runs")
    cells = Cells(records, Paper(HERE / "paper.json"), read_costs(HERE / "costs.json"))
    sections = {
        "Group words": tables.words_table(cells),
        "Longer words": longer_words(cells),
        "Parameters and states": f"{SIZES}\n\n{tables.sizes_table(cells)}",
        "The shell game": tables.episodes_table(cells),
        "The shell game by number of swaps": swaps_section(cells),
        "The shell game with random timing": f"{tables.jitter_table(cells)}\n\n![Random timing](jitter.png)",
        "Words of any length": exact_section(read_records(HERE / "exact")),
        "Policies that act": f"{ACTING}\n\n{tables.acting_table(records, HERE / 'rollouts')}",
        "Outside the paper's range": outside_section(cells, read_remarks(HERE / "remarks.md")),
        "Other settings": "\n\n".join([*tables.variations_tables(records), "![Loss on Z5](z5.png)"]),
        "Differences from the paper": f"{differences_table(cells)}\n\n{DIFFERENCES}",
        "What is there and what is open": coverage(cells),
        "Commands": COMMANDS,
        "The runs": runs_section(records),
        "Trained models": models_section(),
        "The files of this folder": files_table(),
    }
    processor = origin("costs.json").partition(",")[0]
    reading = READING.format(processor=processor, above=ABOVE, below=BELOW)
    page = [f"## {heading}\n\n{text}" for heading, text in sections.items()]
    return "\n\n".join(["# Results", summary(cells), reading, *page]) + "\n"


def longer_words(cells: Cells) -> str:
    others = tables.other_curves_table(cells)
    return "\n\n".join(
        [
            "Final accuracy; in square brackets the smallest and the largest of several seeds.",
            tables.curves_table(cells),
            *(["The other models, of which the paper has curves at most:", others] if others else []),
            "![Accuracy against length and position](words.png)",
        ]
    )


def swaps_section(cells: Cells) -> str:
    parts = ["After direct training."]
    for split, condition in CONDITIONS.items():
        parts += [
            f"In {condition} episodes, {make_task('shell').test_sizes[split]} windows:",
            tables.swaps_table(cells, split),
        ]
    return "\n\n".join([*parts, "![Success by number of swaps](swaps.png)"])


def exact_section(records: Records) -> str:
    parts = [EXACT, exact_tables.groups_table(records, HERE / "drift")]
    for text, table in (
        (PEERS, exact_tables.models_table(records)),
        (PARTS, exact_tables.parts_table(records, HERE / "drift")),
    ):
        parts += [text, table or "None is run yet."]
    parts.append("![What is unexplained, by length](drift.png)")
    for text, table in (
        (EPISODES, exact_tables.episodes_table(records)),
        (LONG_GAMES, exact_tables.long_games_table(HERE / "long_games")),
    ):
        parts += [text, table or "None is run yet."]
    return "\n\n".join(parts)


def coverage(cells: Cells) -> str:
    table, minutes = tables.coverage_table(cells, listed_runs())
    return f"Seeds of `runs.txt`. Those that are open would take {minutes / 60:,.0f} hours of one core.\n\n{table}"


def runs_section(records: Records) -> str:
    text = "Each file has all figures, the command, revision and versions."
    if records.left_out:
        text += f" Left out, for other mathematics made them: {', '.join(records.left_out)}."
    return f"{text}\n\n{runs_table(records)}"


def models_section() -> str:
    """The models that are kept, and those that would be."""
    rows = []
    for name, (run, which) in all_kept(HERE).items():
        there = (HERE.parent / "checkpoints" / name / CONFIGURATION).exists()
        place = f"[{name}](../checkpoints/{name})" if there else f"{name}: not kept"
        rows.append([place, which, f"{100 * mean_figure(run):.2f}"])
    return f"{MODELS}\n\n{markdown(['model', 'which', 'mean over test sets'], rows)}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Writes the page of results from what is in results/.")
    parser.add_argument("page", type=Path, help="file to write, such as results/README.md")
    given = parser.parse_args(arguments)
    given.page.write_text(make_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
