"""
The shell game as environments of gymnasium, the extra `gym`: one at a time, or many as one array.

    import gymnasium, mamba3_nplr
    gymnasium.make("mamba3_nplr/ShellGame-v0")
    gymnasium.make_vec("mamba3_nplr/ShellHand-v0", num_envs=64)

`modeling/registration.py` has the ids.
"""

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.error import DependencyNotInstalled, ResetNeeded
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from .shell_game import ShellGame
from .shell_game_episodes import ACTION_SIZE, CUE, CUPS, OBSERVATION_SIZE, Y
from .shell_game_pictures import PIXELS, draw_frames, draw_pixels
from .shell_game_table import Ending, Table, TableWithHand
from .shell_hand import ShellHand
from .task import check_at_least, check_choice

OBSERVATIONS, SPLITS = ("numbers", "pixels"), ("train", "validation", "test")
PICTURE = (240, 480)
FRAMES_PER_SECOND = 25
SEEDS = 2**32  # episodes of a stream that can be asked for
NO_PYGAME = (
    'render_mode="human" shows a window by pygame: pip install "gymnasium[classic-control]"; "rgb_array" needs none.'
)


class Game:
    """
    What one environment and many have in common: the table with its episodes, spaces and pictures.

    Args:
        with_hand: Whether actions move a hand.
        count: Episodes side by side.
        The others as in `ShellGameEnv`.
    """

    def __init__(
        self,
        with_hand: bool,
        count: int,
        windows: int,
        max_swaps: int | None,
        jitter: bool,
        observation: str,
        split: str,
    ):
        check_choice("observation", observation, OBSERVATIONS)
        check_choice("split", split, SPLITS)
        max_swaps = windows if max_swaps is None else max_swaps
        make = ShellHand if with_hand else ShellGame
        task = make(windows=windows, max_swaps=max_swaps, jitter=jitter, test_windows=(windows,))
        name = next(iter(task.test_sizes)) if split == "test" else split
        self.table = (TableWithHand if with_hand else Table)(task, name, count)
        self.observation = observation
        self.action_space = spaces.Box(-1.0, 1.0, (ACTION_SIZE,), np.float32)
        if observation == "pixels":
            self.observation_space = spaces.Box(0, 255, PIXELS, np.uint8)
        else:
            self.observation_space = spaces.Box(*limits(with_hand), dtype=np.float32)

    def observe(self) -> np.ndarray:
        numbers = self.table.observe()
        if self.observation == "numbers":
            return numbers
        return draw_pixels(numbers)

    def pictures(self) -> np.ndarray:
        """For people: with a mark at the last action, and the ball at the end."""
        table = self.table
        reach = None
        if not isinstance(table, TableWithHand):  # there the hand shows it
            reach = np.where(table.frame > 0, np.clip(table.actions[:, -1, 0], -1.0, 1.0), np.nan)
        return draw_frames(table.observe(), *PICTURE, reach, np.where(table.ended, table.ball_slot, -1))

    def act(self, actions, which: np.ndarray | None = None) -> Ending:
        """Goes on by actions (episodes, 2) of any kind that converts to numbers."""
        actions = np.asarray(actions, dtype=np.float32)
        expected = (len(self.table.frame), ACTION_SIZE)
        if actions.shape != expected:
            shapes = f"{actions.shape[1:]}; it must be {expected[1:]}" if expected[0] == 1 else ""
            shapes = shapes or f"{actions.shape}; it must be {expected}"
            raise ValueError(f"action has shape {shapes}.")
        if not np.isfinite(actions).all():
            raise ValueError("action holds a number that is not finite.")
        return self.table.act(actions, which)


def limits(with_hand: bool) -> tuple[np.ndarray, np.ndarray]:
    """The least and the largest of each number of an observation."""
    low, high = np.zeros(OBSERVATION_SIZE), np.ones(OBSERVATION_SIZE)
    low[:Y] = -1.0
    high[Y : Y + CUPS] = 0.5
    if with_hand:  # hidden cups are where the hand is
        low[Y : Y + CUPS], high[Y : Y + CUPS] = -1.0, 1.0
        low, high = np.insert(low, CUE, [-1.0, -1.0]), np.insert(high, CUE, [1.0, 1.0])
    return low.astype(np.float32), high.astype(np.float32)


