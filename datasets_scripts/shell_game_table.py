"""The shell game played by someone: episodes side by side, each at a frame of its own, that go on by actions."""

from typing import NamedTuple

import numpy as np

from .shell_game import ShellGame
from .shell_game_episodes import ACTION_SIZE, OBSERVATION_SIZE, RESPONSE_FRAMES, chosen_slot
from .shell_hand import REST, hide_cups, move_hand, reached_slot


class Ending(NamedTuple):
    """What a step has come to, each (episodes,)."""

    ended: np.ndarray  # whether it was the last of its episode
    success: np.ndarray  # whether it was, and the ball's slot was chosen
    chosen: np.ndarray  # the slot that was chosen; -1 for none, and before the end


class Table:
    """
    The game itself: what is seen depends on no action, and those of the response frames choose.

    Args:
        task: Whose episodes are played.
        split: The split of the task that they are from, and the stream that it is the beginning of.
        count: Episodes side by side.
    """

    observation_size = OBSERVATION_SIZE

    def __init__(self, task: ShellGame, split: str, count: int):
        self.task, self.split = task, split
        self.frame = np.zeros(count, dtype=np.int64)
        self.num_frames = np.zeros(count, dtype=np.int64)
        self.num_swaps = np.zeros(count, dtype=np.int64)
        self.ball_slot = np.zeros(count, dtype=np.int64)
        # All frames of the episodes, which are drawn whole; padded to the longest so far.
        self.columns = {
            "observations": np.zeros((count, 0, OBSERVATION_SIZE), dtype=np.float32),
            "labels": np.zeros((count, 0, ACTION_SIZE), dtype=np.float32),
        }
        self.actions = np.zeros((count, RESPONSE_FRAMES, ACTION_SIZE), dtype=np.float32)  # the last ones

    def start(self, which: np.ndarray, first: int, numbers: int | np.ndarray) -> None:
        """
        Starts episodes.

        Args:
            which: The places at which they are played.
            first, numbers: Their rows in the stream, as `ShellGame.episodes` has them.
        """
        drawn = self.task.episodes(self.split, first, numbers)
        for name, column in self.columns.items():
            missing = max(0, drawn[name].shape[1] - column.shape[1])
            column = np.pad(column, [(0, 0), (0, missing), (0, 0)]) if missing else column
            column[which, : drawn[name].shape[1]] = drawn[name]
            self.columns[name] = column
        self.frame[which] = 0
        for name in ("num_frames", "num_swaps", "ball_slot"):
            getattr(self, name)[which] = drawn[name]

    @property
    def ended(self) -> np.ndarray:
        return self.frame >= self.num_frames

    def at_frame(self, name: str) -> np.ndarray:
        """The entries of this frame in a column; after the end, those of the last."""
        return self.columns[name][np.arange(len(self.frame)), np.minimum(self.frame, self.num_frames - 1)]

    def observe(self) -> np.ndarray:
        """What is seen, (episodes, observation_size)."""
        return self.at_frame("observations")

    def demonstrate(self) -> np.ndarray:
        """What the demonstrator would do, (episodes, 2)."""
        return self.at_frame("labels")

    def act(self, actions: np.ndarray, which: np.ndarray | None = None) -> Ending:
        """
        Goes on by a frame.

        Args:
            actions: (episodes, 2).
            which: A mask (episodes,) of those that go on; by default all.
        """
        which = np.ones(len(self.frame), dtype=bool) if which is None else which
        self.actions[:, :-1] = self.actions[:, 1:]
        self.actions[:, -1] = actions
        self.frame += which
        ended, chosen = which & self.ended, np.full(len(self.frame), -1)
        if ended.any():
            chosen[ended] = self.chosen(ended)
        return Ending(ended, ended & (chosen == self.ball_slot), chosen)

    def chosen(self, which: np.ndarray) -> np.ndarray:
        """The slots that the last actions choose, of episodes that a mask names; -1 for none."""
        actions = self.actions[which]
        return chosen_slot(actions, np.full(len(actions), RESPONSE_FRAMES))


class TableWithHand(Table):
    """The game in which an action moves the hand, which hides the cups that it covers."""

    observation_size = OBSERVATION_SIZE + ACTION_SIZE

    def __init__(self, task: ShellGame, split: str, count: int):
        super().__init__(task, split, count)
        self.hand = np.broadcast_to(REST, (count, ACTION_SIZE)).copy()

    def start(self, which, first, numbers) -> None:
        super().start(which, first, numbers)
        self.hand[which] = REST

    def observe(self) -> np.ndarray:
        return hide_cups(super().observe(), self.hand)

    def act(self, actions, which=None) -> Ending:
        moved = move_hand(self.hand, actions)
        self.hand = moved if which is None else np.where(which[:, None], moved, self.hand)
        return super().act(actions, which)

    def chosen(self, which) -> np.ndarray:
        return reached_slot(self.hand[which])
