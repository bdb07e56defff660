"""
The shell game: five identical cups, a ball revealed under one of them, swaps of neighbours, and a cue to reach for it.
`shell_game_episodes.py` has its frames.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .counter_random import CounterRandom, split_rows
from .shell_game_episodes import (
    ACTION_SIZE,
    CUE,
    CUPS,
    LONGEST_MOTION,
    OBSERVATION_SIZE,
    RESPONSE_FRAMES,
    REVEAL_FRAMES,
    SLOTS,
    Y,
    ball_slots,
    chosen_slot,
    describe_episode,
    draw_episode,
    observe,
    slots_after_windows,
)
from .task import IGNORED, check_at_least, check_choice, check_flag, check_sizes
from .task_kinds import BehaviorCloning
from .task_texts import CardPicture, TaskTexts

QUIET_FRAMES, MOTION_FRAMES = 4, 8
SHORTEST_MOTION = 4  # with jitter
CUE_WEIGHT = 20.0  # of a frame with the cue on, in the loss
FIXED_TEST_NAMES = {16: "test_standard", 32: "test_extended"}

TEXTS = TaskTexts(
    problem="shell game",
    subject="the shell game",
    sequences="episodes",
    answer="reach",
    details="success for each number of swaps",
    heading="The shell game",
    section="""\
Five identical cups stand in five slots. The ball's slot is revealed in the first 5 frames; then windows follow, some
with a swap of two neighbours along a smooth path, one of the two cups lifted; after a last wait the cue is on for 12
frames, in which the policy reaches for the ball. `shell` has windows of 4 quiet and 8 motion frames; in `shell_jitter`
motions last round(U(4, 16)) frames and waits round(U(0, 8)) or, one time in five, round(U(16, 64)).

| Column | Type | Meaning |
| --- | --- | --- |
| `observations` | frames x 16 float32 | x of the cups, sorted; their y; the revealed slot (one-hot); the cue |
| `labels` | frames x 2 float32 | the demonstrator's actions: at the centre until the cue, then at the ball's slot |
| `num_swaps` | int32 | number of swaps K |
| `swaps` | list of int32 | for each window the left slot of the swapped pair, or -1 |
| `ball_slot` | ClassLabel | the ball's slot at the end |""",
    tags=("imitation-learning",),
    picture=CardPicture("episode.png", "An episode: cup paths, the lifted cup, the slot of the ball", "validation", 5),
)


