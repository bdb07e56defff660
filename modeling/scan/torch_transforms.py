"""Whether torch differentiates or batches by means that the compiled operators have no rules for."""

import torch
from torch.autograd import forward_ad


@torch.compiler.assume_constant_result
def is_transforming() -> bool:
    """
    Whether a function of torch.func (grad, jvp, vmap, jacfwd, hessian, ...) or forward-mode differentiation is at work.
    torch would let compiled code pass there with tangents of zero. A graph takes the answer without tracing it.
    """
    # torch has no public name for either. The weights of a model may be what is transformed as well as its inputs, so
    # that to ask single tensors would not do.
    return torch._C._functorch.peek_interpreter_stack() is not None or in_forward_mode()


def in_forward_mode() -> bool:
    return forward_ad._current_level >= 0


def refuse_forward_mode(name: str) -> None:
    """Lets an operator that is called by itself say what to use instead: its tangents would be zero."""
    if in_forward_mode():
        raise RuntimeError(
            f"{name} has no forward-mode derivative. The chunkwise scan has: give scan_backend='chunkwise' in the "
            "configuration, or backend='chunkwise' to scan()."
        )
