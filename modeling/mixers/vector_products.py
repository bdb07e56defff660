r"""
Running products of matrices along one direction, y_t = p A_1 A_2 ... A_t w, from the right: with vectors for matrices.

    r[t, t] = w        r[t-1, j] = A_t r[t, j]        y_j = p r[0, j]

Step t multiplies the L - t + 1 vectors of the positions from t on, where the running product multiplies the s rows of
a matrix: over L <= s steps that is at most half of the work, and at the last position nothing but a vector is left. The
gradients are as cheap, by vectors from the left:

    l[0, j] = p' grad y_j        l[t, j] = A_t' l[t-1, j]        grad A_t = sum_{j >= t} l[t-1, j] r[t, j]'

The vectors grow or shrink as the products do, so each is scaled by a power of two at every step, which rounds nothing.
The price is memory, for L (L + 1) / 2 vectors of a sequence, and that there is no product in the end to go on from.
"""

import torch

from .step_matrices import MatricesInChunks


class VectorProducts(torch.autograd.Function):
    """v_t (batch, length, s) and whole numbers e_t (batch, length) with y_t = 2^e_t v_t."""

    @staticmethod
    def forward(ctx, x, index, A, w, p, lengths, size):
        chunks = MatricesInChunks(x, index, A, lengths, size)
        exponents = p.new_zeros(p.shape[0], chunks.length)
        kept, scales = [], []
        right, scale = p.new_empty(p.shape[0], 0, len(w)), p.new_empty(p.shape[0], 0)
        for steps in reversed(chunks.steps):
            matrices, before = chunks.matrices(steps), None
            for step in reversed(steps):
                rows = p.new_empty(p.shape[0], right.shape[1] + 1, len(w))
                rows[:, 0] = w
                torch.mul(
                    matrices.arrange(right, before, step),
                    matrices.arrange(scale, before, step)[..., None],
                    out=rows[:, 1:],
                )
                right = matrices.multiply(step, rows, transposed=True)
                scale, before = scale_of_rows(right, matrices, step), step
                kept.append(rows)
                scales.append(scale)
                exponents[:, step:] -= torch.log2(matrices.arrange(scale, step, None)).round()
            right, scale = matrices.arrange(right, before, None), matrices.arrange(scale, before, None)
        right *= scale[..., None]
        ctx.save_for_backward(x, index, A, w, p, lengths, right, *kept[::-1], *scales[::-1])
        ctx.size = size
        ctx.mark_non_differentiable(exponents)
        return right @ p.mT, exponents

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_y, _):
        x, index, A, w, p, lengths, right, *kept = ctx.saved_tensors
        kept, scales = kept[: grad_y.shape[1]], kept[grad_y.shape[1] :]
        chunks = MatricesInChunks(x, index, A, lengths, ctx.size)
        grad_w = torch.zeros_like(w)
        grad_p = grad_y.mT @ right if ctx.needs_input_grad[4] else None
        left = grad_y @ p
        for steps in chunks.steps:
            matrices, before = chunks.matrices(steps), None
            for step in steps:
                rows = matrices.arrange(left, before, step) * scales[step][..., None]
                matrices.add_gradient(step, rows, kept[step])
                left, before = matrices.multiply(step, rows), step
                grad_w += left[:, 0].sum(0)
                left = left[:, 1:]
            left = matrices.arrange(left, before, None)
            chunks.add_gradients(matrices, steps)
        return *chunks.gradients(), grad_w, grad_p, None, None


def scale_of_rows(rows: torch.Tensor, matrices, step: int) -> torch.Tensor:
    """The powers of two that scale rows (batch, number, s) which a step has made."""
    largest = rows.abs().amax(-1)
    usual = is_usual(largest)
    if not usual.all():
        # A vector that vanishes tells no scale, but that of its gradient must be kept all the same: with the matrix.
        largest = torch.where(usual, largest, matrices.norms(step)[:, None])
    return powers_of_two(largest)


def is_usual(largest: torch.Tensor) -> torch.Tensor:
    """Whether a number is finite and away from 0."""
    return (largest > 4 * torch.finfo(largest.dtype).tiny) & largest.isfinite()


def powers_of_two(largest: torch.Tensor) -> torch.Tensor:
    """The powers of two that bring positive numbers between 1 and 2. What is near 0 or not finite stays: 1."""
    mantissa, _ = torch.frexp(largest)  # at least one half and below 1
    # A quotient of a number and its own mantissa is a power of two exactly.
    return torch.where(is_usual(largest), 2 * mantissa / largest, 1.0)
