"""Small models with weights that make every term of the equations matter."""

import torch

from mamba3_nplr import Mamba3NPLRConfig

SIZES = {
    "vocab_size": 11,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "state_size": 6,
    "head_dim": 4,
    "expand": 2,
    "num_rope_pairs": 2,
    "chunk_size": 4,
    "num_labels": 5,
}

# Every option of the configuration that changes a formula, alone and all together.
OPTIONS = {
    "paper": {},
    "rank0": {"reflection_rank": 0},
    "no_rope": {"use_rope": False},
    "rope_per_head": {"rope_per_head": True},
    "contractive": {"reflection_form": "contractive"},
    "delta": {"injection": "delta", "reflection_form": "contractive"},
    "overwrite": {
        "reflection_form": "contractive",
        "gate_form": "exact",
        "injection": "overwrite",
        "initial_state": "learned",
        "rope_per_head": True,
    },
    "exact_gates": {"gate_form": "exact"},
    "learned_state": {"initial_state": "learned"},
    "heavy_tail": {"decay_activation": "heavy_tail"},
    "output_norm": {"output_norm": True},
    "rms_norm": {"block_norm": "rms_norm"},
    "no_block_norm": {"block_norm": "none"},
    "no_residual": {"residual": False},
    "bare_blocks": {"block_norm": "none", "residual": False, "output_norm": True},
    "exact_tracking": {
        "reflection_form": "contractive",
        "gate_form": "exact",
        "injection": "delta",
        "initial_state": "learned",
        "use_rope": False,
    },
}


def small_config(option: str = "paper", **changes) -> Mamba3NPLRConfig:
    return Mamba3NPLRConfig(**(SIZES | OPTIONS[option] | changes))


def build(model_class, option: str = "paper", dtype=torch.float64, **changes):
    """A model in evaluation mode whose parameters are all away from their neutral initial values."""
    return make_every_term_matter(model_class(small_config(option, **changes)).to(dtype).eval())


@torch.no_grad()
def make_every_term_matter(model):
    """The model with its parameters moved away from where some terms of the equations are 0 or too small to notice."""
    for name, parameter in model.named_parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
        if name.endswith("dt_bias"):
            parameter.add_(4.0)  # steps of about one half: decay, phase and injections all matter
        if name.endswith("A_log"):
            parameter.copy_(-1 + 0.3 * torch.randn_like(parameter))  # decays of about one half
    return model


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, SIZES["vocab_size"], (batch, length))
