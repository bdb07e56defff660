"""The definition of the scan as a loop operator, for graphs that leave the length of their sequences open."""

import torch

from .definition import ScanInputs, ScanState, add_skip, next_h, read


def length_is_open(x: torch.Tensor) -> bool:
    """Whether x (batch, length, ...) is traced into a graph of torch.export that will run at any length."""
    return torch.compiler.is_exporting() and isinstance(x.shape[1], torch.SymInt)


def scan_loop(inputs: ScanInputs, initial: ScanState, chunk_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Same arguments and results as `scan_definition`, for at least one step."""
    # Not before: torch calls it a prototype, and nothing else here should depend on its place.
    from torch._higher_order_ops.scan import scan as loop

    # The operator takes no None, and a loop that copied its inputs into its state would alias them.
    given = {name: x for name, x in inputs._asdict().items() if x is not None and name != "D"}
    before = {"B": token_before(inputs.B, initial.B), "u": token_before(inputs.u, initial.u)}
    before = before if inputs.carry is not None else {}

    def advance(h, coefficients):
        step, before = coefficients
        h = next_h(ScanState(h, before.get("B"), before.get("u")), ScanInputs(**step))
        return h, read(step["C"], h)

    h, y = loop(advance, initial.h.contiguous(), (given, before), dim=1)
    return add_skip(y, inputs), h


def token_before(x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    return torch.cat([first[:, None], x], dim=1)[:, :-1]
