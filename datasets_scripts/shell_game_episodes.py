"""
Episodes of the shell game, frame by frame: what a model sees of them, what its actions choose, and how one is told and
drawn.

An episode is: 5 frames that reveal the ball's slot; windows of a wait and a motion each, K of which hold a swap; a last
wait; 12 frames with the cue on. In a swap of duration D the two cups follow a cosine path and one of them is lifted on
a sine arc; frame j = 1 .. D of the motion shows tau = j / D.
"""

import math
from functools import cache

import numpy as np

SLOTS = np.array([-1.0, -0.5, 0.0, 0.5, 1.0], dtype=np.float32)
CUPS = len(SLOTS)
REVEAL_FRAMES, RESPONSE_FRAMES = 5, 12
LONGEST_MOTION = 16
LIFT = 0.5
OBSERVATION_SIZE, ACTION_SIZE = 3 * CUPS + 1, 2
# Where the parts of an observation begin: x and y of the cups sorted by x, the revealed slot, the cue.
X, Y, REVEAL, CUE = 0, CUPS, 2 * CUPS, 3 * CUPS


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


def describe_episode(row: dict[str, np.ndarray]) -> str:
    observations, swaps = row["observations"], row["swaps"]
    start = int(observations[0, 2 * CUPS : CUE].argmax())
    lines = [
        f"{len(observations)} frames, {len(swaps)} windows, {row['num_swaps']} swaps",
        f"frames 0 to {REVEAL_FRAMES - 1}: the ball is revealed in slot {start}",
    ]
    slot = start
    for window, pair in enumerate(swaps):
        if pair >= 0:
            slot = {pair: pair + 1, pair + 1: pair}.get(slot, slot)
            lines.append(f"window {window:>3}: slots {pair} and {pair + 1} swap, the ball is in slot {slot}")
    lines.append(f"frames {len(observations) - RESPONSE_FRAMES} to {len(observations) - 1}: reach for slot {slot}")
    return "\n".join(lines)


def draw_episode(axes, row: dict[str, np.ndarray]) -> None:
    observations, actions = row["observations"], row["labels"]
    frames = np.arange(len(observations))
    axes.axvspan(-0.5, REVEAL_FRAMES - 0.5, color="gold", alpha=0.35, label="reveal")
    axes.axvspan(len(frames) - RESPONSE_FRAMES - 0.5, len(frames) - 0.5, color="green", alpha=0.25, label="reach")
    cups, heights = observations[:, X:Y], observations[:, Y : Y + CUPS]
    axes.plot(frames, cups, color="0.6", linewidth=1.0)
    lifted = np.where(heights > 0, cups, np.nan)
    axes.plot(frames, lifted, color="0.25", linewidth=3.0, label=["lifted cup"] + [None] * (CUPS - 1))
    axes.plot(frames, ball_path(row), color="red", linestyle="--", linewidth=1.4, label="slot of the ball")
    axes.plot(frames, actions[:, 0], color="tab:blue", linewidth=0.8, alpha=0.7, label="demonstrated reach")
    axes.set(
        xlabel="frame", ylabel="slot", title=f"Shell game: {row['num_swaps']} swaps in {len(row['swaps'])} windows"
    )
    axes.set_yticks(SLOTS, range(CUPS))
    axes.margins(x=0.01)
    axes.legend(loc="upper center", ncols=5, fontsize=8, bbox_to_anchor=(0.5, -0.18))


def ball_path(row: dict[str, np.ndarray]) -> np.ndarray:
    """The ball's slot in every frame, as a position."""
    return SLOTS[ball_slots(row["observations"][None], row["swaps"][None])[0]]


def ball_slots(observations: np.ndarray, swaps: np.ndarray) -> np.ndarray:
    """
    The ball's slot in every frame, (rows, frames); it changes when a swap is complete.

    Args:
        swaps (rows, windows): The left slot of the pair that a window swaps, or -1.
    """
    lifted = (observations[..., Y:REVEAL] > 0).any(-1)
    # A swap is complete in the first frame after one with a lifted cup.
    done = np.cumsum(lifted[:, :-1] & ~lifted[:, 1:], axis=1)
    swaps = np.take_along_axis(swaps, np.argsort(swaps < 0, axis=1, kind="stable"), axis=1)  # those that are, first
    slots = slots_after_windows(observations[:, 0, REVEAL:CUE].argmax(-1), swaps, swaps >= 0)
    return np.take_along_axis(slots, np.pad(done, ((0, 0), (1, 0))), axis=1)
