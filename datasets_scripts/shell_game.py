"""
The shell game: five identical cups, a ball revealed under one of them, swaps of neighbours, and a cue to reach for it.

An episode is: 5 frames that reveal the ball's slot; windows of a wait and a motion each, K of which hold a swap; a last
wait; 12 frames with the cue on. In a swap of duration D the two cups follow a cosine path and one of them is lifted on
a sine arc; frame j = 1 .. D of the motion shows tau = j / D.
"""

import math
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch

from .counter_random import CounterRandom, split_rows
from .task import Task, check_at_least, check_choice, check_flag, check_sizes

SLOTS = np.array([-1.0, -0.5, 0.0, 0.5, 1.0], dtype=np.float32)
CUPS = len(SLOTS)
REVEAL_FRAMES, RESPONSE_FRAMES = 5, 12
QUIET_FRAMES, MOTION_FRAMES = 4, 8
SHORTEST_MOTION, LONGEST_MOTION = 4, 16  # with jitter
LIFT = 0.5
CUE_WEIGHT = 20.0  # of a frame with the cue on, in the loss
OBSERVATION_SIZE, ACTION_SIZE = 3 * CUPS + 1, 2
# Where the parts of an observation begin: x and y of the cups sorted by x, the revealed slot, the cue.
X, Y, REVEAL, CUE = 0, CUPS, 2 * CUPS, 3 * CUPS


