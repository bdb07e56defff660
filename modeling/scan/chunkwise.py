r"""
The scan in chunks of c steps: exact, parallel inside a chunk, and without the states of single steps.

For a chunk that starts from h_0, with token 0 the last one before the chunk and E[t,s] = d_{s+1} ... d_t:

    1. Response without reflections      f_t = E[t,0] h_0 + sum_{s<=t} F[t,s] B_s u_s'
       F[t,s] = E[t,s] (w_s + c_{s+1}) for s < t, because the carry of step s+1 writes token s once more;
       F[t,t] = w_t; and w_0 = 0, because h_0 holds the input of token 0 already.
    2. Projections q_t = k_t' h_{t-1}    (I + M) q = v,   v_t = k_t' f_{t-1},   M[t,j] = r_j E[t-1,j] (k_t . k_j), j < t
    3. Readout                           y_t = C_t' f_t - sum_{j<=t} r_j E[t,j] (C_t . k_j) q_j
    4. State after the chunk             h_c = f_c - sum_j r_j E[c,j] k_j q_j'

v is affine in h_0, so steps 2 to 4 are solved for all chunks at once as functions of h_0, and only
h_c = transition h_0 + update runs from chunk to chunk.

What is read at a step depends on no later one, although the matrix products run over the whole chunk: matrices are cut
below the diagonal after their products, which may have overflowed, and no operand holds what is not finite, whose
product with a zero would not be zero. Such a value (but decay 0) is taken out, and its head reads as NaN in all its
channels from that token on.
"""

import torch
import torch.nn.functional as F

from .definition import ScanInputs, ScanState


