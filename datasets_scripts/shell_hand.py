"""
The shell game with a hand in the picture, so that actions matter: an action is where the hand should go, it goes there
at a limited speed, and hides the cups that it covers. `shell_game_table.py` plays it with any policy.
"""

from dataclasses import dataclass, replace

import numpy as np

from .counter_random import CounterRandom
from .shell_game import TEXTS, ShellGame
from .shell_game_episodes import ACTION_SIZE, CUE, CUPS, OBSERVATION_SIZE, RESPONSE_FRAMES, SLOTS, X, Y
from .task import check_flag

REST = np.array([0.0, -1.0], dtype=np.float32)  # where the hand is at first, out of the way
SPEED = 0.2  # the longest way of the hand in a frame: 8 of the 12 frames of the response to the farthest cup
COVER = 0.6  # of cups nearer to the hand than this none is seen: over a cup, that cup and its neighbours
REACHED = 0.25  # a hand so near to a slot at the end has chosen it: half of the way to the next

HAND_TEXTS = replace(
    TEXTS,
    problem="shell game with a hand",
    subject="the shell game with a hand",
    heading="The shell game with a hand",
    section=f"""\
The same episodes, but a hand is in the picture. An action is where it should go, x and y from -1 to 1, and it goes
there by at most {SPEED} in a frame, from ({REST[0]:g}, {REST[1]:g}), where it hides nothing. A cup nearer to it than
{COVER} is hidden: its x and y are those of the hand. The cup that the hand has reached by the end counts. In the
recorded episodes the hand goes to any cup after the cue, whatever the demonstrator says: one that goes to the ball
would show where it is.

| Column | Type | Meaning |
| --- | --- | --- |
| `observations` | frames x 18 float32 | as in the game without; x and y of the hand before the cue |
| `labels` | frames x 2 float32 | the demonstrator's actions: where the hand rests until the cue, then the ball's slot |
| `num_swaps` | int32 | number of swaps K |
| `swaps` | list of int32 | for each window the left slot of the swapped pair, or -1 |
| `ball_slot` | ClassLabel | the ball's slot at the end |""",
    picture=None,
)


@dataclass(frozen=True)
class ShellHand(ShellGame):
    """
    Args:
        demonstrator: "reach" keeps the hand out of the way until the cue, and so sees everything; "track" holds it over
            the ball's cup and sees none of its swaps.
        guided: Whether the hand in the recorded episodes is led to a cup drawn at random after the cue; the labels are
            still what the demonstrator would do. Else it goes to the ball, and who looks at it need not have followed
            the swaps: a policy learns to go on where its hand goes, right in every recorded episode and lost in its
            own.
    """

    texts = HAND_TEXTS
    environment = "mamba3_nplr/ShellHand-v0"
    observation_size = OBSERVATION_SIZE + ACTION_SIZE
    question = "Shell game with a hand: does it end at the ball?"
    description = "Plays the shell game with a hand that hides the cups it covers, and reaches for the ball."

    guided: bool = True

    def __post_init__(self):
        super().__post_init__()
        check_flag("guided", self.guided)

    def arrays(self, seed: int, step: int, rank: int = 0, world_size: int = 1) -> dict[str, np.ndarray]:
        return with_hand(super().arrays(seed, step, rank, world_size))

    def rows(self, split: str, start: int, stop: int) -> dict[str, np.ndarray]:
        return with_hand(super().rows(split, start, stop))

    def draw(
        self, purpose: str, seed: int, step: int, first_row: int, rows: int | np.ndarray, *sizes, **options
    ) -> dict:
        """As in the game, without a hand, and beside it `led_to`: the slot of the cup that the hand is led to."""
        drawn = super().draw(purpose, seed, step, first_row, rows, *sizes, **options)
        guide = CounterRandom(f"{self.key}/hand/{purpose}", seed, step, first_row, rows, 1)
        return drawn | {"led_to": guide.integers(CUPS) if self.guided else drawn["ball_slot"]}

    def states(self, arrays: dict[str, np.ndarray]) -> None:
        """Not said: which frames are still depends on the hand."""
        return None

    def demonstrate(self, slots, ends, cue, num_frames) -> np.ndarray:
        actions = super().demonstrate(slots, ends, cue, num_frames)
        if self.demonstrator == "reach":
            actions[np.arange(actions.shape[1]) < cue[:, None]] = REST
        return actions

    def metrics(self, predictions: np.ndarray, rows: dict[str, np.ndarray]) -> dict:
        """
        Where the hand would end by these actions, though they were chosen while it moved as the recorded one did.
        `train_hf.py evaluate --rollouts` lets the policy see what it has done.

        Args:
            predictions (rows, frames, 2): Predicted actions.
        """
        path = hand_path(predictions)
        chosen = reached_slot(path[np.arange(len(path)), rows["num_frames"]])
        return self.outcome(chosen == rows["ball_slot"], rows)

    @property
    def short_description(self) -> str:
        return f"shell game with a hand, {'random' if self.jitter else 'fixed'} timing"