@dataclass(frozen=True)
class ShellGame(BehaviorCloning):
    """
    Args:
        windows: Windows of a training episode.
        max_swaps: Largest number of swaps K in training; K is uniform from 0.
        start_swaps: Largest K at the start of a curriculum that grows to `max_swaps`; None for direct training.
        jitter: Whether durations are random, motions round(U(4, 16)) and waits round(U(0, 8)) or, one time in five,
            round(U(16, 64)); else every wait has 4 frames and every motion 8.
        demonstrator: "reach" rests at the centre until the cue, "track" points at the ball's slot in every frame. The
            paper does not say which; with "reach" plain Mamba-3 comes nearer to its figures (results/README.md).
        packed: Whether batches of different lengths are packed with `cu_seqlens` instead of padded with a mask.
        test_windows: Windows of the test sets; None for `windows` and twice that, with jitter also 3, 4, 6 and 8 times
            that. With jitter all of them hold a swap; without, K is uniform from 0.
        test_size: Episodes in each test set.
    """

    texts = TEXTS
    main_metric = "success"
    size_name = "windows"
    environment = "mamba3_nplr/ShellGame-v0"
    observation_size = OBSERVATION_SIZE
    action_size = ACTION_SIZE
    example_frames = REVEAL_FRAMES + 16 * (QUIET_FRAMES + MOTION_FRAMES) + QUIET_FRAMES + RESPONSE_FRAMES  # the paper's
    question = "Shell game: does the policy reach for the ball?"
    description = "Plays the shell game: five like cups are swapped, and it reaches for the ball."

    batch_size: int = 32
    windows: int = 16
    max_swaps: int = 16
    start_swaps: int | None = None
    jitter: bool = False
    demonstrator: str = "reach"
    packed: bool = False
    test_windows: tuple[int, ...] | None = None
    test_size: int = 4096

    def __post_init__(self):
        super().__post_init__()
        check_choice("demonstrator", self.demonstrator, ("track", "reach"))
        check_at_least("windows", self.windows, 0)
        check_at_least("max_swaps", self.max_swaps, 0)
        check_at_least("test_size", self.test_size, 1)
        if self.max_swaps > self.windows:
            raise ValueError(
                f"max_swaps={self.max_swaps} is not allowed: windows={self.windows} hold at most that many."
            )
        if self.start_swaps is not None:
            check_at_least("start_swaps", self.start_swaps, 0)
            if self.start_swaps > self.max_swaps:
                raise ValueError(
                    f"start_swaps={self.start_swaps} is not allowed: it must be 0 to max_swaps={self.max_swaps}."
                )
        for name in ("jitter", "packed"):
            check_flag(name, getattr(self, name))
        if self.test_windows is not None:
            check_sizes("test_windows", self.test_windows, 0)

    @property
    def model_fields(self) -> dict:
        return super().model_fields | {"cue_weight": CUE_WEIGHT, "episode_loss": self.jitter}

    @cached_property
    def label_names(self) -> list[str]:
        return [f"slot {slot}" for slot in range(CUPS)]

    @property
    def key(self) -> str:
        """Tells the random numbers of this task from those of others; sizes and schedules do not matter."""
        return f"shell/{'jitter' if self.jitter else 'fixed'}"

    @property
    def settings(self) -> dict:
        return super().settings | {"test_windows": tuple(self.test_sizes.values())}

    @property
    def test_sizes(self) -> dict[str, int]:
        names = {} if self.jitter else FIXED_TEST_NAMES
        sizes = self.test_windows
        if sizes is None:
            sizes = [self.windows * times for times in ((1, 2, 3, 4, 6, 8) if self.jitter else (1, 2))]
        return {names.get(windows, f"test_{windows}"): windows for windows in sizes}

    @property
    def trained_size(self) -> int:
        return self.windows

    @property
    def splits(self) -> dict[str, int]:
        return {"validation": min(512, self.test_size)} | dict.fromkeys(self.test_sizes, self.test_size)

    def largest_swaps(self, step: int) -> int:
        """The largest K at a step: with a curriculum it grows over the first part of training."""
        if self.start_swaps is None:
            return self.max_swaps
        return self.start_swaps + int((self.max_swaps - self.start_swaps) * self.progress(step))

    def arrays(self, seed: int, step: int, rank: int = 0, world_size: int = 1) -> dict[str, np.ndarray]:
        first, rows = split_rows(self.batch_size, rank, world_size)
        return self.draw("train", seed, step, first, rows, self.windows, self.largest_swaps(step))

    def rows(self, split: str, start: int, stop: int) -> dict[str, np.ndarray]:
        if split != "train":
            self.check_split(split, start, stop)
        return self.episodes(split, start, stop - start)

    def episodes(self, split: str, first: int, count: int | np.ndarray) -> dict[str, np.ndarray]:
        """
        Rows of the stream that a split is the beginning of, as `rows` returns them: `count` from the first on or, if it
        is an array, those that many after the first.
        """
        if split == "train":
            return self.draw("train_set", 0, 0, first, count, self.windows, self.max_swaps)
        if split == "validation":
            return self.draw(split, 0, 0, first, count, self.windows, self.max_swaps)
        windows = self.test_sizes[split]
        return self.draw(split, 0, 0, first, count, windows, windows, all_swap=self.jitter)

    def draw(
        self,
        purpose: str,
        seed: int,
        step: int,
        first_row: int,
        rows: int | np.ndarray,
        windows: int,
        swaps: int,
        all_swap: bool = False,
    ) -> dict[str, np.ndarray]:
        """Episodes as columns, padded to the longest; `num_frames` says where each ends."""
        random = CounterRandom(f"{self.key}/{purpose}", seed, step, first_row, rows, 2 + 3 * windows + 3 * windows + 2)
        rows = random.rows
        slot = random.integers(CUPS)
        num_swaps = np.full(rows, swaps) if all_swap else random.integers(swaps + 1)
        pair, lifted = random.integers(CUPS - 1, windows), random.integers(2, windows)
        # The windows with the K smallest keys hold a swap: every choice of K windows is equally likely.
        swapping = np.argsort(np.argsort(random.uniform(windows), axis=1), axis=1) < num_swaps[:, None]
        waits, motions = self.durations(random, rows, windows)
        slots = slots_after_windows(slot, pair, swapping)
        ends = REVEAL_FRAMES + np.cumsum(waits[:, :-1] + motions, axis=1)  # first frame after each window
        cue = (ends[:, -1] if windows else np.full(rows, REVEAL_FRAMES)) + waits[:, -1]
        num_frames = cue + RESPONSE_FRAMES
        observations = observe(slot, pair, lifted, swapping, ends, motions, cue, num_frames)
        return {
            "observations": observations,
            "labels": self.demonstrate(slots, ends, cue, num_frames),
            "num_frames": num_frames,
            "num_swaps": num_swaps,
            "swaps": np.where(swapping, pair, -1),
            "ball_slot": slots[:, -1],
        }

    def durations(self, random: CounterRandom, rows: int, windows: int) -> tuple[np.ndarray, np.ndarray]:
        """Frames of each wait, the last one before the cue, (rows, windows + 1), and of each motion (rows, windows)."""
        if not self.jitter:
            return np.full((rows, windows + 1), QUIET_FRAMES), np.full((rows, windows), MOTION_FRAMES)
        spread = LONGEST_MOTION - SHORTEST_MOTION
        motions = np.rint(SHORTEST_MOTION + spread * random.uniform(windows)).astype(np.int64)
        short, length = random.uniform(windows + 1) < 0.8, random.uniform(windows + 1)
        waits = np.rint(np.where(short, 8 * length, 16 + 48 * length)).astype(np.int64)
        return waits, motions

    def states(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray] | None:
        """The ball's slot in frames in which nothing moves and nothing is revealed, without the cue and with it."""
        observations = arrays["observations"]
        inside = np.arange(observations.shape[1]) < arrays["num_frames"][:, None]
        known = inside & (observations[..., Y:CUE] == 0).all(-1)
        slots = ball_slots(observations, arrays["swaps"])
        return {"kinds": observations[..., CUE].astype(np.int64), "states": np.where(known, slots, IGNORED)}

    def demonstrate(self, slots, ends, cue, num_frames) -> np.ndarray:
        """Actions (rows, frames, 2): the slot to reach for; after a swap completes, the new one."""
        frames = np.arange(num_frames.max())
        moves = np.zeros((len(cue), len(frames)), dtype=np.float32)
        moves[:, 0] = SLOTS[slots[:, 0]]
        # A motion's last frame shows the cups at rest: from there on the ball is in its new slot.
        moves[np.arange(len(cue))[:, None], ends - 1] = np.diff(SLOTS[slots], axis=1)
        shown = frames < num_frames[:, None]
        if self.demonstrator == "reach":
            shown &= frames >= cue[:, None]
        actions = np.zeros((len(cue), len(frames), ACTION_SIZE), dtype=np.float32)
        actions[..., 0] = moves.cumsum(1) * shown  # exact: slots are multiples of one half
        return actions

    def metrics(self, predictions: np.ndarray, rows: dict[str, np.ndarray]) -> dict:
        """
        Args:
            predictions (rows, frames, 2): Predicted actions.
        """
        return self.outcome(chosen_slot(predictions, rows["num_frames"]) == rows["ball_slot"], rows)

    def outcome(self, returns: np.ndarray, rows: dict[str, np.ndarray]) -> dict:
        counts = np.unique(rows["num_swaps"])
        return {
            "success": float(returns.mean()),
            "success_by_swaps": {int(k): float(returns[rows["num_swaps"] == k].mean()) for k in counts},
        }

    def environment_settings(self, split: str) -> dict:
        windows = self.test_sizes.get(split, self.windows)
        swaps = {} if split in self.test_sizes else {"max_swaps": self.max_swaps}
        name = "test" if split in self.test_sizes else split
        return {"windows": windows, "jitter": self.jitter, "split": name} | swaps

    def chance(self, rows: dict[str, np.ndarray]) -> float:
        swaps, counts = np.unique(rows["num_swaps"], return_counts=True)
        return float(np.average([no_tracking_prior(int(k)) for k in swaps], weights=counts))

    def lengths(self, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict.fromkeys(("observations", "labels"), rows["num_frames"])

    def features(self):
        from datasets import ClassLabel, Features, List, Value

        outcome = {
            "num_swaps": Value("int32"),
            "swaps": List(Value("int32")),
            "ball_slot": ClassLabel(names=self.label_names),
        }
        return Features(super().features() | outcome)

    @property
    def short_description(self) -> str:
        return f"shell game, {'random' if self.jitter else 'fixed'} timing"

    def describe_row(self, row: dict[str, np.ndarray]) -> str:
        return describe_episode(row)

    def draw_row(self, axes, row: dict[str, np.ndarray]) -> None:
        draw_episode(axes, row)


def no_tracking_prior(num_swaps: int) -> float:
    """Success of the best guess from the revealed slot and K alone: the ball's random walk under adjacent swaps."""
    walk = np.zeros((CUPS, CUPS))
    for slot in range(CUPS):
        for pair in range(CUPS - 1):
            after = {pair: pair + 1, pair + 1: pair}.get(slot, slot)
            walk[slot, after] += 1 / (CUPS - 1)
    return float(np.linalg.matrix_power(walk, num_swaps).max(1).mean())
