"""Pictures as hidden states: a small convolutional network in place of the map of observations."""

import torch
import torch.nn.functional as F
from torch import nn

from .mixers.letters import is_seen_by_others

CHANNELS = (16, 32, 32)
# Numbers by which equal pictures are found; any odd ones that are far from each other would do.
MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64


class PixelEncoder(nn.Module):
    """
    Pictures (..., observation_size), flat, of bytes or of floating numbers from 0 to 255, to (..., hidden_size). Three
    convolutions, each of which halves height and width, a linear map, and a norm over pictures. Equal pictures of
    bytes, as the frames of episodes often are, are encoded once.
    """

    def __init__(self, config):
        super().__init__()
        self.shape = tuple(config.pixel_shape)
        channels = (self.shape[0], *CHANNELS)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, kernel_size, stride=2, padding=kernel_size // 2)
            for before, after, kernel_size in zip(channels, CHANNELS, (5, 3, 3), strict=False)
        )
        places = self.shape[1] // 8 * (self.shape[2] // 8)
        self.projection = nn.Linear(CHANNELS[-1] * places, config.hidden_size, bias=False)
        # Pictures of a scene are nearly the same: a ball that is shown changes their encodings by a tenth. What is left
        # without their mean is what the blocks have to learn from.
        self.norm = PictureNorm(config.hidden_size)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        flat = pictures.reshape(-1, pictures.shape[-1])
        found = None if is_seen_by_others() else find_equal_pictures(flat)
        if found is None:
            hidden_states = self.encode(flat)
        else:
            distinct, index = found
            hidden_states = F.embedding(index, self.encode(distinct))
        return self.norm(hidden_states).view(*pictures.shape[:-1], -1)

    def encode(self, pictures: torch.Tensor) -> torch.Tensor:
        """Pictures (number, observation_size) to (number, hidden_size)."""
        x = pictures.to(self.projection.weight.dtype).view(-1, *self.shape) / 255 - 0.5
        for convolution in self.convolutions:
            x = F.silu(convolution(x))
        return self.projection(x.flatten(1))


class PictureNorm(nn.BatchNorm1d):
    """Takes encodings around their mean: in training that of the batch, else the one that was learned."""

    def forward(self, encodings: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() or not self.training:
            return super().forward(encodings)
        # Who acts without gradients does not train, though nobody has said so: one picture has no mean of its own.
        return F.batch_norm(encodings, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


def find_equal_pictures(pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The distinct ones of pictures (number, size) of bytes, and which of them each is; None where none are equal."""
    number, size = pictures.shape
    if pictures.dtype != torch.uint8 or not pictures.is_cpu or number < 2 or size % 8:
        return None
    words = pictures.contiguous().view(torch.int64)  # eight bytes each
    weights = torch.arange(1, words.shape[1] + 1) * MULTIPLIER | 1
    # Whole numbers overflow alike everywhere: equal pictures have equal sums, and others almost never have.
    sums = (words * weights).sum(1)
    _, index = torch.unique(sums, return_inverse=True)
    count = int(index.max()) + 1
    if 2 * count > number:
        return None
    one_of_each = index.new_empty(count).scatter_(0, index, torch.arange(number))
    distinct = words.index_select(0, one_of_each)
    if not torch.equal(distinct.index_select(0, index), words):
        return None
    return distinct.view(torch.uint8), index


__all__ = ["PixelEncoder"]