def with_hand(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The columns with the recorded hand in the picture: led by the demonstrator and, after the cue, to `led_to`."""
    rows = dict(rows)
    frames, end = np.arange(rows["observations"].shape[1]), rows["num_frames"][:, None]
    cue, inside = (frames >= end - RESPONSE_FRAMES) & (frames < end), frames < end
    goals = np.stack([SLOTS[rows.pop("led_to")], np.zeros(len(end), dtype=np.float32)], axis=-1)
    actions = np.where(cue[..., None], goals[:, None], rows["labels"])
    return rows | {"observations": hide_cups(rows["observations"], hand_path(actions)[:, :-1]) * inside[..., None]}


def hand_path(actions: np.ndarray) -> np.ndarray:
    """The hand before each of the actions (rows, frames, 2) and after the last, (rows, frames + 1, 2)."""
    actions = np.asarray(actions, dtype=np.float32)
    path = np.broadcast_to(REST, (len(actions), actions.shape[1] + 1, ACTION_SIZE)).copy()
    leaves = np.nonzero((actions != REST).any((0, 2)))[0]
    for frame in range(leaves[0] if len(leaves) else actions.shape[1], actions.shape[1]):
        path[:, frame + 1] = move_hand(path[:, frame], actions[:, frame])
    return path


def move_hand(hand: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """The hand (rows, 2) a frame later, on its way to where actions (rows, 2) point."""
    target = np.clip(actions, -1.0, 1.0).astype(np.float32)
    way = target - hand
    length = np.sqrt((way**2).sum(-1, keepdims=True))
    return np.where(length <= SPEED, target, hand + way * (np.float32(SPEED) / np.maximum(length, SPEED)))


def hide_cups(observations: np.ndarray, hand: np.ndarray) -> np.ndarray:
    """What is seen of observations (..., 16) with the hand (..., 2) in the picture, (..., 18), the cue still last."""
    seen = np.concatenate([observations[..., :CUE], hand, observations[..., CUE:]], axis=-1)
    cups = np.stack([seen[..., X:Y], seen[..., Y : Y + CUPS]], axis=-1)  # (..., cups, 2)
    hidden = ((cups - hand[..., None, :]) ** 2).sum(-1) < COVER**2
    some = hidden.any(-1)
    covered = np.where(hidden[some][..., None], hand[some][..., None, :], cups[some])
    # Sorted by x, then y, as they were: their order must tell nothing of what is hidden.
    order = np.lexsort((covered[..., 1], covered[..., 0]))
    covered = np.take_along_axis(covered, order[..., None], axis=-2)
    seen[some, X : Y + CUPS] = np.concatenate([covered[..., 0], covered[..., 1]], axis=-1)
    return seen


def reached_slot(hand: np.ndarray) -> np.ndarray:
    """The slot that hands (rows, 2) have reached, (rows,); -1 for none."""
    distance = np.hypot(hand[:, :1] - SLOTS, hand[:, 1:])
    return np.where(distance.min(1) < REACHED, distance.argmin(1), -1)
