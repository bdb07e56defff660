r"""
Running products of input-dependent matrices, read along one direction:

    A_t = gelu(sum_i x_t[i] A[i])        P_t = P_{t-1} A_t        y_t = P_t w

The products grow or shrink exponentially with t, beyond the range of float32 within tens of steps, so they are kept as
P_t = 2^e_t p_t, with the integer e_t such that the largest element of p_t lies between 1 and 2. Scaling by a power of
two rounds nothing: wherever the product itself is in range the result is the same to the last bit.

The matrices of a whole sequence would fill the memory (batch 64, length 64, 110 x 110: 200 MB, several times over in
a gradient), so they are made chunk by chunk, and once more in the backward pass, which needs only the product before
each chunk. The steps of a chunk run one after another, each for the whole batch at once. Tokens that are the same
letter share one matrix: see `step_matrices`.

Where nobody asks for the last product, the last steps multiply vectors instead: see `vector_products`.
"""

import math
from typing import NamedTuple

import torch

from .letters import Letters
from .step_matrices import MatricesInChunks
from .vector_products import VectorProducts, powers_of_two


class ScaledProduct(NamedTuple):
    """The product 2^exponent p."""

    p: torch.Tensor  # (batch, s, s)
    exponent: torch.Tensor  # (batch, 1), whole numbers


def identity_products(batch: int, size: int, like: torch.Tensor) -> ScaledProduct:
    eye = torch.eye(size, dtype=like.dtype, device=like.device)
    return ScaledProduct(eye.expand(batch, size, size), like.new_zeros(batch, 1))


