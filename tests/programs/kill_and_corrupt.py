"""
Kills training runs at random moments and damages their files at random. Whatever happens, a run that resumes ends with
the same bits and the same files as one that nothing has disturbed, or it is refused with a sentence; and nothing that
was damaged is published.

    PYTHONPATH=tests python tests/programs/kill_and_corrupt.py [--kills N] [--damages N] [--seed N]

Each run is a process that is forked off after torch has been imported, so that one takes a second and not six.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: its threads would not survive a fork

from helpers import training_program
from helpers.training_program import WORDS, log_of
from mamba3_nplr.modeling.hub.contents import read_contents
from mamba3_nplr.training import publish
from mamba3_nplr.training.checkpoints import all_checkpoints, is_whole, last_whole_checkpoint

program = training_program.load_program()
WRITES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate")
GARBAGE = (b"[]", b"null", b"{}", b"{", b"3", b'{"model.safetensors": null}', b"\xff\xfe")
PATIENCE = 600  # seconds until a run counts as hanging


class CampaignError(AssertionError):
    """A law does not hold; the message says which."""


def check(holds: bool, law: str, told: str = "") -> None:
    if not holds:
        raise CampaignError(f"{law}\n{told}".rstrip())


def start(arguments: list[str], told: Path, kill_at: int | None = None) -> int:
    """
    Forks off a run and returns its process id. What it tells goes to a file, with the number of its writes at the end.

    Args:
        kill_at: Number of the write before which it is killed.
    """
    process = os.fork()
    if process:
        return process
    file = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    count = [0]

    def watch(event, values):
        if event in WRITES or (event == "open" and values[2] & (os.O_WRONLY | os.O_RDWR)):
            count[0] += 1
            if count[0] == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    code = 0
    try:
        program.main(arguments)
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        traceback.print_exc()
        code = 70
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(1, f"\n{count[0]}".encode())
    os._exit(code)


def wait(process: int, kill_after: float | None = None) -> int:
    """The exit code of a process, negative if a signal has ended it."""
    begin = time.monotonic()
    while True:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        passed = time.monotonic() - begin
        if passed > (PATIENCE if kill_after is None else kill_after):
            os.kill(process, signal.SIGKILL)
            kill_after = PATIENCE
        time.sleep(0.002)


def run(folder: Path, *options: str) -> tuple[int, str]:
    """A run to its end: its exit code, and what it has told."""
    told = folder.with_suffix(".txt")
    code = wait(start([*WORDS, f"--output_dir={folder}", *options], told))
    return code, told.read_text(errors="replace")


def published(folder: Path) -> bool:
    try:
        publish.plan(folder, "user", allow_uncommitted=True)
    except publish.RefusedError:
        return False
    return True


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def same_result(folder: Path, whole: Path, told: str) -> None:
    for name in ("model.safetensors", "checkpoint-8/model.safetensors"):
        check((folder / name).read_bytes() == (whole / name).read_bytes(), f"{name} has the same bits", told)
    check(log_of(folder) == log_of(whole), "the log is the same", told)
    different = set(files_of(folder)) ^ set(files_of(whole))
    check(not different, f"the files are the same, but for {sorted(different)}", told)
    check(published(folder), "a finished run can be published", told)


class Campaign:
    """
    Args:
        folder: To work in.
        seed: Of the moments and damages.
    """

    def __init__(self, folder: Path, seed: int):
        self.folder, self.random, self.counts = folder, random.Random(seed), Counter()
        self.whole = folder / "whole"
        begin = time.monotonic()
        code, told = run(self.whole)
        check(code == 0, "a run that nothing disturbs ends well", told)
        self.seconds, self.writes = time.monotonic() - begin, int(told.rsplit("\n", 1)[1])

    def kill_runs(self, kills: int) -> None:
        """Up to three kills for each run, half at a moment and half before a write."""
        while self.counts["kills"] < kills:
            folder = self.folder / "killed"
            for _ in range(min(self.random.randint(1, 3), kills - self.counts["kills"])):
                self.kill_once(folder)
            code, told = run(folder, "--resume_from_checkpoint")
            check(code == 0, "a killed run resumes to its end", told)
            same_result(folder, self.whole, told)
            self.counts["killed runs that ended with the same bits"] += 1
            shutil.rmtree(folder)

    def kill_once(self, folder: Path) -> None:
        arguments, told = [*WORDS, f"--output_dir={folder}", "--resume_from_checkpoint"], self.folder / "killed.txt"
        if self.random.random() < 0.5:
            kind, code = "at a moment", wait(start(arguments, told), self.random.uniform(0, self.seconds))
        else:
            kind = "before a write"
            code = wait(start(arguments, told, self.random.randint(1, self.writes)))
        check(code in (0, -signal.SIGKILL), "a run ends well or by the kill", told.read_text(errors="replace"))
        if code == 0:
            return  # it was there before the kill
        self.counts["kills"] += 1
        self.counts[f"kills {kind}"] += 1
        checkpoints = all_checkpoints(folder)
        self.counts[f"kills after {len(checkpoints)} checkpoints"] += 1
        check(all(map(is_whole, checkpoints)), "what looks like a checkpoint is whole", str(files_of(folder)))
        if folder.exists() and published(folder):
            found = (folder / "model.safetensors").read_bytes()
            check(found == (self.whole / "model.safetensors").read_bytes(), "what can be published is finished")

    def damage_runs(self, damages: int) -> None:
        for number in range(damages):
            folder = self.folder / "damaged"
            shutil.copytree(self.whole, folder)
            if number % 2:
                self.damage_run(folder)
            else:
                self.damage_checkpoint(folder, explicit=number % 4 == 2)
            self.counts["damages"] += 1
            shutil.rmtree(folder)

    def damage_run(self, folder: Path) -> None:
        name = self.random.choice([*read_contents(folder), "contents.json"])
        kind = self.damage(folder / name)
        self.counts[f"run: {kind}"] += 1
        check(not published(folder), f"{name}, {kind}: is not published")
        code, told = run(folder, "--resume_from_checkpoint")
        check(code == 0, f"{name}, {kind}: the run repairs itself", told)
        same_result(folder, self.whole, told)

    def damage_checkpoint(self, folder: Path, explicit: bool) -> None:
        """One file of the last checkpoint, and now and then one of the checkpoint before."""
        last, both = last_whole_checkpoint(folder), self.random.random() < 0.25
        for checkpoint in all_checkpoints(folder)[-1 - both :]:
            name = self.random.choice([*read_contents(checkpoint), "contents.json"])
            kind = self.damage(checkpoint / name)
            self.counts[f"checkpoint: {kind}"] += 1
        if explicit:
            code, told = run(folder, f"--resume_from_checkpoint={last}")
            check(code == 2 and "is not a whole checkpoint" in told, f"{name}, {kind}: is refused", told)
            check("Traceback" not in told, f"{name}, {kind}: is refused with a sentence", told)
            self.counts["refused when asked for by name"] += 1
        code, told = run(folder, "--resume_from_checkpoint")
        check(code == 0 and "Traceback" not in told, f"{name}, {kind}: the run resumes", told)
        check(f"{last} is not whole" in told, f"{name}, {kind}: it is told", told)
        check(("starts over" if both else "Resumes from") in told, f"{name}, {kind}: resumes or starts over", told)
        same_result(folder, self.whole, told)
        self.counts["started over" if both else "resumed from the checkpoint before"] += 1

    def damage(self, path: Path) -> str:
        """Damages a file; returns how."""
        content = path.read_bytes()
        position, length = self.random.randrange(len(content)), len(content)
        kinds = {
            "a bit": content[:position]
            + bytes([content[position] ^ 1 << self.random.randrange(8)])
            + content[position + 1 :],
            "cut short": content[:position],
            "zeros": bytes(length),
            "noise": self.random.randbytes(length),
            "longer": content + b"\0",
            "other JSON": self.random.choice(GARBAGE),
            "deleted": None,
        }
        kind = self.random.choice(list(kinds))
        if kinds[kind] is None:
            path.unlink()
        else:
            path.write_bytes(kinds[kind])
        return kind


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="kill_and_corrupt.py", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--kills", type=int, default=30, help="(default: %(default)s)")
    parser.add_argument("--damages", type=int, default=30, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of moments and damages (default: %(default)s)")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(Path(folder).resolve(), given.seed)
        try:
            campaign.kill_runs(given.kills)
            campaign.damage_runs(given.damages)
        except CampaignError as error:
            sys.exit(f"{dict(campaign.counts)}\nDoes not hold: {error}")
        finally:
            print("\n".join(f"{count:5}  {name}" for name, count in sorted(campaign.counts.items())))


if __name__ == "__main__":
    main()
