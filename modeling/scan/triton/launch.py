"""Which of the `kernels` run, with which settings, and their launches; the first imports Triton."""

import os
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from ..definition import ScanInputs, ScanState
from ..operator_arguments import SCAN_STATES
from ..sequences import TokenOrder

# Of n and channels; the tiles of a chunk of larger ones do not fit a multiprocessor of a GPU.
LARGEST = 128
LARGEST_FUSED = 32
WIDEST_BLOCK = 64
NARROW_BLOCK = 32


class Settings(NamedTuple):
    """How the kernels see the sizes and the dtype of a scan; a configuration is compiled for each that occurs."""

    n: int
    channels: int
    N: int  # n and channels as powers of two, at least 16
    P: int
    CHUNK: int
    DOT: str  # dtype of the operands of matrix products
    PRECISION: str  # of matrix products of float32 operands
    EXACT: str  # the same in the triangular solve

    @property
    def small(self) -> bool:
        """Whether one kernel can do all the work, with a state that fits the registers of a warp or two."""
        return max(self.N, self.P) <= LARGEST_FUSED


def make_settings(n: int, channels: int, dtype: torch.dtype, exact: str = "tf32x3") -> Settings:
    N, P = (max(16, 1 << (size - 1).bit_length()) for size in (n, channels))
    small = max(N, P) <= LARGEST_FUSED
    # A tf32 operand holds all digits of float16 and, unlike float16, all values of a state.
    DOT = "bf16" if dtype == torch.bfloat16 else "fp32"
    PRECISION = "tf32" if dtype == torch.float16 and exact == "tf32x3" else exact
    # Longer chunks keep fewer states, and need registers that float32 operands have taken.
    CHUNK = 16 if small or DOT == "fp32" else 32
    return Settings(n, channels, N, P, CHUNK, DOT, PRECISION, exact)


