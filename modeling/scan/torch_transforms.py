"""
Whether torch does more than compute: differentiates or batches by means that the compiled operators have no rules for,
traces, or is watched. It has public names for some of this only; the private ones for the rest stand here.
"""

import torch
from torch.autograd import forward_ad


@torch.compiler.assume_constant_result
def is_transforming() -> bool:
    """
    Whether a function of torch.func (grad, jvp, vmap, jacfwd, hessian, ...) or forward-mode differentiation is at work.
    torch would let compiled code pass there with tangents of zero. A graph takes the answer without tracing it.
    """
    # Of all tensors: the weights of a model may be what is transformed as well as its inputs.
    return torch._C._functorch.peek_interpreter_stack() is not None or in_forward_mode()


def in_forward_mode() -> bool:
    return forward_ad._current_level >= 0


def is_plain_torch() -> bool:
    """Whether operators of torch would only compute, so that nobody misses those that are not called."""
    return is_plain_without_gradients() and not torch.is_grad_enabled()  # gradients need what happens inside


def is_plain_without_gradients() -> bool:
    """Whether they would only compute if gradients were turned off."""
    return not (
        torch.compiler.is_compiling()  # torch.compile and torch.export trace operators
        or torch.is_autocast_enabled("cpu")  # matrix products would be in another precision
        or is_watched()
        or is_transforming()  # vmap and the other transforms of torch.func; tangents flow without gradients too
    )


def is_watched() -> bool:
    """Whether somebody sees every operator that is called."""
    return bool(
        torch._C._get_tracing_state() is not None  # torch.jit.trace records operators
        or torch._C._len_torch_dispatch_stack()  # FakeTensorMode, make_fx, counters of operations
        or torch._C._len_torch_function_stack()  # a default device, and modes of users
    )


def refuse_forward_mode(name: str) -> None:
    """Lets an operator that is called by itself say what to use instead: its tangents would be zero."""
    if in_forward_mode():
        raise RuntimeError(
            f"{name} has no forward-mode derivative. The chunkwise scan has: give scan_backend='chunkwise' in the "
            "configuration, or backend='chunkwise' to scan()."
        )