def running_products(
    x: torch.Tensor | Letters,
    A: torch.Tensor,
    w: torch.Tensor,
    initial: ScaledProduct,
    lengths: torch.Tensor | None = None,
    *,
    chunk_elements: int,
    keep_last: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, ScaledProduct | None]:
    """
    Args:
        x (batch, length, d), A (d, s, s), w (s): As above, in one dtype; x may be the letters of its tokens.
        initial: The product before the first step.
        lengths (batch): Steps of each row that count; those after them change nothing. All if None.
        chunk_elements: Numbers in the matrices of a chunk. It changes no result beyond its rounding.
        keep_last: Whether the product after the last step is wanted.

    Returns:
        v_t (batch, length, s), exponents e_t (batch, length) with P_t w = 2^e_t v_t, and the product after the last
        step, or None. Gradients flow to all but exponents.
    """
    x, index = x if isinstance(x, Letters) else (x, None)
    if index is not None and len(x) * A[0].numel() > chunk_elements:
        x, index = x[index], None
    batch, length = (x if index is None else index).shape[:2]
    size = max(1, chunk_elements // max(1, batch * A[0].numel()))
    vectors = 0 if keep_last else steps_with_vectors(batch, length, A.shape[1], chunk_elements, w.device)
    head, tail = split(x, index, lengths, length - vectors)
    y, exponents, p = RunningProducts.apply(*head[:2], A, w, initial.p, head[2], size)
    exponents = initial.exponent + exponents
    last = torch.cat([initial.exponent, exponents], dim=1)[:, -1:]
    if keep_last:
        return y, exponents, ScaledProduct(p, last)
    if vectors:
        y_tail, exponents_tail = VectorProducts.apply(*tail[:2], A, w, p, tail[2], size)
        y, exponents = torch.cat([y, y_tail], dim=1), torch.cat([exponents, last + exponents_tail], dim=1)
    return y, exponents, None


def steps_with_vectors(batch: int, length: int, size: int, chunk_elements: int, device: torch.device) -> int:
    """
    How many of the last steps multiply vectors: fewer than there are rows in a matrix, and so that the vectors of all
    these steps, n^2 / 2 for each sequence, take no more memory than the matrices of two chunks. None on accelerators
    and in graphs, where it cannot be looked whether a vector vanishes.
    """
    if device.type != "cpu" or torch.compiler.is_compiling():
        return 0
    return min(length, size, math.isqrt(4 * chunk_elements // max(1, batch * size)))


def split(x, index, lengths, first: int) -> tuple[tuple, tuple]:
    """Inputs, index and lengths of the first steps, and of the others."""
    if index is None:
        head, tail = (x[:, :first], None), (x[:, first:], None)
    else:
        head, tail = (x, index[:, :first]), (x, index[:, first:])
    if lengths is None:
        return (*head, None), (*tail, None)
    return (*head, lengths.clamp(max=first)), (*tail, (lengths - first).clamp(min=0))


class RunningProducts(torch.autograd.Function):
    """p_t w, the exponents relative to the start, and the last p; one chunk in memory at a time."""

    @staticmethod
    def forward(ctx, x, index, A, w, p, lengths, size):
        chunks = MatricesInChunks(x, index, A, lengths, size)
        starts, outputs, scales = [], [], []
        for steps in chunks.steps:
            matrices, before = chunks.matrices(steps), None
            starts.append(p)
            for step in steps:
                p, scale = rescale(matrices.multiply(step, matrices.arrange(p, before, step)))
                outputs.append(matrices.arrange(p @ w, step, None))
                scales.append(matrices.arrange(scale, step, None))
                before = step
            p = matrices.arrange(p, before, None)
        ctx.save_for_backward(x, index, A, w, lengths, *starts, *scales)
        ctx.size = size
        y, exponents = p.new_zeros(p.shape[0], 0, len(w)), p.new_zeros(p.shape[0], 0)
        if outputs:
            y = torch.stack(outputs, dim=1)
            exponents = -torch.log2(torch.stack(scales, dim=1)).round().cumsum(1)
        ctx.mark_non_differentiable(exponents)
        return y, exponents, p if outputs else p.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_y, _, grad_p):
        x, index, A, w, lengths, *kept = ctx.saved_tensors
        chunks = MatricesInChunks(x, index, A, lengths, ctx.size)
        starts, scales = kept[: len(chunks.steps)], kept[len(chunks.steps) :]
        grad_w = torch.zeros_like(w)
        for steps, p in reversed(list(zip(chunks.steps, starts, strict=True))):
            matrices = chunks.matrices(steps)
            grad_p, grad_w_chunk = backward_through_products(matrices, steps, p, scales, w, grad_y, grad_p)
            grad_w += grad_w_chunk
            chunks.add_gradients(matrices, steps)
        return *chunks.gradients(), grad_w, grad_p, None, None


def backward_through_products(matrices, steps: range, p, scales, w, grad_y, grad_p):
    """Gives the matrices of a chunk their gradients; returns those of the product before it, and of w."""
    products, before = [], None
    for step in steps:
        p = matrices.arrange(p, before, step)
        products.append(p)  # before the step, in its order
        p = matrices.multiply(step, p) * matrices.arrange(scales[step], None, step)[:, None, None]
        before = step
    grad_w, products = torch.zeros_like(w), [*products, matrices.arrange(p, before, None)]
    before = None
    for step in reversed(steps):
        # What has been used goes, to make room for the gradients.
        p, gradient = products.pop().flatten(0, 1), grad_y[:, step]
        grad_w += p.mT @ (gradient if before is None else matrices.arrange(gradient, None, before)).flatten()
        gradient = matrices.arrange(gradient, None, step)
        grad_p = torch.baddbmm(
            matrices.arrange(grad_p, before, step), gradient[..., None], w.expand(len(p) // len(w), 1, -1)
        )
        grad_p *= matrices.arrange(scales[step], None, step)[:, None, None]
        matrices.add_gradient(step, products[-1], grad_p)
        grad_p, before = matrices.multiply(step, grad_p, transposed=True), step
    return matrices.arrange(grad_p, before, None), grad_w


def rescale(product: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The product times a power of two for each row, and these powers (batch,)."""
    scale = powers_of_two(product.abs().amax((1, 2)))
    return product * scale[:, None, None], scale
