r"""
Running products of input-dependent matrices, read along one direction:

    A_t = gelu(sum_i x_t[i] A[i])        P_t = P_{t-1} A_t        y_t = P_t w

The products grow or shrink exponentially with t, beyond the range of float32 within tens of steps, so they are kept as
P_t = 2^e_t p_t, with the integer e_t such that the largest element of p_t lies between 1 and 2. Scaling by a power of
two rounds nothing: wherever the product itself is in range the result is the same to the last bit.

The matrices of a whole sequence would fill the memory (batch 64, length 64, 110 x 110: 200 MB, several times over in
a gradient), so they are made chunk by chunk, and once more in the backward pass, which needs only the product before
each chunk. The steps of a chunk run one after another, each for the whole batch at once.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F


class ScaledProduct(NamedTuple):
    """The product 2^exponent p."""

    p: torch.Tensor  # (batch, s, s)
    exponent: torch.Tensor  # (batch, 1), whole numbers


def identity_products(batch: int, size: int, like: torch.Tensor) -> ScaledProduct:
    eye = torch.eye(size, dtype=like.dtype, device=like.device)
    return ScaledProduct(eye.expand(batch, size, size), like.new_zeros(batch, 1))


def running_products(
    x: torch.Tensor,
    A: torch.Tensor,
    w: torch.Tensor,
    initial: ScaledProduct,
    lengths: torch.Tensor | None = None,
    *,
    chunk_elements: int,
) -> tuple[torch.Tensor, torch.Tensor, ScaledProduct]:
    """
    Args:
        x (batch, length, d), A (d, s, s), w (s): As above, in one dtype.
        initial: The product before the first step.
        lengths (batch): Steps of each row that count; those after them change nothing. All if None.
        chunk_elements: Numbers in the matrices of a chunk. It changes no result.

    Returns:
        p_t w (batch, length, s), the exponents e_t (batch, length), and the product after the last step. Gradients flow
        to all but exponents.
    """
    size = max(1, chunk_elements // max(1, x.shape[0] * A.shape[1] ** 2))
    y, exponents, p = RunningProducts.apply(x, A, w, initial.p, lengths, size)
    exponents = initial.exponent + exponents
    last = torch.cat([initial.exponent, exponents], dim=1)[:, -1:]
    return y, exponents, ScaledProduct(p, last)


class Chunk(NamedTuple):
    """
    The matrices of some steps. Inputs that are equal, as those of a token in the first layer are, share one matrix: to
    make it costs more than to multiply by it.
    """

    steps: slice
    inputs: torch.Tensor  # (distinct, d)
    sums: torch.Tensor  # (distinct, s, s), before the activation
    matrices: torch.Tensor  # (distinct, s, s)
    index: torch.Tensor  # (batch, steps), which of them a step takes
    filled: torch.Tensor | None  # (batch, steps), whether a step counts; all do if None

    def unbind(self):
        """The matrices of one step after another, (batch, s, s); identities where a step does not count."""
        for step, index in enumerate(self.index.unbind(1)):
            matrix = self.matrices[index]
            if self.filled is not None:
                eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
                matrix = torch.where(self.filled[:, step, None, None], matrix, eye)
            yield matrix


class RunningProducts(torch.autograd.Function):
    """p_t w, the exponents relative to the start, and the last p; one chunk in memory at a time."""

    @staticmethod
    def forward(ctx, x, A, w, p, lengths, size):
        starts, outputs, scales = [], [], []
        for start in range(0, x.shape[1], size):
            starts.append(p)
            for matrix in make_chunk(x, A, lengths, start, size).unbind():
                p, scale = rescale(p @ matrix)
                outputs.append(p @ w)
                scales.append(scale)
        ctx.save_for_backward(x, A, w, lengths, *starts, *scales)
        ctx.size = size
        y, exponents = x.new_zeros(*x.shape[:2], len(w)), x.new_zeros(x.shape[:2])
        if outputs:
            y = torch.stack(outputs, dim=1)
            exponents = -torch.log2(torch.stack(scales, dim=1)).round().cumsum(1)
        ctx.mark_non_differentiable(exponents)
        return y, exponents, p if outputs else p.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_y, _, grad_p):
        x, A, w, lengths, *kept = ctx.saved_tensors
        chunks = range(0, x.shape[1], ctx.size)
        starts, scales = kept[: len(chunks)], kept[len(chunks) :]
        grad_x, grad_A, grad_w = torch.zeros_like(x), torch.zeros_like(A), torch.zeros_like(w)
        for start, p in reversed(list(zip(chunks, starts, strict=True))):
            chunk = make_chunk(x, A, lengths, start, ctx.size)
            steps = chunk.steps
            grad_matrices, grad_p, grad_w_chunk = backward_through_products(
                chunk, p, scales[steps], w, grad_y[:, steps], grad_p
            )
            grad_w += grad_w_chunk
            grad_sums = torch.ops.aten.gelu_backward(grad_matrices, chunk.sums[chunk.index]).flatten(2)
            grad_x[:, steps] = grad_sums @ A.flatten(1).mT
            by_input = torch.zeros_like(chunk.sums).flatten(1)
            by_input.index_add_(0, chunk.index.flatten(), grad_sums.flatten(0, 1))
            grad_A += (chunk.inputs.mT @ by_input).view_as(A)
        return grad_x, grad_A, grad_w, grad_p, None, None


def backward_through_products(chunk: Chunk, p, scales, w, grad_y, grad_p):
    """The gradients of the matrices of a chunk (batch, steps, s, s), of the product before it, and of w."""
    matrices, products = list(chunk.unbind()), [p]
    for matrix, scale in zip(matrices, scales, strict=True):
        products.append((products[-1] @ matrix) * scale[:, None, None])
    gradients, grad_w = [], torch.zeros_like(w)
    # Backwards; what has been used goes, to make room for the gradients.
    for gradient, scale in zip(reversed(grad_y.unbind(1)), reversed(scales), strict=True):
        grad_w += (products.pop().mT @ gradient[..., None]).sum(0).squeeze(-1)
        grad_p = (grad_p + gradient[..., None] * w) * scale[:, None, None]
        gradients.append(products[-1].mT @ grad_p)
        grad_p = grad_p @ matrices.pop().mT
    gradients = torch.stack(gradients[::-1], dim=1)
    if chunk.filled is not None:
        gradients = gradients * chunk.filled[..., None, None]
    return gradients, grad_p, grad_w


def make_chunk(x, A, lengths, start, size) -> Chunk:
    steps = slice(start, min(start + size, x.shape[1]))
    piece = x[:, steps]
    inputs, index = distinct(piece.flatten(0, 1))
    sums = (inputs @ A.flatten(1)).unflatten(1, A.shape[1:])
    filled = None
    if lengths is not None:
        filled = torch.arange(steps.start, steps.stop, device=x.device) < lengths[:, None]
    return Chunk(steps, inputs, sums, F.gelu(sums), index.view(piece.shape[:2]), filled)


def distinct(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The distinct rows of x (number, d), and which of them each row is; all, where a look at values would cost."""
    if x.is_cpu and not torch.compiler.is_compiling():
        return torch.unique(x, dim=0, return_inverse=True)
    return x, torch.arange(len(x), device=x.device)


def rescale(product: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The product times a power of two for each row, and these powers (batch,)."""
    largest = product.abs().amax((1, 2))
    mantissa, _ = torch.frexp(largest)  # at least one half and below 1
    # A quotient of a number and its own mantissa is a power of two exactly. What is near 0 or not finite stays.
    usual = (largest > 4 * torch.finfo(product.dtype).tiny) & largest.isfinite()
    scale = torch.where(usual, 2 * mantissa / largest, 1.0)
    return product * scale[:, None, None], scale
