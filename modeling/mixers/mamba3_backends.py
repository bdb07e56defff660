"""The registry of compiled Mamba-3 mixers, which run beside a backend of the scan where there is one of its name."""

from collections.abc import Callable
from typing import NamedTuple

from .mamba3_cpu import mixer_cpu, policy_block, step_cpu


class MixerBackend(NamedTuple):
    """
    `mix` is the mixer between its projections, with the arguments and results of `mixer_cpu`; `step` is all of it, and
    of the frame around it, for single tokens, with those of `step_cpu`; `policy_block` is what it takes of a block to
    stand for all of a policy at once, with those of `policy_block` there, or None.
    """

    mix: Callable
    step: Callable
    policy_block: Callable | None = None


# By the name of the scan's backend. The mixer runs in torch, around the scan, beside those that have no entry.
MIXER_BACKENDS: dict[str, MixerBackend] = {"cpu": MixerBackend(mixer_cpu, step_cpu, policy_block)}