@dataclass(frozen=True)
class ShellGame(Task):
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
        return {
            "observation_size": OBSERVATION_SIZE,
            "action_size": ACTION_SIZE,
            "cue_weight": CUE_WEIGHT,
            "episode_loss": self.jitter,
        }

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
        if split == "train":
            return self.draw("train_set", 0, 0, start, stop - start, self.windows, self.max_swaps)
        self.check_split(split, start, stop)
        if split == "validation":
            return self.draw(split, 0, 0, start, stop - start, self.windows, self.max_swaps)
        windows = self.test_sizes[split]
        return self.draw(split, 0, 0, start, stop - start, windows, windows, all_swap=self.jitter)

    def draw(
        self, purpose: str, seed: int, step: int, first_row: int, rows: int, windows: int, swaps: int, all_swap=False
    ) -> dict[str, np.ndarray]:
        """Episodes as columns, padded to the longest; `num_frames` says where each ends."""
        random = CounterRandom(f"{self.key}/{purpose}", seed, step, first_row, rows, 2 + 3 * windows + 3 * windows + 2)
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

    def model_inputs(self, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Episodes of one length as they are; of different lengths packed, or padded with a mask and labels of -100."""
        observations, labels = (torch.from_numpy(arrays[name]) for name in ("observations", "labels"))
        num_frames = torch.from_numpy(arrays["num_frames"])
        inside = torch.arange(observations.shape[1]) < num_frames[:, None]
        if inside.all():
            return {"observations": observations, "labels": labels}
        if self.packed:
            cu_seqlens = torch.cat([num_frames.new_zeros(1), num_frames.cumsum(0)])
            return {
                "observations": observations[inside][None],
                "labels": labels[inside][None],
                "cu_seqlens": cu_seqlens,
            }
        labels = labels.masked_fill(~inside[..., None], -100.0)
        return {"observations": observations, "labels": labels, "attention_mask": inside.long()}

    def metrics(self, predictions: np.ndarray, rows: dict[str, np.ndarray]) -> dict:
        """
        Args:
            predictions (rows, frames, 2): Predicted actions.
        """
        correct = chosen_slot(predictions, rows["num_frames"]) == rows["ball_slot"]
        counts = np.unique(rows["num_swaps"])
        return {
            "success": float(correct.mean()),
            "success_by_swaps": {int(k): float(correct[rows["num_swaps"] == k].mean()) for k in counts},
        }


FIXED_TEST_NAMES = {16: "test_standard", 32: "test_extended"}


def slots_after_windows(slot: np.ndarray, pair: np.ndarray, swapping: np.ndarray) -> np.ndarray:
    """The ball's slot at the start and after each window, (rows, windows + 1)."""
    slots = [slot]
    for one_pair, swaps in zip(pair.T, swapping.T, strict=True):
        before = slots[-1]
        after = np.where(before == one_pair, one_pair + 1, np.where(before == one_pair + 1, one_pair, before))
        slots.append(np.where(swaps, after, before))
    return np.stack(slots, axis=1)


@cache
def motions_table() -> np.ndarray:
    """
    The two swapping cups, sorted by x, by duration of the motion, lifted cup (the one that starts on the left, or on
    the right) and frame: left x, right x, left y, right y, counted from the left slot.
    """
    table = np.zeros((LONGEST_MOTION + 1, 2, LONGEST_MOTION, 4), dtype=np.float32)
    for duration in range(1, LONGEST_MOTION + 1):
        for lifted in range(2):
            for frame in range(duration):
                table[duration, lifted, frame] = swapping_cups((frame + 1) / duration, lifted)
    return table


def swapping_cups(tau: float, lifted: int) -> tuple[float, float, float, float]:
    # Rounded, so that the last digits of a machine's sine and cosine do not matter.
    moved, height = round((1 - math.cos(math.pi * tau)) / 4, 6), round(LIFT * math.sin(math.pi * tau), 6)
    cups = [(moved, height * (lifted == 0)), (0.5 - moved, height * (lifted == 1))]
    # Sorted by x, then y: where the cups meet, the order must not tell them apart.
    (left_x, left_y), (right_x, right_y) = sorted(cups)
    return left_x, right_x, left_y, right_y


def observe(slot, pair, lifted, swapping, ends, motions, cue, num_frames) -> np.ndarray:
    """Observations (rows, frames, 16), 0 after the end of an episode."""
    rows, frames = len(slot), np.arange(num_frames.max())
    inside = frames < num_frames[:, None]
    observations = np.zeros((rows, len(frames), OBSERVATION_SIZE), dtype=np.float32)
    observations[..., X:Y] = SLOTS * inside[..., None]
    observations[np.arange(rows), :REVEAL_FRAMES, REVEAL + slot] = 1.0
    observations[..., CUE] = inside & (frames >= cue[:, None])
    # Every frame of every swap, one after the other.
    row, window = np.nonzero(swapping)
    duration = motions[row, window]
    frame = np.arange(duration.sum()) - np.repeat(np.cumsum(duration) - duration, duration)
    row, window = np.repeat(row, duration), np.repeat(window, duration)
    left = pair[row, window]
    at = ends[row, window] - motions[row, window] + frame
    cups = motions_table()[motions[row, window], lifted[row, window], frame]
    observations[row, at, X + left] = SLOTS[left] + cups[:, 0]
    observations[row, at, X + left + 1] = SLOTS[left] + cups[:, 1]
    observations[row, at, Y + left] = cups[:, 2]
    observations[row, at, Y + left + 1] = cups[:, 3]
    return observations


def chosen_slot(actions: np.ndarray, num_frames: np.ndarray) -> np.ndarray:
    """The slot nearest to the mean horizontal output over the response frames, (rows,)."""
    frames = num_frames[:, None] - RESPONSE_FRAMES + np.arange(RESPONSE_FRAMES)
    reach = np.take_along_axis(np.asarray(actions)[..., 0], frames, axis=1).mean(1)
    return np.abs(reach[:, None] - SLOTS).argmin(1)


def no_tracking_prior(num_swaps: int) -> float:
    """Success of the best guess from the revealed slot and K alone: the ball's random walk under adjacent swaps."""
    walk = np.zeros((CUPS, CUPS))
    for slot in range(CUPS):
        for pair in range(CUPS - 1):
            after = {pair: pair + 1, pair + 1: pair}.get(slot, slot)
            walk[slot, after] += 1 / (CUPS - 1)
    return float(np.linalg.matrix_power(walk, num_swaps).max(1).mean())
