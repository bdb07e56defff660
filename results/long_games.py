"""
How a policy of the shell game fares in episodes far longer than those of its training: with more windows, and with a
wait before the cue in which nothing moves.

    python results/long_games.py checkpoints/shell_jitter-nplr_exact-seed24 --out results/long_games/NAME.json
"""

import copy
import statistics
from pathlib import Path

import torch
from tqdm.auto import tqdm

from drift import Reads, measure, pieces
from mamba3_nplr import AutoModelForBehaviorCloning
from mamba3_nplr.datasets_scripts.shell_game_episodes import RESPONSE_FRAMES, chosen_slot
from mamba3_nplr.datasets_scripts.tasks import make_task
from mamba3_nplr.training.evaluation import evaluate

WINDOWS = (16, 64, 256, 1_024)
WAITS = (0, 100, 1_000, 10_000)  # frames
EPISODES = 128


def success_by_windows(policy, windows=WINDOWS) -> dict[str, list[float]]:
    """With fixed and with random timing."""
    found = {}
    for name in ("shell", "shell_jitter"):
        task = make_task(name, test_windows=windows, test_size=EPISODES)
        found[name] = [figures["success"] for figures in evaluate(policy, task, progress=True).values()]
    return found


@torch.no_grad()
def success_after_waits(policy, waits=WAITS, episodes=EPISODES) -> dict[str, list[float]]:
    """
    Of standard episodes whose last wait is longer by so many frames: success, and how far what heads read has moved by
    then, as a part of its variance over episodes, the median over heads.
    """
    task = make_task("shell", test_size=episodes)
    rows = task.rows("test_standard", 0, episodes)
    observations = torch.from_numpy(rows["observations"])
    cue = observations.shape[1] - RESPONSE_FRAMES
    still, response = observations[:, cue - 1 : cue], observations[:, cue:]
    reads, state, waited, first = Reads(policy), None, 0, None
    found = {"after_waits": [], "moved": []}
    for wait in tqdm(waits, unit="wait", disable=None):
        parts = [observations[:, :cue]] if state is None else []
        for part in parts + [still.expand(-1, end - begin, -1) for begin, end in pieces(waited, wait)]:
            state = policy(observations=part, past_key_values=state, use_cache=True).past_key_values
        waited, read = wait, by_kept_head(reads)
        first = read if first is None else first
        found["moved"].append(statistics.median(moved_part(first, read)))
        actions = policy(observations=response, past_key_values=copy.deepcopy(state), use_cache=True).actions
        right = chosen_slot(actions.numpy(), rows["num_frames"] * 0 + RESPONSE_FRAMES) == rows["ball_slot"]
        found["after_waits"].append(float(right.mean()))
    return found


def by_kept_head(reads: Reads) -> torch.Tensor:
    """What was read at the last frame, (episodes, heads, channels)."""
    return reads.last[:, -1].unflatten(-1, (reads.heads, -1))[:, reads.kept].clone()


def moved_part(first: torch.Tensor, now: torch.Tensor) -> list[float]:
    around = (first - first.mean(0)).square().sum((0, 2))
    return ((now - first).square().sum((0, 2)) / around).tolist()


def long_games_of(folder: Path) -> dict:
    policy = AutoModelForBehaviorCloning.from_pretrained(folder).eval()
    return {"windows": WINDOWS, **success_by_windows(policy), "waits": WAITS, **success_after_waits(policy)}


def main(arguments: list[str] | None = None) -> None:
    measure("long_games.py", "Measures a policy of the shell game in very long episodes.", long_games_of, arguments)


if __name__ == "__main__":
    main()