def slot_count(rows: int, batch: int, length: int, packed: bool, settings: Settings) -> int:
    """Places for chunks of (batch, length) tokens in so many sequences, each of them a row unless they are packed."""
    if packed:  # a number that suffices for sequences of any lengths
        return batch * length // settings.CHUNK + rows
    return rows * -(-length // settings.CHUNK)


def kept_dtype(dtype: torch.dtype) -> torch.dtype:
    """States are kept for the backward pass as matrix products read them."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on tensors of any device."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "on", "true", "y", "yes")


def exact_precision() -> str:
    """Products as good as float32: three of tf32 on NVIDIA's tensor cores; AMD's have float32 itself."""
    return "ieee" if torch.version.hip or interpreted() else "tf32x3"


def processors(device: torch.device) -> int:
    """How many programs it takes to give every multiprocessor of the GPU work."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def warps(kernel: str, settings: Settings) -> int:
    """Warps of a program, so many that its tiles fit the registers."""
    if kernel == "solve_kernel":
        return settings.CHUNK // 16
    if settings.small:
        return 1 if settings.N * settings.P <= 512 else 2
    # AMD's registers are shared out among fewer threads; those of EXACT = "ieee" are AMD's.
    return 4 if kernel == "step_kernel" or settings.EXACT == "ieee" else 8


def blocks(pairs: int, settings: Settings, device: torch.device) -> tuple[int, int]:
    """Width and number of the blocks of channels in kernels that run through the sequence."""
    width = min(settings.P, WIDEST_BLOCK)
    if pairs * -(-settings.P // width) < processors(device):
        width = min(settings.P, NARROW_BLOCK)
    return width, -(-settings.channels // width)


def kernel_settings(settings: Settings, block: int | None = None) -> Settings:
    """As a kernel sees them: P is the block of channels of a program, and the interpreter has no bfloat16."""
    return settings._replace(P=block or settings.P, DOT="fp32" if interpreted() else settings.DOT)


def arguments(function, tensors: dict[str, Any], **others) -> dict[str, Any]:
    """
    The arguments of a kernel by name, with None for tensors that are absent: those of a scan in the tuples that torch
    code has them in, and each of the rest as a pointer with its name and `_ptr`.
    """
    given = {
        "inputs": ScanInputs(*(tensors.get(name) for name in ScanInputs._fields)),
        "initial": ScanState(*(tensors.get(name) for name in SCAN_STATES)),
        "sequences": TokenOrder(*(tensors.get(name) for name in TokenOrder._fields)),
        "gradients": ScanInputs(*(tensors.get(f"d{name}") for name in ScanInputs._fields)),
        "initial_gradients": ScanState(*(tensors.get(f"d{name}") for name in SCAN_STATES)),
    }
    given |= {f"{name}_ptr": x for name, x in tensors.items()} | others
    return {name: given.get(name) for name in function.arg_names}


def launch(
    kernel: str,
    grid: tuple[int, ...],
    settings: Settings,
    tensors: dict[str, torch.Tensor | None],
    block: int | None = None,
) -> None:
    """Runs a kernel, with so many channels a program if not all of them."""
    from .kernels import KERNELS

    function, device = KERNELS[kernel], tensors["u"].device
    length, heads = tensors["u"].shape[1:3]
    given = widened(tensors) if interpreted() else tensors
    every = arguments(function, given, length=length, heads=heads, settings=kernel_settings(settings, block))
    # Some architectures have been seen to corrupt results of pipelined loops with more than one stage.
    options = {"num_warps": warps(kernel, settings), "num_stages": 1}
    if not interpreted():
        options["enable_fp_fusion"] = True
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        function[grid](**every, **options)
    for name, x in given.items():
        if x is not tensors[name]:
            tensors[name].copy_(x)


def widened(tensors: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """The interpreter truncates where a GPU rounds, so half precision is left to torch there."""
    half = (torch.bfloat16, torch.float16)
    return {name: x.float() if x is not None and x.dtype in half else x for name, x in tensors.items()}


def forward(settings: Settings, tensors: dict[str, torch.Tensor | None]) -> None:
    """Fills y, h, kept and T, all of them in `tensors` beside the inputs; of a single step only y and h."""
    pairs, device = pair_count(tensors), tensors["u"].device
    width, count = blocks(pairs, settings, device)
    if is_step(tensors):
        launch("step_kernel", (pairs, count), settings, tensors, width)
        return
    if tensors["k"] is None or fused(pairs, settings, device):
        tensors = tensors | {"T": None}
    else:
        tensors = with_inverse(settings, tensors)
    launch("forward_kernel", (pairs, count), settings, tensors, width)


def backward(settings: Settings, tensors: dict[str, torch.Tensor | None]) -> None:
    """Fills the gradients, `d` and the name of each input, from the inputs, `dy`, `dh`, `kept` and `T`."""
    pairs, device, u = pair_count(tensors), tensors["u"].device, tensors["u"]
    if is_step(tensors):  # it keeps nothing
        tensors = tensors | {"kept": start_state(tensors).to(kept_dtype(u.dtype)).contiguous()}
    if fused(pairs, settings, device):
        launch("backward_kernel", (pairs,), settings, tensors)
        return
    if tensors["k"] is not None and (settings.small or is_step(tensors)):
        tensors = with_inverse(settings, tensors | {"T": None})
    dG = torch.empty_like(tensors["kept"])
    dv = u.new_empty(*dG.shape[:2], settings.channels, dtype=torch.float32)
    tensors = with_slot_rows(settings, tensors | {"dG": dG, "dv": dv})
    width, count = blocks(pairs, settings, device)
    launch("backward_state_kernel", (pairs, count), settings, tensors, width)
    launch("backward_chunk_kernel", tuple(dG.shape[:2]), settings, tensors)


def pair_count(tensors: dict[str, torch.Tensor | None]) -> int:
    rows, heads = tensors["h0"].shape[:2]
    return rows * heads


def is_step(tensors: dict[str, torch.Tensor | None]) -> bool:
    return tensors["u"].shape[1] == 1 and tensors["bounds"] is None


def start_state(tensors: dict[str, torch.Tensor | None]) -> torch.Tensor:
    """G before the first token: the initial state and the carry into that token."""
    if tensors["carry"] is None:
        return tensors["h0"]
    carry = tensors["carry"][:, 0, :, None, None].float()
    return tensors["h0"] + carry * tensors["B0"][..., :, None] * tensors["u0"][..., None, :]


def fused(pairs: int, settings: Settings, device: torch.device) -> bool:
    """One kernel for a whole sequence, where the sequences are enough to occupy the GPU."""
    return settings.small and pairs >= processors(device)


def with_inverse(settings: Settings, tensors: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """Fills T, in a new tensor if there is none."""
    slots, heads = tensors["kept"].shape[:2]
    T = tensors["T"]
    if T is None or not T.numel():
        T = tensors["u"].new_empty(slots, heads, settings.CHUNK, settings.CHUNK, dtype=torch.float32)
    tensors = with_slot_rows(settings, tensors | {"T": T})
    launch("solve_kernel", (slots, heads), settings, tensors)
    return tensors


def with_slot_rows(settings: Settings, tensors: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """Adds the row of each slot for chunks, which programs for single chunks look up, where sequences are packed."""
    bounds = tensors["bounds"]
    if bounds is None or tensors.get("rows") is not None:
        return tensors
    rows, device = torch.arange(bounds.shape[0], device=bounds.device), bounds.device
    first = bounds[:, 0] // settings.CHUNK + rows
    slots = torch.arange(tensors["kept"].shape[0], device=device)
    return tensors | {"rows": torch.searchsorted(first, slots, right=True) - 1}
