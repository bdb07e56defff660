"""The checkpoint from which a run resumes, and what keeps it from being mixed with another."""

import json
import sys
from pathlib import Path

from ..modeling.hub.contents import damaged_files, describe_damage, has_checksums
from .arguments import TrainingRun
from .checkpoints import all_checkpoints, last_whole_checkpoint
from .command_line import LAST
from .record import CARD_FILE, MATHEMATICS, PLOT, RESULTS, RUN
from .usage import UsageError

# What a user may have in a folder before the run, and would lose.
OVERWRITTEN = (CARD_FILE, PLOT, "config.json", "model.safetensors", "trainer_state.json")


def find_checkpoint(run: TrainingRun) -> str | None:
    """The checkpoint to resume from. A run is mixed neither with another in its folder nor with other settings."""
    folder, asked = Path(run.args.output_dir), run.args.resume_from_checkpoint
    if asked is None:
        if all_checkpoints(folder) or (folder / RESULTS).exists():
            raise UsageError(
                f"output_dir={str(folder)!r} holds a run. Give --resume_from_checkpoint to resume it, or another "
                "--output_dir."
            )
        lost = [name for name in OVERWRITTEN if (folder / name).exists()]
        if lost:
            raise UsageError(
                f"output_dir={str(folder)!r} holds {', '.join(lost)}, which the run would overwrite. Give another "
                "--output_dir."
            )
        return None
    if asked == LAST:
        checkpoint = find_last(folder)
        if checkpoint is None:
            return None  # the run was ended before its first checkpoint, or starts from scratch
    else:
        checkpoint, damaged = Path(asked), damaged_files(Path(asked))
        if damaged:
            raise UsageError(
                f"resume_from_checkpoint={asked!r} is not a whole checkpoint: {describe_damage(damaged)}. The last one "
                f"in {folder}: {last_whole_checkpoint(folder) or 'none'}."
            )
    if not has_checksums(checkpoint):
        print(f"{checkpoint} is of an earlier version: only the sizes of its files were compared.", file=sys.stderr)
    earlier = json.loads((checkpoint / RUN).read_text(encoding="utf-8"))
    mathematics = earlier.get("mathematics", 1)  # which runs before the number was recorded had
    if mathematics != MATHEMATICS:
        raise UsageError(
            f"{checkpoint} was made by other mathematics ({mathematics}, now {MATHEMATICS}; training/record.py says "
            "what that is). Give another --output_dir, or delete it."
        )
    differences = run.differences(earlier["arguments"])
    if differences:
        raise UsageError(f"{checkpoint} comes from a run with other settings ({'; '.join(differences)}).")
    return str(checkpoint)


def find_last(folder: Path) -> Path | None:
    """The last whole checkpoint of a run; says which later ones are not whole, and why."""
    for checkpoint in reversed(all_checkpoints(folder)):
        damaged = damaged_files(checkpoint)
        if not damaged:
            return checkpoint
        print(f"{checkpoint} is not whole and not used: {describe_damage(damaged)}.", file=sys.stderr)
    if all_checkpoints(folder):
        print(f"{folder} has no whole checkpoint: the run starts over.", file=sys.stderr)
    return None