class ShellGameEnv(gymnasium.Env):
    """
    An episode of the shell game, frame by frame. It ends with the last response frame and the reward 1 for the right
    cup: that whose slot is nearest to the mean x of the 12 actions of the response. All other rewards are 0.

    `reset(seed=s)` starts row s of the split in the dataset of the same settings, and beyond its end the rows that
    would follow; `reset()` one that is drawn by `np_random`, which the last seed has set. `info` has the number of the
    episode and of its swaps, what the demonstrator would do, and at the end the outcome.

    Args:
        windows: Windows of an episode.
        jitter: Whether durations are random; the dataset is then `shell_jitter`, else `shell`.
        max_swaps: Largest number of swaps, by default `windows`; in `split="test"` it is always that.
        observation: "numbers" (16,) as in the dataset, or "pixels" (3, 32, 64).
        split: "train", "validation" or "test", the test set of as many windows.
        render_mode: None, "rgb_array" or "human"; the latter needs pygame.
    """

    metadata = {"render_modes": ["human", "rgb_array"], "render_fps": FRAMES_PER_SECOND}
    with_hand = False

    def __init__(
        self,
        windows: int = 16,
        jitter: bool = False,
        max_swaps: int | None = None,
        observation: str = "numbers",
        split: str = "train",
        render_mode: str | None = None,
    ):
        if render_mode is not None:
            check_choice("render_mode", render_mode, ("rgb_array", "human"))
        self.game = Game(self.with_hand, 1, windows, max_swaps, jitter, observation, split)
        self.observation_space, self.action_space = self.game.observation_space, self.game.action_space
        self.render_mode = render_mode
        self.window = Window() if render_mode == "human" else None

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        check_options(options)
        seed = None if seed is None else check_seed(seed)
        super().reset(seed=seed)
        number = int(self.np_random.integers(SEEDS)) if seed is None else seed
        table = self.game.table
        table.start(np.arange(1), number, 1)
        self.show()
        info = {"episode": number, "num_swaps": int(table.num_swaps[0]), "demonstration": table.demonstrate()[0]}
        return self.game.observe()[0], info

    def step(self, action) -> tuple[np.ndarray, float, bool, bool, dict]:
        table = self.game.table
        if table.ended[0]:
            raise ResetNeeded("There is no episode to go on with: call reset() first.")
        ending = self.game.act(np.asarray(action)[None])
        info = {"demonstration": table.demonstrate()[0]}
        if ending.ended[0]:
            info["success"] = bool(ending.success[0])
            info["chosen_slot"], info["ball_slot"] = int(ending.chosen[0]), int(table.ball_slot[0])
        self.show()
        return self.game.observe()[0], float(ending.success[0]), bool(ending.ended[0]), False, info

    def render(self) -> np.ndarray | None:
        if self.render_mode == "rgb_array":
            return self.game.pictures()[0]
        if self.render_mode is None:
            gymnasium.logger.warn('render() shows nothing without a render_mode: make("...", render_mode="rgb_array").')
        self.show()
        return None

    def show(self) -> None:
        if self.window is not None:
            self.window.show(self.game.pictures()[0])

    def close(self) -> None:
        if self.window is not None:
            self.window.close()


class ShellHandEnv(ShellGameEnv):
    """
    The shell game with a hand that starts out of the way, at (0, -1), goes towards where an action points by at most
    0.2 in a frame, and hides the cups that are nearer to it than 0.6: their x and y are then its own. The cup that it
    has reached by the end, to 0.25, is the one it chooses.

    The dataset is `shell_hand`, observations are (18,), with x and y of the hand before the cue, the last. All else is
    as in `ShellGameEnv`.
    """

    with_hand = True


