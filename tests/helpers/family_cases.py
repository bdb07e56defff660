"""Small models of all families by name, with weights that make every term of the equations matter."""

import torch

import mamba3_nplr
from helpers.model_cases import OPTIONS, SIZES, make_every_term_matter
from mamba3_nplr import DeltaFamilyConfig, IDS4Config, Mamba3NPLRConfig

SHARED = {"vocab_size": 11, "num_hidden_layers": 2, "num_labels": 5}
DELTA = {
    "hidden_size": 12,
    "num_heads": 3,
    "head_key_dim": 4,
    "head_value_dim": 6,
    "intermediate_size": 10,
    "chunk_size": 4,
}
PLAIN = {"conv_size": 0, "use_output_gate": False}

# Every option that changes a formula, of the families beside Mamba-3. beta reaches above 1 in all but one.
CASES = {
    "gdn": (DeltaFamilyConfig, DELTA),
    "deltanet": (DeltaFamilyConfig, DELTA | PLAIN | {"use_decay": False}),
    "deltanet_01": (DeltaFamilyConfig, DELTA | PLAIN | {"use_decay": False, "beta_max": 1}),
    "deltaproduct": (DeltaFamilyConfig, DELTA | PLAIN | {"use_decay": False, "num_householder": 3}),
    "gdp": (DeltaFamilyConfig, DELTA | PLAIN | {"num_householder": 2}),
    "gdp_everything": (DeltaFamilyConfig, DELTA | {"num_householder": 2, "conv_size": 3}),
    "no_mlp": (DeltaFamilyConfig, DELTA | PLAIN | {"intermediate_size": 0}),
    "ids4": (IDS4Config, {"hidden_size": 12, "state_size": 5, "chunk_elements": 200}),
}
MAMBA3_CASES = {option: (Mamba3NPLRConfig, SIZES | fields) for option, fields in OPTIONS.items()}
ALL_CASES = CASES | MAMBA3_CASES
# Sizes of a small model of each family: those of its first case.
FAMILY_SIZES = {config_class: SHARED | fields for config_class, fields in reversed(ALL_CASES.values())}
DELTA_CASES = [case for case in CASES if case != "ids4"]


def case_config(case: str, **changes):
    config_class, fields = ALL_CASES[case]
    return config_class(**(SHARED | fields | changes))


def case_class(case: str, head: str = "Model") -> type:
    return getattr(mamba3_nplr, ALL_CASES[case][0].__name__.removesuffix("Config") + head)


def build_case(case: str, head: str = "Model", dtype=torch.float64, **changes):
    """A model in evaluation mode whose parameters are all away from their neutral initial values."""
    return make_every_term_matter(case_class(case, head)(case_config(case, **changes)).to(dtype).eval())


def case_inputs(head: str, batch: int, length: int, dtype=torch.float64) -> dict[str, torch.Tensor]:
    if head == "ForBehaviorCloning":
        return {"observations": torch.randn(batch, length, 16, dtype=dtype)}
    return {"input_ids": torch.randint(0, SHARED["vocab_size"], (batch, length))}
