"""Numbers in the equations of the Mamba-3 mixer that no configuration changes. Compiled code takes them from here."""

from typing import NamedTuple


class MixerNumbers(NamedTuple):
    """In the order of the struct `Mixer` in the C++ source."""

    beta_max: float = 2.0  # beta = beta_max sigmoid(x)
    # With exact gates beta = clamp(beta_stretch sigmoid(x) - beta_shift, 0, beta_max), so that it reaches both ends,
    beta_stretch: float = 2.2
    beta_shift: float = 0.1
    rate_shift: float = 0.05  # a = relu(softplus(x) - rate_shift), so that it reaches 0,
    # and omega = pi sign(t) relu(|t| - angle_shift) / (1 - angle_shift) with t = tanh(x), so that it reaches 0.
    angle_shift: float = 0.1
    shortest_k: float = 1e-12  # k = x / max(|x|, shortest_k)


NUMBERS = MixerNumbers()
