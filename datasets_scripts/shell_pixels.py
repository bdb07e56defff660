"""The shell game seen as pictures: the same episodes, which are drawn when a model is given them."""

from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from .shell_game import ShellGame
from .shell_game_pictures import PIXELS, draw_pixels
from .task_kinds import POLICY_EXAMPLE


@dataclass(frozen=True)
class ShellPixels(ShellGame):
    """The fields are those of `ShellGame`, and so are the columns: only models read pixels."""

    question = "Shell game from pixels: does the policy reach for the ball?"
    description = "Plays the shell game from pictures: five like cups are swapped, and it reaches for the ball."

    @property
    def model_fields(self) -> dict:
        pixels = {"input_type": "pixels", "observation_size": prod(PIXELS), "pixel_shape": list(PIXELS)}
        return super().model_fields | pixels

    def model_inputs(self, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        inputs = super().model_inputs(arrays)
        return inputs | {"observations": as_pixels(inputs["observations"])}

    def environment_settings(self, split: str) -> dict:
        return super().environment_settings(split) | {"observation": "pixels"}

    @property
    def short_description(self) -> str:
        return f"{super().short_description}, from pixels"

    def example(self, checkpoint: str, config) -> str:
        return POLICY_EXAMPLE.format(checkpoint=checkpoint, frames=self.example_frames, size=prod(PIXELS))


def as_pixels(observations: torch.Tensor) -> torch.Tensor:
    """Bytes (batch, time, 3 x 32 x 64) for observations (batch, time, 16); most frames are drawn once for many."""
    rows, index = np.unique(observations.flatten(0, 1).numpy(), axis=0, return_inverse=True)
    drawn = torch.from_numpy(draw_pixels(rows)).flatten(1)
    return drawn[torch.from_numpy(index.reshape(-1))].view(*observations.shape[:2], -1)
