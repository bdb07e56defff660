r"""
Running products of input-dependent matrices, read along one direction:

    A_t = gelu(sum_i x_t[i] A[i])        P_t = P_{t-1} A_t        y_t = P_t w

The products grow or shrink exponentially with t, beyond any floating-point range within a hundred steps, so they are
kept as P_t = 2^e_t p_t, with the integer e_t such that the largest element of p_t lies between 1 and 2. Scaling by a
power of two rounds nothing: wherever the product itself is in range the result is the same to the last bit.

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
    chunk_elements: int = 2**23,
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
    chunk = max(1, chunk_elements // max(1, x.shape[0] * A.shape[1] ** 2))
    y, exponents, p = RunningProducts.apply(x, A, w, initial.p, lengths, chunk)
    exponents = initial.exponent + exponents
    last = torch.cat([initial.exponent, exponents], dim=1)[:, -1:]
    return y, exponents, ScaledProduct(p, last)


class RunningProducts(torch.autograd.Function):
    """p_t w, the exponents relative to the start, and the last p; one chunk in memory at a time."""

    @staticmethod
    def forward(ctx, x, A, w, p, lengths, chunk):
        starts, outputs, scales = [], [], []
        for start in range(0, x.shape[1], chunk):
            _, matrices = make_matrices(x, A, lengths, start, chunk)
            starts.append(p)
            for matrix in matrices.unbind(1):
                p, scale = rescale(p @ matrix)
                outputs.append(p @ w)
                scales.append(scale)
        ctx.save_for_backward(x, A, w, lengths, *starts, *scales)
        ctx.chunk = chunk
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
        length, chunk = x.shape[1], ctx.chunk
        chunks = range(0, length, chunk)
        starts, scales = kept[: len(chunks)], kept[len(chunks) :]
        grad_x, grad_A, grad_w = torch.zeros_like(x), torch.zeros_like(A), torch.zeros_like(w)
        for p, start in reversed(list(zip(starts, chunks, strict=True))):
            sums, matrices = make_matrices(x, A, lengths, start, chunk)
            steps = matrices.shape[1]
            products = [p]
            for matrix, scale in zip(matrices.unbind(1), scales[start:], strict=False):
                products.append(p := (p @ matrix) * scale[:, None, None])
            for step in reversed(range(steps)):
                gradient = grad_y[:, start + step]
                grad_w += (products[step + 1].mT @ gradient[..., None]).sum(0).squeeze(-1)
                grad_p = (grad_p + gradient[..., None] * w) * scales[start + step][:, None, None]
                matrix = matrices[:, step].clone()
                # In place of the matrix, which is needed no more.
                matrices[:, step] = products[step].mT @ grad_p
                grad_p = grad_p @ matrix.mT
            grad_sums = gelu_gradient(matrices, sums)
            if lengths is not None:
                grad_sums = grad_sums * filled(lengths, start, steps)[..., None, None]
            piece = x[:, start : start + steps].flatten(0, 1)
            grad_sums = grad_sums.flatten(0, 1).flatten(1)
            grad_x[:, start : start + steps] = (grad_sums @ A.flatten(1).mT).unflatten(0, (-1, steps))
            grad_A += (piece.mT @ grad_sums).view_as(A)
        return grad_x, grad_A, grad_w, grad_p, None, None


def make_matrices(x, A, lengths, start, chunk) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums and the matrices A_t of the steps of a chunk, (batch, steps, s, s); identities past a row's end."""
    piece = x[:, start : start + chunk]
    sums = (piece.flatten(0, 1) @ A.flatten(1)).view(*piece.shape[:2], *A.shape[1:])
    matrices = F.gelu(sums)
    if lengths is not None:
        eye = torch.eye(A.shape[1], dtype=A.dtype, device=A.device)
        matrices = torch.where(filled(lengths, start, piece.shape[1])[..., None, None], matrices, eye)
    return sums, matrices


def filled(lengths: torch.Tensor, start: int, steps: int) -> torch.Tensor:
    return torch.arange(start, start + steps, device=lengths.device) < lengths[:, None]


def rescale(product: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The product times a power of two for each row, and these powers (batch,)."""
    largest = product.abs().amax((1, 2))
    mantissa, _ = torch.frexp(largest)  # at least one half and below 1
    # A quotient of a number and its own mantissa is a power of two exactly. What is near 0 or not finite stays.
    usual = (largest > 4 * torch.finfo(product.dtype).tiny) & largest.isfinite()
    scale = torch.where(usual, 2 * mantissa / largest, 1.0)
    return product * scale[:, None, None], scale


def gelu_gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.gelu_backward(grad, x)