def scan_chunkwise(inputs: ScanInputs, initial: ScanState, chunk_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Same arguments and results as `scan_definition`."""
    length = inputs.u.shape[1]
    if length == 0:
        return torch.zeros_like(inputs.u), initial.h
    # A power of two, so that a sequence meets the same matrix sizes, and so the same rounding, whatever its padding.
    size = min(chunk_size, 1 << (length - 1).bit_length())
    if inputs.carry is None:  # nobody reads the token before, not even to multiply it by 0
        initial = ScanState(initial.h, torch.zeros_like(initial.B), torch.zeros_like(initial.u))
    inputs, poison = without_poison(inputs)
    poison = to_chunks(poison, size)  # (batch, heads, chunks, c)
    C, k = to_chunks(inputs.C, size), to_chunks(inputs.k, size)  # (batch, heads, chunks, c, state)
    B = with_token_before(to_chunks(inputs.B, size), initial.B)  # (batch, heads, chunks, 1 + c, state)
    u = with_token_before(to_chunks(inputs.u, size), initial.u)  # (batch, heads, chunks, 1 + c, channels)
    E = decay_products(to_chunks(inputs.log_decay, size))  # (batch, heads, chunks, 1 + c, 1 + c)
    response = E * write_weights(to_chunks(inputs.write, size), to_chunks(inputs.carry, size))

    y = (C @ B.mT * response[..., 1:, :]).tril(1) @ u
    y_from_h = E[..., 1:, :1] * C
    update = (response[..., -1, :, None] * B).mT @ u
    transition = E[..., -1, 0, None, None] * torch.eye(C.shape[-1], dtype=C.dtype, device=C.device)
    if k is not None:
        reflection = to_chunks(inputs.reflection, size)
        solution = solve_projections(k, reflection, B, u, E, response)
        readout = ((C @ k.mT) * E[..., 1:, 1:] * reflection[..., None, :]).tril()
        last = (reflection * E[..., -1, 1:])[..., None] * k
        sizes = [y.shape[-1], k.shape[-1]]
        readable, marks = split_poison(solution.to(y.dtype))
        poison = poison + marks.sum(-1)
        q, q_from_h = readable.split(sizes, dim=-1)
        y, y_from_h = y - readout @ q, y_from_h - readout @ q_from_h
        q, q_from_h = solution.split(sizes, dim=-1)
        last = last.mT.to(q.dtype)
        update, transition = update - last @ q, transition - last @ q_from_h

    poison = poison.cumsum(-1)[..., None]
    starts, h = run_chunks(transition, update + poison[..., -1:, :], initial.h)
    y = (y + poison + y_from_h @ starts).flatten(2, 3)[:, :, :length].transpose(1, 2)
    if inputs.D is not None:
        y = y + inputs.D[:, None] * inputs.u
    return y, h


def without_poison(inputs: ScanInputs) -> tuple[ScanInputs, torch.Tensor]:
    """The inputs without what is not finite, and NaN at steps that had any, else 0: (batch, length, heads)."""
    # A log_decay of -inf is decay 0. C stays as it is: only its own step reads it.
    poison = 0 * inputs.log_decay.detach().clamp(min=0)
    clean = {"log_decay": torch.where(poison == 0, inputs.log_decay, 0.0)}
    for name in ("u", "B", "k", "write", "carry", "reflection"):
        x = getattr(inputs, name)
        if x is not None:
            clean[name], marks = split_poison(x)
            poison = poison + (marks.sum(-1) if name in ("u", "B", "k") else marks)
    return inputs._replace(**clean), poison


def split_poison(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x with 0 in place of what is not finite, and NaN there, else 0, without a gradient."""
    marks = 0 * x.detach()
    return torch.where(marks == 0, x, 0.0), marks


def to_chunks(x: torch.Tensor | None, size: int) -> torch.Tensor | None:
    """(batch, length, heads, ...) -> (batch, heads, chunks, size, ...); zeros fill up the last chunk."""
    if x is None:
        return None
    missing = -x.shape[1] % size
    x = x.transpose(1, 2)
    # Zeros are the identity step: decay exp(0) = 1, and neither input nor reflection.
    x = F.pad(x, (0,) * (2 * (x.dim() - 3)) + (0, missing))
    return x.unflatten(2, (-1, size))


def with_token_before(chunks: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Puts in front of each chunk the last token of the chunk before it, and `first` in front of the first."""
    last = chunks[:, :, :-1, -1:]
    return torch.cat([torch.cat([first[:, :, None, None], last], dim=2), chunks], dim=3)


def decay_products(log_decay: torch.Tensor) -> torch.Tensor:
    """E[t,s] for 0 <= s <= t <= c; above the diagonal, where nobody reads it, 1: (..., c) -> (..., 1 + c, 1 + c)."""
    size = log_decay.shape[-1] + 1
    below = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril(-1)
    # Each column is summed from its own start: differences of one long sum would lose digits under strong decay.
    steps = F.pad(log_decay, (1, 0))[..., :, None].masked_fill(~below, 0.0)
    return steps.cumsum(-2).exp()


def write_weights(write: torch.Tensor, carry: torch.Tensor | None) -> torch.Tensor:
    """The weight of token s in the response at step t, without the decay: (..., c) -> (..., 1 + c, 1 + c)."""
    write = F.pad(write, (1, 0))
    again = write if carry is None else write + F.pad(carry, (0, 1))
    size = write.shape[-1]
    return again[..., None, :].expand(*again.shape[:-1], size, size).tril(-1) + torch.diag_embed(write)


def solve_projections(k, reflection, B, u, E, response):
    """q with h_0 = 0, and beside it the matrix that gives its share in h_0: (..., c, channels + state)."""
    k_exact = k.to(exact_dtype(k))
    M = (k_exact @ k_exact.mT) * E[..., :-1, 1:] * reflection[..., None, :]
    v = (k @ B.mT * response[..., :-1, :]).tril() @ u
    v_from_h = E[..., :-1, :1] * k
    # Forward substitution: unlike a series in M it stays exact for repeated k and a reflection of 2. It reads M below
    # the diagonal only.
    right = torch.cat([v, v_from_h], dim=-1).to(M.dtype)
    return torch.linalg.solve_triangular(M, right, upper=False, unitriangular=True)


def exact_dtype(x: torch.Tensor) -> torch.dtype:
    """
    float64 where the device has it. In float32 the products k_t . k_j of repeated directions are all rounded the same
    way, and a reflection of 2 adds that error up at every step: 1e-4 of the output after 1,000.
    """
    return x.dtype if x.device.type == "mps" else torch.float64


def run_chunks(transition, update, h):
    """Runs h <- transition h + update over the chunks; returns the h each one starts from, and the last."""
    dtype, h, starts = h.dtype, h.to(transition.dtype), []
    for one_transition, one_update in zip(transition.unbind(2), update.unbind(2), strict=True):
        starts.append(h)
        h = one_transition @ h + one_update
    return torch.stack(starts, dim=2).to(dtype), h.to(dtype)