class ShellGameVectorEnv(VectorEnv):
    """
    Many shell games as one array. They do what as many environments in a `SyncVectorEnv` would: `reset(seed=s)` starts
    rows s, s + 1, ... of the split, and where an episode has ended the next step starts another.

    Args:
        num_envs: How many.
        The others as in `ShellGameEnv`, but for `render_mode`: None or "rgb_array".
    """

    metadata = {
        "render_modes": ["rgb_array"],
        "render_fps": FRAMES_PER_SECOND,
        "autoreset_mode": AutoresetMode.NEXT_STEP,
    }
    with_hand = False

    def __init__(
        self,
        num_envs: int = 1,
        windows: int = 16,
        jitter: bool = False,
        max_swaps: int | None = None,
        observation: str = "numbers",
        split: str = "train",
        render_mode: str | None = None,
    ):
        if render_mode is not None:
            check_choice("render_mode", render_mode, ("rgb_array",))
        check_at_least("num_envs", num_envs, 1)
        self.game = Game(self.with_hand, num_envs, windows, max_swaps, jitter, observation, split)
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = self.game.observation_space, self.game.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.render_mode = render_mode
        self.seeds: list[int | None] = [None] * num_envs
        self.generators: dict[int, np.random.Generator] = {}  # made when they are needed
        self.ended: np.ndarray | None = None  # whose last episode has ended; None before the first reset

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict | None = None
    ) -> tuple[np.ndarray, dict]:
        check_options(options)
        seeds = self.each_seed(seed)
        for place, one in enumerate(seeds):
            if one is not None:
                self.seeds[place] = one
                self.generators.pop(place, None)
        numbers = [self.draw(place) if one is None else one for place, one in enumerate(seeds)]
        self.start(np.arange(self.num_envs), numbers)
        self.ended = np.zeros(self.num_envs, dtype=bool)
        everywhere = ~self.ended
        infos = self.told(everywhere, episode=numbers, num_swaps=self.game.table.num_swaps)
        return self.game.observe(), infos | self.told(everywhere, demonstration=self.game.table.demonstrate())

    def each_seed(self, seed: int | list[int | None] | None) -> list[int | None]:
        """The seed of each environment, as a `SyncVectorEnv` gives them out."""
        if seed is None:
            return [None] * self.num_envs
        seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int | np.integer) else list(seed)
        if len(seeds) != self.num_envs:
            raise ValueError(f"seed has {len(seeds)} numbers; it must be one, or a list of num_envs={self.num_envs}.")
        return [None if one is None else check_seed(one) for one in seeds]

    def draw(self, place: int) -> int:
        """The number of an episode for an environment that starts again without a seed."""
        if place not in self.generators:
            self.generators[place], _ = seeding.np_random(self.seeds[place])
        return int(self.generators[place].integers(SEEDS))

    def start(self, which: np.ndarray, numbers: list[int]) -> None:
        in_a_row = numbers == list(range(numbers[0], numbers[0] + len(numbers)))  # made fastest
        self.game.table.start(which, *((numbers[0], len(numbers)) if in_a_row else (0, np.array(numbers))))

    def told(self, which: np.ndarray, **columns) -> dict:
        """Columns as entries of `infos`: each with a mask of the environments that it is of, and 0 in the others."""
        told = {}
        for name, column in columns.items():
            column = np.array(column)
            column[~which] = 0
            told |= {name: column, f"_{name}": which.copy()}
        return told

    def step(self, actions) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        if self.ended is None:
            raise ResetNeeded("There are no episodes to go on with: call reset() first.")
        table, again = self.game.table, self.ended
        ending = self.game.act(actions, ~again)
        infos = {}
        if again.any():
            numbers = np.zeros(self.num_envs, dtype=np.int64)
            numbers[again] = [self.draw(place) for place in np.nonzero(again)[0].tolist()]
            self.start(np.nonzero(again)[0], numbers[again].tolist())
            infos |= self.told(again, episode=numbers, num_swaps=table.num_swaps)
        infos |= self.told(np.ones(self.num_envs, dtype=bool), demonstration=table.demonstrate())
        if ending.ended.any():
            slots = {"chosen_slot": ending.chosen, "ball_slot": table.ball_slot}
            infos |= self.told(ending.ended, success=ending.success, **slots)
        self.ended = ending.ended
        rewards, truncated = ending.success.astype(np.float64), np.zeros(self.num_envs, dtype=bool)
        return self.game.observe(), rewards, ending.ended.copy(), truncated, infos

    def render(self) -> tuple[np.ndarray, ...] | None:
        return tuple(self.game.pictures()) if self.render_mode == "rgb_array" else None


class ShellHandVectorEnv(ShellGameVectorEnv):
    """Many shell games with a hand, `ShellHandEnv`, as one array."""

    with_hand = True


class Window:
    """Shows pictures one after the other, at their speed."""

    def __init__(self):
        try:
            import pygame
        except ImportError as error:
            raise DependencyNotInstalled(NO_PYGAME) from error
        self.pygame, self.screen = pygame, None

    def show(self, picture: np.ndarray) -> None:
        if self.screen is None:
            self.pygame.display.init()
            self.pygame.display.set_caption("Shell game")
            self.screen = self.pygame.display.set_mode((PICTURE[1], PICTURE[0]))
            self.clock = self.pygame.time.Clock()
        self.screen.blit(self.pygame.surfarray.make_surface(picture.swapaxes(0, 1)), (0, 0))
        self.pygame.event.pump()
        self.pygame.display.flip()
        self.clock.tick(FRAMES_PER_SECOND)

    def close(self) -> None:
        if self.screen is not None:
            self.pygame.display.quit()
            self.screen = None


def check_seed(seed: int) -> int:
    if not isinstance(seed, int | np.integer) or isinstance(seed, bool) or not 0 <= seed < SEEDS:
        raise ValueError(f"seed={seed!r} is not allowed: it must be a whole number from 0 to 2**32 - 1.")
    return int(seed)


def check_options(options: dict | None) -> None:
    if options:
        raise ValueError(f"options={options!r} is not allowed: reset() has none.")
