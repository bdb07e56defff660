"""
One-block models from the weights of an official Mamba-3 module, single input and single output (SISO).

    python -m mamba3_nplr.modeling.convert_official WEIGHTS.safetensors OUT [--prefix P]
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..configuration.configuration_mamba3_nplr import Mamba3NPLRConfig
from .modeling_mamba3_nplr import Mamba3NPLRModel

SHAPES = {
    "in_proj.weight": ("rows", "hidden"),
    "dt_bias": ("heads",),
    "B_bias": ("heads", 1, "state"),
    "C_bias": ("heads", 1, "state"),
    "B_norm.weight": ("state",),
    "C_norm.weight": ("state",),
    "D": ("heads",),
    "norm.weight": ("inner",),
    "out_proj.weight": ("hidden", "inner"),
}
# Which weight, and which axis of it, decides a size; the other weights must agree.
SIZES = {
    "rows": ("in_proj.weight", 0),
    "hidden": ("out_proj.weight", 0),
    "inner": ("out_proj.weight", 1),
    "heads": ("dt_bias", 0),
    "state": ("B_norm.weight", 0),
}
OPTIONAL = {"norm.weight"}
MIMO = ("mimo_x", "mimo_z", "mimo_o")
# The activation of the newest official release; weights do not tell which one they were trained with.
NEWEST_DECAY_ACTIVATION = "heavy_tail"


def config_from_official(
    state_dict: Mapping[str, torch.Tensor],
    *,
    prefix: str = "",
    decay_activation: str = NEWEST_DECAY_ACTIVATION,
    a_min: float = Mamba3NPLRConfig.a_min,
) -> Mamba3NPLRConfig:
    """
    The configuration of a one-block model that computes what an official SISO module computes, read off the shapes of
    its weights.

    Args:
        state_dict: The module's weights, or those of a model that contains it.
        prefix: What stands before the names of the module's weights, such as "backbone.layers.0.mixer.".
        decay_activation: "heavy_tail", or "softplus" for weights trained with an older official release.
        a_min: The module's `A_floor`.
    """
    weights = official_weights(state_dict, prefix)
    sizes = find_sizes(weights)
    return Mamba3NPLRConfig(
        hidden_size=sizes["hidden"],
        state_size=sizes["state"],
        head_dim=divide("inner", "heads", sizes),
        expand=divide("inner", "hidden", sizes),
        num_rope_pairs=count_pairs(sizes),
        # The module alone, without what stands around it in a model.
        block_norm="none",
        residual=False,
        output_norm="norm.weight" in weights,
        reflection_rank=0,
        input_type="embeddings",
        decay_activation=decay_activation,
        a_min=a_min,
    )


def convert_official(state_dict: Mapping[str, torch.Tensor], *, prefix: str = "", **options) -> Mamba3NPLRModel:
    """
    A one-block model, in evaluation mode, whose `layers[0].mixer` holds a copy of the module's weights, each in its own
    dtype. `options` are those of `config_from_official`.
    """
    weights = official_weights(state_dict, prefix)
    config = config_from_official(weights, **options)
    # Nothing needs to be allocated or drawn: every parameter is replaced.
    with torch.device("meta"):
        model = Mamba3NPLRModel(config)
    copies = {key: weight.detach().clone() for key, weight in weights.items()}
    model.layers[0].mixer.load_state_dict(copies, strict=True, assign=True)
    return model.eval()


def official_weights(state_dict: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The weights under `prefix` by their names in the module; an error if they are not those of one SISO module."""
    start = f"{prefix.removesuffix('.')}." if prefix else ""
    weights = {key.removeprefix(start): weight for key, weight in state_dict.items() if key.startswith(start)}
    for key in MIMO:
        if key in weights:
            refuse_mimo(start + key, weights[key])
    missing = [start + key for key in SHAPES if key not in weights and key not in OPTIONAL]
    unexpected = [start + key for key in weights if key not in SHAPES]
    if missing or unexpected:
        message = f"prefix={prefix!r} does not select the weights of one official Mamba-3 module"
        found = [f"{what} {shorten(keys)}" for what, keys in (("missing", missing), ("unexpected", unexpected)) if keys]
        raise ValueError(f"{message}: {'; '.join(found)}.{suggest_prefixes(state_dict, start)}")
    return weights


def shorten(keys: Sequence[str], most: int = 10) -> str:
    rest = f" and {len(keys) - most} more" if len(keys) > most else ""
    return ", ".join(keys[:most]) + rest


def suggest_prefixes(state_dict: Mapping[str, torch.Tensor], start: str) -> str:
    # B_bias, unlike in_proj.weight, is found in no other kind of layer.
    modules = [key.removesuffix("B_bias") for key in state_dict if key.rpartition(".")[2] == "B_bias"]
    candidates = [repr(module) for module in modules if module != start]
    return f" Prefixes with a Mamba-3 module: {', '.join(candidates)}." if candidates else ""


