"""Numbers that are not finite: where they come from, and the error that ends a run with them."""

import torch
from torch import nn


class NotFiniteError(ArithmeticError):
    """A loss, gradient or weight is not a finite number."""


@torch.no_grad()
def first_not_finite(model: nn.Module, batch: dict[str, torch.Tensor]) -> str:
    """Where a pass of this batch leaves the finite numbers first: in a weight, a module's output, or a gradient."""
    for name, parameter in model.named_parameters():
        if not all_finite(parameter):
            return f"the weight {name}"
    found, hooks = [], []
    for name, module in model.named_modules():

        def look(module, inputs, output, name=name):
            outputs = output if isinstance(output, tuple) else (output,)
            if any(torch.is_tensor(x) and not all_finite(x) for x in outputs):
                found.append(name)

        hooks.append(module.register_forward_hook(look))
    device = next(model.parameters()).device
    try:
        model(**{name: x.to(device) for name, x in batch.items()})
    finally:
        for hook in hooks:
            hook.remove()
    if found:
        return f"the output of {found[0] or type(model).__name__}"
    gradients = [name for name, x in model.named_parameters() if x.grad is not None and not all_finite(x.grad)]
    return f"the gradient of {gradients[0]}" if gradients else "the loss"


def all_finite(x: torch.Tensor) -> bool:
    # Of a tensor that is shared out over processes, each looks at its own part.
    return bool((x.to_local() if hasattr(x, "to_local") else x).isfinite().all())
