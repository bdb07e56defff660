"""Games of the shell game: an episode that nobody has seen, a visitor who watches it, and policies that play it."""

import copy
import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from browser import one_of, whole_number
from mamba3_nplr.datasets_scripts.shell_game import ShellGame, no_tracking_prior
from mamba3_nplr.datasets_scripts.shell_game_episodes import CUE, CUPS, REVEAL, REVEAL_FRAMES, Y, chosen_slot
from mamba3_nplr.datasets_scripts.tasks import make_task
from trained_models import MODELS, TrainedModels

MOST_SWAPS = 256
SEEDS = 2**31
# Games that wait for their visitor's answer; the oldest are forgotten first.
KEPT_GAMES = 1000
# Timing -> the tasks whose models play, those trained with it before others.
TIMINGS = {"fixed": ("shell",), "jittered": ("shell_jitter", "shell")}


class Move(NamedTuple):
    """A swap as the browser draws it; frame `start` + j - 1 shows the cups at j / `frames` of their way."""

    start: int
    frames: int
    left: int  # the slots left and left + 1
    lifted: int  # the cup that is lifted, 0 the one that starts on the left


@dataclass(frozen=True)
class Episode:
    observations: np.ndarray  # (frames, 16)
    swaps: np.ndarray  # left slots, one for each swap
    ball_slot: int

    @property
    def cue(self) -> int:
        """The first frame with the cue on."""
        return int(self.observations[:, CUE].argmax())

    @property
    def revealed_slot(self) -> int:
        return int(self.observations[0, REVEAL:CUE].argmax())

    def moves(self) -> list[Move]:
        """The swaps. The last frame of a motion shows cups at rest, so that one frame at least lies between lifts."""
        heights = self.observations[:, Y : Y + CUPS]
        lifted = np.concatenate([[False], heights.max(1) > 0, [False]])
        starts, stops = (np.flatnonzero(lifted[1:] & ~lifted[:-1]), np.flatnonzero(~lifted[1:] & lifted[:-1]))
        return [
            Move(int(start), int(stop - start + 1), int(left), int(heights[start, left] == 0))
            for start, stop, left in zip(starts, stops, self.swaps, strict=True)
        ]


def task_of_timing(timing: str) -> ShellGame:
    return make_task("shell_jitter" if timing == "jittered" else "shell")


def draw_episode(timing: str, swaps: int, seed: int) -> Episode:
    """
    The episode of a seed with this number of swaps, in as many windows as in training or, if these are too few, one for
    each. Its random numbers are those of no data set.
    """
    task = task_of_timing(timing)
    drawn = task.draw("page", seed, 0, 0, 1, max(task.windows, swaps), swaps, all_swap=True)
    pairs = drawn["swaps"][0]
    return Episode(drawn["observations"][0], pairs[pairs >= 0], int(drawn["ball_slot"][0]))


def check_episode(timing, swaps, seed=0) -> tuple[str, int, int]:
    return (
        one_of("timing", timing, TIMINGS),
        whole_number("swaps", swaps, 0, MOST_SWAPS),
        whole_number("seed", seed, 0, SEEDS - 1),
    )


def policies_of_timing(models: TrainedModels, timing: str) -> dict[str, torch.nn.Module]:
    found: dict[str, torch.nn.Module] = {}
    for task in TIMINGS[timing]:
        found = models.of_task(task) | found
    return {name: found[name] for name in MODELS if name in found}


@dataclass
class Game:
    """A game between its cue and the visitor's answer: what is left of the episode, and policies in the midst of it."""

    players: dict[str, torch.nn.Module]
    response: np.ndarray  # (frames, 16) from the cue on
    ball_slot: int
    seed: int


class ShellGames:
    """The games of all visitors. One is known by a name that nobody can guess, and so belongs to who started it."""

    def __init__(self, models: TrainedModels):
        self.models = models
        self.waiting: OrderedDict[str, Game] = OrderedDict()
        self.lock = threading.Lock()

    def start(self, timing, swaps, seed=None) -> dict:
        """
        Plays an episode up to its cue.

        Args:
            timing: "fixed" or "jittered".
            swaps: Their number.
            seed: Of the episode; a fresh one by default.
        """
        seed = secrets.randbelow(SEEDS) if seed is None else seed
        timing, swaps, seed = check_episode(timing, swaps, seed)
        episode = draw_episode(timing, swaps, seed)
        # A copy has the weights of the model and a state of its own.
        players = {name: copy.copy(model) for name, model in policies_of_timing(self.models, timing).items()}
        for player in players.values():
            player.reset()
        watched, response = np.split(episode.observations, [episode.cue])
        paths = {name: play(player, watched) for name, player in players.items()}
        return {
            "game": self.keep(Game(players, response, episode.ball_slot, seed)),
            "frames": len(watched),
            "reveal": {"slot": episode.revealed_slot, "frames": REVEAL_FRAMES},
            "moves": [move._asdict() for move in episode.moves()],
            "players": [{"name": name, "label": MODELS[name], "path": as_path(path)} for name, path in paths.items()],
            "chance": no_tracking_prior(swaps),
        }

    def keep(self, game: Game) -> str:
        name = secrets.token_urlsafe(16)
        with self.lock:
            self.waiting[name] = game
            while len(self.waiting) > KEPT_GAMES:
                self.waiting.popitem(last=False)
        return name

    def answer(self, game, cup) -> dict:
        """Ends a game by the visitor's cup, 1 to 5: the policies play its last frames, and the ball is shown."""
        cup = whole_number("cup", cup, 1, CUPS)
        with self.lock:
            found = self.waiting.pop(game, None) if isinstance(game, str) else None
        if found is None:
            raise ValueError("This game is over, or was forgotten because too many came after it. Start another.")
        paths = {name: play(player, found.response) for name, player in found.players.items()}
        return {
            "ball": found.ball_slot,
            "right": cup - 1 == found.ball_slot,
            "seed": found.seed,
            "players": [ending(name, path, found.ball_slot) for name, path in paths.items()],
        }


def play(policy: torch.nn.Module, observations: np.ndarray) -> np.ndarray:
    """Actions (frames, 2) of a policy that goes on from where it is."""
    return np.stack([policy.select_action(observation) for observation in observations])


def as_path(actions: np.ndarray) -> list[float]:
    """Where the actions reach, as x; slots lie from -1 to 1, half a unit apart."""
    return np.round(actions[:, 0].astype(np.float64), 3).tolist()


def ending(name: str, actions: np.ndarray, ball_slot: int) -> dict:
    chosen = int(chosen_slot(actions[None], np.array([len(actions)]))[0])
    return {"name": name, "path": as_path(actions), "chosen": chosen, "right": chosen == ball_slot}