def find_sizes(weights: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The sizes named in SHAPES; an error if two weights disagree about one."""
    shapes = {key: tuple(weight.shape) for key, weight in weights.items()}
    for key, found in shapes.items():
        if len(found) != len(SHAPES[key]) or 0 in found:
            raise ValueError(f"{key} has shape {found}; it must be ({', '.join(map(str, SHAPES[key]))}), all above 0.")
    if shapes["B_bias"][1] != 1:
        refuse_mimo("B_bias", weights["B_bias"])
    sizes = {name: shapes[key][axis] for name, (key, axis) in SIZES.items()}
    for key, found in shapes.items():
        expected = tuple(sizes.get(name, name) for name in SHAPES[key])
        if found != expected:
            origins = ", ".join(f"{name}={sizes[name]} by {SIZES[name][0]}" for name in SHAPES[key] if name in SIZES)
            raise ValueError(f"{key} has shape {found}; it must be {expected}: {origins}.")
    return sizes


def refuse_mimo(key: str, weight: torch.Tensor) -> None:
    raise ValueError(
        f"{key} with shape {tuple(weight.shape)} belongs to a module with several inputs and outputs (is_mimo=True); "
        "only SISO modules can be converted: without mimo_x, mimo_z and mimo_o, and with B_bias (heads, 1, state)."
    )


def divide(whole: str, part: str, sizes: Mapping[str, int]) -> int:
    quotient, rest = divmod(sizes[whole], sizes[part])
    if rest:
        raise ValueError(
            f"out_proj.weight has shape ({sizes['hidden']}, {sizes['inner']}) and dt_bias ({sizes['heads']},); "
            f"{whole}={sizes[whole]} must be a multiple of {part}={sizes[part]}."
        )
    return quotient


def count_pairs(sizes: Mapping[str, int]) -> int:
    """The rotated pairs: the rows of in_proj that are left for the angles."""
    state = sizes["state"]
    others = 2 * sizes["inner"] + 2 * state + 3 * sizes["heads"]
    pairs = sizes["rows"] - others
    if 1 <= pairs <= state // 2:
        return pairs
    found = f"in_proj.weight has shape ({sizes['rows']}, {sizes['hidden']})"
    # Each further group of B and C has 2 * state rows.
    further_groups, angles = divmod(pairs, 2 * state)
    if further_groups > 0 and 1 <= angles <= state // 2:
        raise ValueError(f"{found}: B and C in {further_groups + 1} groups; only ngroups=1 can be converted.")
    raise ValueError(
        f"{found}; beside the other weights it must have {others} rows for z, x, B, C, dt, A and trap, and 1 to "
        f"{state // 2} more for the angles."
    )


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix != ".safetensors":
        raise ValueError(
            f"{path} is not a .safetensors file. Formats such as .pt and .bin are pickles, which can run any code when "
            "they are read, so they are refused. Save the weights again: safetensors.torch.save_file({key: x.clone() "
            "for key, x in torch.load(path, weights_only=True).items()}, 'weights.safetensors')."
        )
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged, or not a safetensors file in spite of its name ({error}).") from error


def check_output(out: Path, weights: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"OUT={out} is a file; it must be a folder, or a path where a new one can be made.")
    if out.resolve() == weights.resolve().parent:
        raise ValueError(f"OUT={out} is the folder of {weights.name}, which could be overwritten; give another folder.")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mamba3_nplr.modeling.convert_official",
        description="Turns the weights of one official SISO Mamba-3 module into a one-block model, which loads with "
        "from_pretrained and computes the same.",
    )
    parser.add_argument("weights", metavar="WEIGHTS.safetensors", type=Path, help="file with the module's weights")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder that the model is written to")
    parser.add_argument(
        "--prefix",
        default="",
        metavar="P",
        help="what stands before the names of its weights, such as backbone.layers.0.mixer. (default: nothing)",
    )
    parser.add_argument(
        "--decay_activation",
        choices=("heavy_tail", "softplus"),
        default=NEWEST_DECAY_ACTIVATION,
        help="activation of the decay rate; older official releases used softplus (default: %(default)s)",
    )
    parser.add_argument(
        "--a_min",
        type=float,
        default=Mamba3NPLRConfig.a_min,
        help="the module's A_floor, the lower bound of the decay rate (default: %(default)s)",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser()
    given = parser.parse_args(arguments)
    try:
        check_output(given.out, given.weights)
        state_dict = read_safetensors(given.weights)
        model = convert_official(
            state_dict, prefix=given.prefix, decay_activation=given.decay_activation, a_min=given.a_min
        )
    except (ValueError, OSError, StrictDataclassError) as error:
        parser.error(str(error))
    model.save_pretrained(given.out)
    print(f"Wrote {given.out}: {describe(model)}")


def describe(model: Mamba3NPLRModel) -> str:
    config, dtype = model.config, model.layers[0].mixer.in_proj.weight.dtype
    return (
        f"hidden_size {config.hidden_size}, {config.num_heads} heads of {config.head_dim} channels, state_size "
        f"{config.state_size}, {config.num_rope_pairs} rotated pairs, {config.decay_activation} decay, "
        f"{model.num_parameters():,} parameters in {str(dtype).removeprefix('torch.')}"
    )


if __name__ == "__main__":
    main()
