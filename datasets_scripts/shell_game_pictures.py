"""
Pictures of the shell game, drawn with NumPy from what an observation says and nothing else: cups look alike, and what
is not in the numbers is not in the picture.
"""

import numpy as np

from .shell_game_episodes import CUE, CUPS, OBSERVATION_SIZE, REVEAL, SLOTS, X, Y
from .shell_hand import COVER

# The part of the table that is shown, twice as wide as high, in the units of observations.
LEFT, TOP, WIDTH, HEIGHT = -1.35, 1.0, 2.7, 1.35
TABLE_EDGE = 0.06
CUP_HEIGHT, CUP_FOOT, CUP_TOP, LIP = 0.36, 0.19, 0.13, 0.07  # half-widths of foot and top; the lip is at the foot
BALL_HEIGHT, BALL_RADIUS = -0.06, 0.1
LAMP = 0.1
ARM = 0.2
WALL_COLOR, TABLE_COLOR = (236, 238, 242), (193, 158, 118)
CUP_COLOR, LIP_COLOR, BALL_COLOR = (178, 62, 46), (122, 38, 30), (250, 214, 66)
LAMP_OFF, LAMP_ON = (72, 72, 0), (52, 200, 96)  # the last number of a picture, a blue, is 0 without the cue
HAND_COLOR, MARK_COLOR = (236, 186, 156), (40, 90, 200)
PIXELS = (3, 32, 64)  # channels, height and width of the pictures that policies read
PIXELS_AT_ONCE = 2**16  # more of them, as floats, would not fit into the caches of a processor


def draw_frames(
    observations: np.ndarray,
    height: int,
    width: int,
    reach: np.ndarray | None = None,
    ball_slot: np.ndarray | None = None,
) -> np.ndarray:
    """
    Frames (rows, height, width, 3) of bytes.

    Args:
        observations: (rows, 16), or (rows, 18) with a hand.
        reach: Where to put a mark, (rows,): the x that a policy reaches for; NaN for none.
        ball_slot: Where to show the ball although it is not revealed, (rows,); -1 for nowhere.
    """
    rows = len(observations)
    reach = np.full(rows, np.nan) if reach is None else reach
    ball_slot = np.full(rows, -1) if ball_slot is None else ball_slot
    frames = np.empty((rows, height, width, 3), dtype=np.uint8)
    step = max(1, PIXELS_AT_ONCE // (height * width))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        frames[part] = draw_some(observations[part], height, width, reach[part], ball_slot[part])
    return frames


def draw_pixels(observations: np.ndarray) -> np.ndarray:
    """What a policy that reads pixels sees of observations (rows, 16 or 18): bytes (rows, 3, 32, 64)."""
    return np.ascontiguousarray(draw_frames(observations, *PIXELS[1:]).transpose(0, 3, 1, 2))


def draw_some(
    observations: np.ndarray, height: int, width: int, reach: np.ndarray, ball_slot: np.ndarray
) -> np.ndarray:
    canvas = Canvas(len(observations), height, width)
    cups, lips = 0.0, 0.0
    for x, y in zip(observations[:, X:Y].T, observations[:, Y : Y + CUPS].T, strict=True):
        up, aside = canvas.y - y[:, None, None], np.abs(canvas.x - x[:, None, None])
        sides = canvas.edge(CUP_FOOT - (CUP_FOOT - CUP_TOP) / CUP_HEIGHT * up - aside)
        cup = sides * canvas.edge(up) * canvas.edge(CUP_HEIGHT - up)
        # All cups at once: which of two that cross is in front must not be seen.
        cups, lips = np.maximum(cups, cup), np.maximum(lips, cup * canvas.edge(LIP - up))
    canvas.paint(cups, CUP_COLOR)
    canvas.paint(lips, LIP_COLOR)
    row, slot = np.nonzero(observations[:, REVEAL:CUE])
    canvas.paint(canvas.ball(slot), BALL_COLOR, row)
    if observations.shape[1] > OBSERVATION_SIZE:
        x, y = observations[:, CUE], observations[:, CUE + 1] + CUP_HEIGHT / 2
        arm = canvas.edge(ARM - np.abs(canvas.x - x[:, None, None])) * canvas.edge(y[:, None, None] - canvas.y)
        canvas.paint(np.maximum(canvas.disc(x, y, COVER), arm), HAND_COLOR)
    # Over all else: the last pixel tells the cue.
    lamp = canvas.edge(TOP - HEIGHT + LAMP - canvas.y)
    canvas.paint(lamp, LAMP_OFF)
    canvas.paint(lamp * observations[:, -1, None, None], LAMP_ON)
    row = np.nonzero(ball_slot >= 0)[0]
    canvas.paint(canvas.ball(ball_slot[row]), BALL_COLOR, row)
    row = np.nonzero(np.isfinite(reach))[0]
    bottom = canvas.y - (TOP - HEIGHT)
    canvas.paint(canvas.edge(0.12 - bottom - 1.5 * np.abs(canvas.x - reach[row, None, None])), MARK_COLOR, row)
    return canvas.bytes()


class Canvas:
    """
    Pictures of one size, painted one thing over the other.

    Attributes:
        x, y: Where the middles of the pixels are, (1, 1, width) and (1, height, 1).
    """

    def __init__(self, rows: int, height: int, width: int):
        self.x = (LEFT + WIDTH * (np.arange(width, dtype=np.float32) + 0.5) / width)[None, None]
        self.y = (TOP - HEIGHT * (np.arange(height, dtype=np.float32) + 0.5) / height)[None, :, None]
        self.pixels_in_one = width / WIDTH
        table = self.edge(TABLE_EDGE - self.y)[..., None]
        color = table * np.float32(TABLE_COLOR) + (1 - table) * np.float32(WALL_COLOR)
        self.colors = np.broadcast_to(color, (rows, height, width, 3)).copy()

    def edge(self, inside: np.ndarray) -> np.ndarray:
        """The part of a pixel that lies inside, where its middle lies so far inside of an edge."""
        return np.clip(inside * np.float32(self.pixels_in_one) + np.float32(0.5), 0.0, 1.0)

    def disc(self, x: np.ndarray, y: np.ndarray, radius: float) -> np.ndarray:
        return self.edge(radius - np.hypot(self.x - x[:, None, None], self.y - y[:, None, None]))

    def ball(self, slot: np.ndarray) -> np.ndarray:
        """A ball in front of each of some slots (rows,)."""
        return self.disc(SLOTS[slot], np.full(len(slot), BALL_HEIGHT, dtype=np.float32), BALL_RADIUS)

    def paint(self, part: np.ndarray, color: tuple[int, int, int], rows: np.ndarray | slice = slice(None)) -> None:
        """Covers a part of each pixel (rows, height, width) with a colour, in all pictures or in some rows of them."""
        part = part[..., None].astype(np.float32)
        self.colors[rows] += part * (np.float32(color) - self.colors[rows])

    def bytes(self) -> np.ndarray:
        return np.rint(self.colors).astype(np.uint8)
