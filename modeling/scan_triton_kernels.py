r"""
The kernels of the scan. `triton_chunk` explains the equations and names; `triton_launch` launches these.

| kernel                  | programs                     | work                                                        |
|-------------------------|------------------------------|-------------------------------------------------------------|
| `step_kernel`           | (row, head) x channel blocks | a single step, for decoding                                 |
| `forward_kernel`        | (row, head) x channel blocks | y and the states, chunk after chunk                         |
| `backward_kernel`       | (row, head)                  | all gradients of small states, chunk before chunk           |
| `solve_kernel`          | chunks x (row, head)         | T of every chunk, for larger states                         |
| `backward_state_kernel` | (row, head) x channel blocks | the gradient of G at the end of every chunk                 |
| `backward_chunk_kernel` | chunks x (row, head)         | all other gradients, from those                             |

Arrays are contiguous, shaped as in `scan_definition`. A `pair` is a row and a head; token t of a pair is entry
(row * length + t) * heads + head of an array. `n` and `channels` are the sizes, N and P the powers of two, at least 16,
that hold them (P a block of the channels where there are several). Every value is written once and by one program, so
results are the same in every run.
"""

import triton
import triton.language as tl

from .triton_chunk import (
    decay_from_start,
    decay_matrix,
    decay_since,
    dot,
    first_row,
    last_row,
    load_before,
    load_gate,
    load_inverse,
    load_matrix,
    load_scalar,
    load_tile,
    load_vector,
    pair_gradients,
    store_gate,
    store_inverse,
    store_matrix,
    store_tile,
    sum_logs,
    unit_lower_inverse,
    weight_matrix,
)


@triton.jit(do_not_specialize=["heads"])
def step_kernel(
    u_ptr, B_ptr, C_ptr, log_decay_ptr, write_ptr, carry_ptr, k_ptr, reflection_ptr, D_ptr,
    h0_ptr, B0_ptr, u0_ptr, y_ptr, h_ptr, heads,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    HAS_CARRY: tl.constexpr, HAS_REFLECTION: tl.constexpr, HAS_D: tl.constexpr,
):  # fmt: skip
    """The recurrence itself, for a length of 1."""
    pair = tl.program_id(0).to(tl.int64)
    rows, columns = tl.arange(0, N), tl.program_id(1) * P + tl.arange(0, P)
    h = load_matrix(h0_ptr, pair, True, rows, columns, n, channels)
    u, B = load_vector(u_ptr, pair, True, columns, channels), load_vector(B_ptr, pair, True, rows, n)
    decay = tl.exp(load_scalar(log_decay_ptr, pair, True))
    new = decay * h + load_scalar(write_ptr, pair, True) * B[:, None] * u[None, :]
    if HAS_CARRY:
        B0, u0 = load_vector(B0_ptr, pair, True, rows, n), load_vector(u0_ptr, pair, True, columns, channels)
        new += decay * load_scalar(carry_ptr, pair, True) * B0[:, None] * u0[None, :]
    if HAS_REFLECTION:
        k = load_vector(k_ptr, pair, True, rows, n)
        q = tl.sum(k[:, None] * h, 0)
        new -= load_scalar(reflection_ptr, pair, True) * k[:, None] * q[None, :]
    y = tl.sum(load_vector(C_ptr, pair, True, rows, n)[:, None] * new, 0)
    if HAS_D:
        y += load_scalar(D_ptr, pair % heads, True) * u
    tl.store(y_ptr + pair * channels + columns, y.to(y_ptr.dtype.element_ty), mask=columns < channels)
    store_matrix(h_ptr, pair, rows, columns, n, channels, new)


@triton.jit
def first_token(pair, chunk, length, heads, CHUNK: tl.constexpr):
    """Entry of a chunk's first token."""
    return (pair // heads * length + chunk * CHUNK) * heads + pair % heads


@triton.jit
def load_weights(write_ptr, carry_ptr, start, heads, i, remaining, HAS_CARRY: tl.constexpr):
    """w and g."""
    w = load_gate(write_ptr, start, heads, i, i < remaining)
    g = w
    if HAS_CARRY:
        g += load_gate(carry_ptr, start + heads, heads, i, i < remaining - 1)
    return w, g


@triton.jit(do_not_specialize=["length", "heads"])
def solve_kernel(
    log_decay_ptr, k_ptr, reflection_ptr, T_ptr, length, heads,
    n: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    chunk, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, CHUNK)
    start, inside = first_token(pair, chunk, length, heads, CHUNK), i < length - chunk * CHUNK
    k = load_tile(k_ptr, start, heads, i, inside, tl.arange(0, N), n)
    r = load_gate(reflection_ptr, start, heads, i, inside)
    a, a_before, _ = sum_logs(load_gate(log_decay_ptr, start, heads, i, inside))
    M = dot(k, tl.trans(k), DOT, PRECISION) * decay_matrix(a_before, a, i, 1) * r[None, :]
    T = unit_lower_inverse(M, i, CHUNK, EXACT)
    store_inverse(T_ptr, pair * tl.cdiv(length, CHUNK) + chunk, i, CHUNK, T)


@triton.jit(do_not_specialize=["length", "heads"])
def forward_kernel(
    u_ptr, B_ptr, C_ptr, log_decay_ptr, write_ptr, carry_ptr, k_ptr, reflection_ptr, D_ptr,
    h0_ptr, B0_ptr, u0_ptr, T_ptr, y_ptr, h_ptr, kept_ptr, length, heads,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
    HAS_CARRY: tl.constexpr, HAS_REFLECTION: tl.constexpr, HAS_D: tl.constexpr, SOLVED: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    i, rows, columns = tl.arange(0, CHUNK), tl.arange(0, N), tl.program_id(1) * P + tl.arange(0, P)
    chunks = tl.cdiv(length, CHUNK)
    G = load_matrix(h0_ptr, pair, True, rows, columns, n, channels)
    if HAS_CARRY:
        B0, u0 = load_vector(B0_ptr, pair, True, rows, n), load_vector(u0_ptr, pair, True, columns, channels)
        G += load_scalar(carry_ptr, first_token(pair, 0, length, heads, CHUNK), True) * B0[:, None] * u0[None, :]
    for chunk in range(0, chunks):
        start, remaining = first_token(pair, chunk, length, heads, CHUNK), length - chunk * CHUNK
        inside = i < remaining
        a, a_before, a_last = sum_logs(load_gate(log_decay_ptr, start, heads, i, inside))
        w, g = load_weights(write_ptr, carry_ptr, start, heads, i, remaining, HAS_CARRY)
        u = load_tile(u_ptr, start, heads, i, inside, columns, channels)
        B = load_tile(B_ptr, start, heads, i, inside, rows, n)
        store_matrix(kept_ptr, pair * chunks + chunk, rows, columns, n, channels, G)
        if HAS_REFLECTION:
            k = load_tile(k_ptr, start, heads, i, inside, rows, n)
            r = load_gate(reflection_ptr, start, heads, i, inside)
            X = decay_matrix(a_before, a, i, 1)
            if SOLVED:
                T = load_inverse(T_ptr, pair * chunks + chunk, i, CHUNK)
            else:
                T = unit_lower_inverse(dot(k, tl.trans(k), DOT, PRECISION) * X * r[None, :], i, CHUNK, EXACT)
            v = decay_from_start(a_before)[:, None] * dot(k, G, DOT, PRECISION)
            if HAS_CARRY:
                B_before = load_before(B_ptr, B0_ptr, start, heads, pair, chunk, rows, n)
                u_before = load_before(u_ptr, u0_ptr, start, heads, pair, chunk, columns, channels)
                c = load_scalar(carry_ptr, start, True)
                v -= first_row(i, c * tl.sum(k.to(tl.float32) * B_before[None, :], 1), u_before)
            V = dot(k, tl.trans(B), DOT, PRECISION) * X * weight_matrix(w, g, i, 1)
            q = dot(T, dot(V, u, DOT, PRECISION, acc=v), tl.float32, EXACT)

        C = load_tile(C_ptr, start, heads, i, inside, rows, n)
        E = decay_matrix(a, a, i, 0)
        y = decay_from_start(a)[:, None] * dot(C, G, DOT, PRECISION)
        W = dot(C, tl.trans(B), DOT, PRECISION) * E * weight_matrix(w, g, i, 0)
        y = dot(W, u, DOT, PRECISION, acc=y)
        if HAS_REFLECTION:
            y = dot(dot(C, tl.trans(k), DOT, PRECISION) * E * -r[None, :], q, DOT, PRECISION, acc=y)
        if HAS_D:
            y += load_scalar(D_ptr, pair % heads, True) * u.to(tl.float32)
        store_tile(y_ptr, start, heads, i, inside, columns, channels, y)

        # Tiles are loaded once more, from a cache: kept in registers from their first use on, they would spill.
        u = load_tile(u_ptr, start, heads, i, inside, columns, channels)
        B = load_tile(B_ptr, start, heads, i, inside, rows, n)
        to_end = decay_since(a_last, a)
        G *= decay_from_start(a_last)
        G = dot(tl.trans((to_end * g)[:, None] * B.to(tl.float32)), u, DOT, PRECISION, acc=G)
        if HAS_REFLECTION:
            k = load_tile(k_ptr, start, heads, i, inside, rows, n)
            G = dot(tl.trans((to_end * -r)[:, None] * k.to(tl.float32)), q, DOT, PRECISION, acc=G)
    store_matrix(h_ptr, pair, rows, columns, n, channels, G)


@triton.jit
def projection_gradients(
    dy, C, k, dG, T, a, a_last, r, i, DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr
):
    """dv = T' dq, with dq from the y of the chunk and from the state after it."""
    dq = -decay_since(a_last, a)[:, None] * dot(k, dG, DOT, PRECISION)
    CkE = dot(C, tl.trans(k), DOT, PRECISION) * decay_matrix(a, a, i, 0)
    dq = dot(-tl.trans(CkE), dy, DOT, PRECISION, acc=dq)
    return dot(tl.trans(T), r[:, None] * dq, tl.float32, EXACT)


@triton.jit
def state_gradient(
    dG, dy, dv, C, k, a, a_before, a_last,
    HAS_REFLECTION: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dG at the start of a chunk from dG at its end."""
    dG *= decay_from_start(a_last)
    dG = dot(tl.trans(decay_from_start(a)[:, None] * C.to(tl.float32)), dy, DOT, PRECISION, acc=dG)
    if HAS_REFLECTION:
        dG = dot(tl.trans(decay_from_start(a_before)[:, None] * k.to(tl.float32)), dv, DOT, PRECISION, acc=dG)
    return dG


@triton.jit(do_not_specialize=["length", "heads"])
def backward_state_kernel(
    C_ptr, log_decay_ptr, k_ptr, reflection_ptr, T_ptr, dy_ptr, dh_ptr, dG_ptr, dv_ptr, dh0_ptr, length, heads,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
    HAS_REFLECTION: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Writes dG at the end of every chunk, dv of every chunk's first token, and dh0."""
    pair = tl.program_id(0).to(tl.int64)
    i, rows, columns = tl.arange(0, CHUNK), tl.arange(0, N), tl.program_id(1) * P + tl.arange(0, P)
    chunks = tl.cdiv(length, CHUNK)
    dG = load_matrix(dh_ptr, pair, True, rows, columns, n, channels)
    for back in range(0, chunks):
        chunk = chunks - 1 - back
        index, start = pair * chunks + chunk, first_token(pair, chunk, length, heads, CHUNK)
        inside = i < length - chunk * CHUNK
        store_matrix(dG_ptr, index, rows, columns, n, channels, dG)
        a, a_before, a_last = sum_logs(load_gate(log_decay_ptr, start, heads, i, inside))
        dy = load_tile(dy_ptr, start, heads, i, inside, columns, channels)
        C = load_tile(C_ptr, start, heads, i, inside, rows, n)
        k, dv = C, dy
        if HAS_REFLECTION:
            k = load_tile(k_ptr, start, heads, i, inside, rows, n)
            r = load_gate(reflection_ptr, start, heads, i, inside)
            T = load_inverse(T_ptr, index, i, CHUNK)
            dv = projection_gradients(dy, C, k, dG, T, a, a_last, r, i, DOT, PRECISION, EXACT)
            dv_first = tl.sum(tl.where((i == 0)[:, None], dv, 0.0), 0)
            tl.store(dv_ptr + index * channels + columns, dv_first, mask=columns < channels)
        dG = state_gradient(dG, dy, dv, C, k, a, a_before, a_last, HAS_REFLECTION, DOT, PRECISION)
    store_matrix(dh0_ptr, pair, rows, columns, n, channels, dG)


# The backward pass of a chunk is cut into phases, each of which loads its tiles from a cache once more, past a barrier:
# kept in registers from their first use on, they would spill. A `place` is (pair, chunk, chunks, start, remaining,
# heads), with the entry of the chunk's first token and the number of tokens from there on.


@triton.jit
def load_gates(inputs, place, i, HAS_CARRY: tl.constexpr):
    """The sums of log d up to t, up to t - 1 and to the end, then w and g."""
    _, _, _, log_decay_ptr, write_ptr, carry_ptr, _, _, _ = inputs
    _, _, _, start, remaining, heads = place
    a, a_before, a_last = sum_logs(load_gate(log_decay_ptr, start, heads, i, i < remaining))
    w, g = load_weights(write_ptr, carry_ptr, start, heads, i, remaining, HAS_CARRY)
    return a, a_before, a_last, w, g


@triton.jit
def projections_and_gradients(
    inputs, initial, kept_ptr, T_ptr, dy_ptr, place, dG,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
    HAS_CARRY: tl.constexpr, SOLVED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """q and dv."""
    u_ptr, B_ptr, C_ptr, _, _, carry_ptr, k_ptr, reflection_ptr, _ = inputs
    B0_ptr, u0_ptr = initial
    pair, chunk, chunks, start, remaining, heads = place
    i, rows, columns = tl.arange(0, CHUNK), tl.arange(0, N), tl.arange(0, P)
    inside = i < remaining
    a, a_before, a_last, w, g = load_gates(inputs, place, i, HAS_CARRY)
    k = load_tile(k_ptr, start, heads, i, inside, rows, n)
    r = load_gate(reflection_ptr, start, heads, i, inside)
    X = decay_matrix(a_before, a, i, 1)
    if SOLVED:
        T = load_inverse(T_ptr, pair * chunks + chunk, i, CHUNK)
    else:
        T = unit_lower_inverse(dot(k, tl.trans(k), DOT, PRECISION) * X * r[None, :], i, CHUNK, EXACT)
    G = load_matrix(kept_ptr, pair * chunks + chunk, True, rows, columns, n, channels)
    v = decay_from_start(a_before)[:, None] * dot(k, G, DOT, PRECISION)
    if HAS_CARRY:
        B_before = load_before(B_ptr, B0_ptr, start, heads, pair, chunk, rows, n)
        u_before = load_before(u_ptr, u0_ptr, start, heads, pair, chunk, columns, channels)
        c = load_scalar(carry_ptr, start, True)
        v -= first_row(i, c * tl.sum(k.to(tl.float32) * B_before[None, :], 1), u_before)
    u = load_tile(u_ptr, start, heads, i, inside, columns, channels)
    B = load_tile(B_ptr, start, heads, i, inside, rows, n)
    V = dot(k, tl.trans(B), DOT, PRECISION) * X * weight_matrix(w, g, i, 1)
    q = dot(T, dot(V, u, DOT, PRECISION, acc=v), tl.float32, EXACT)
    tl.debug_barrier()
    k = load_tile(k_ptr, start, heads, i, inside, rows, n)
    C = load_tile(C_ptr, start, heads, i, inside, rows, n)
    dy = load_tile(dy_ptr, start, heads, i, inside, columns, channels)
    return q, projection_gradients(dy, C, k, dG, T, a, a_last, r, i, DOT, PRECISION, EXACT)


@triton.jit
def write_value_gradients(
    inputs, dy_ptr, du_ptr, dD_ptr, place, dG, dv, k_next, dv_next, c_next,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
    HAS_CARRY: tl.constexpr, HAS_REFLECTION: tl.constexpr, HAS_D: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """
    Writes du and dD. Returns B.k and u.dv with the next chunk's first token, of which the last entries count: that
    token takes back a part of the last one here.
    """
    u_ptr, B_ptr, C_ptr, _, _, _, k_ptr, _, D_ptr = inputs
    pair, chunk, chunks, start, remaining, heads = place
    i, rows, columns = tl.arange(0, CHUNK), tl.arange(0, N), tl.arange(0, P)
    inside = i < remaining
    a, a_before, a_last, w, g = load_gates(inputs, place, i, HAS_CARRY)
    B = load_tile(B_ptr, start, heads, i, inside, rows, n)
    du = (decay_since(a_last, a) * g)[:, None] * dot(B, dG, DOT, PRECISION)
    if HAS_REFLECTION:
        k = load_tile(k_ptr, start, heads, i, inside, rows, n)
        V = dot(k, tl.trans(B), DOT, PRECISION) * decay_matrix(a_before, a, i, 1) * weight_matrix(w, g, i, 1)
        du = dot(tl.trans(V), dv, DOT, PRECISION, acc=du)
    C = load_tile(C_ptr, start, heads, i, inside, rows, n)
    dy = load_tile(dy_ptr, start, heads, i, inside, columns, channels)
    W = dot(C, tl.trans(B), DOT, PRECISION) * decay_matrix(a, a, i, 0) * weight_matrix(w, g, i, 0)
    du = dot(tl.trans(W), dy, DOT, PRECISION, acc=du)
    u = load_tile(u_ptr, start, heads, i, inside, columns, channels).to(tl.float32)
    if HAS_D:
        du += load_scalar(D_ptr, pair % heads, True) * dy.to(tl.float32)
        tl.store(dD_ptr + pair * chunks + chunk, tl.sum(u * dy.to(tl.float32)))
    Bk_next, udv_next = w, w
    if HAS_CARRY and HAS_REFLECTION:
        Bk_next = tl.sum(B.to(tl.float32) * k_next[None, :], 1)
        udv_next = tl.sum(u * dv_next[None, :], 1)
        du -= last_row(i, c_next * Bk_next, dv_next, CHUNK)
    store_tile(du_ptr, start, heads, i, inside, columns, channels, du)
    return Bk_next, udv_next


@triton.jit
def state_terms(
    inputs, kept_ptr, dy_ptr, place, dG, q, dv,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
    HAS_CARRY: tl.constexpr, HAS_REFLECTION: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """
    What G and dG give. Returns dB, dC and dk; dw, dg and dr; the gradients of products of decays, summed over the last
    step of the products (`ending`; `ending_before` where that is t - 1) and over the step before their first
    (`starting`), and of those that reach to the end of the chunk; and dG at the start.
    """
    u_ptr, B_ptr, C_ptr, _, _, _, k_ptr, reflection_ptr, _ = inputs
    pair, chunk, chunks, start, remaining, heads = place
    i, rows, columns = tl.arange(0, CHUNK), tl.arange(0, N), tl.arange(0, P)
    inside = i < remaining
    a, a_before, a_last, _, g = load_gates(inputs, place, i, HAS_CARRY)
    to_end = decay_since(a_last, a)
    G = load_matrix(kept_ptr, pair * chunks + chunk, True, rows, columns, n, channels)
    past_end = decay_from_start(a_last) * tl.sum(G * dG)
    C = load_tile(C_ptr, start, heads, i, inside, rows, n)
    dy = load_tile(dy_ptr, start, heads, i, inside, columns, channels)
    dC = decay_from_start(a)[:, None] * dot(dy, tl.trans(G), DOT, PRECISION)
    ending = tl.sum(C.to(tl.float32) * dC, 1)
    ending_before = tl.zeros_like(ending)
    u = load_tile(u_ptr, start, heads, i, inside, columns, channels)
    dB = to_end[:, None] * dot(u, tl.trans(dG), DOT, PRECISION)
    dw = tl.sum(load_tile(B_ptr, start, heads, i, inside, rows, n).to(tl.float32) * dB, 1)
    dB *= g[:, None]
    starting = g * dw
    k, dk, dr = C, dB, dw
    if HAS_REFLECTION:
        k = load_tile(k_ptr, start, heads, i, inside, rows, n)
        r = load_gate(reflection_ptr, start, heads, i, inside)
        dk = -to_end[:, None] * dot(q, tl.trans(dG), DOT, PRECISION)
        dr = tl.sum(k.to(tl.float32) * dk, 1)
        starting += r * dr
        dk_start = decay_from_start(a_before)[:, None] * dot(dv, tl.trans(G), DOT, PRECISION)
        ending_before += tl.sum(k.to(tl.float32) * dk_start, 1)
        dk = r[:, None] * dk + dk_start
    past_end += tl.sum(starting, 0)
    dG = state_gradient(dG, dy, dv, C, k, a, a_before, a_last, HAS_REFLECTION, DOT, PRECISION)
    return dB, dC, dk, dw, dw, dr, ending, ending_before, starting, past_end, dG


@triton.jit
def readout_terms(
    inputs, dy_ptr, dC_ptr, place, q, dB, dC, dk, dw, dg, dr, ending, starting,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
    HAS_CARRY: tl.constexpr, HAS_REFLECTION: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the terms of C_t.B_s and C_t.k_s and writes dC."""
    u_ptr, B_ptr, C_ptr, _, _, _, k_ptr, reflection_ptr, _ = inputs
    _, _, _, start, remaining, heads = place
    i, rows, columns = tl.arange(0, CHUNK), tl.arange(0, N), tl.arange(0, P)
    inside = i < remaining
    a, _, _, w, g = load_gates(inputs, place, i, HAS_CARRY)
    E = decay_matrix(a, a, i, 0)
    C = load_tile(C_ptr, start, heads, i, inside, rows, n)
    B = load_tile(B_ptr, start, heads, i, inside, rows, n)
    u = load_tile(u_ptr, start, heads, i, inside, columns, channels)
    dy = load_tile(dy_ptr, start, heads, i, inside, columns, channels)
    dyu = dot(dy, tl.trans(u), DOT, PRECISION)
    dCB, dweights, of_t, of_s = pair_gradients(C, B, dyu, E, weight_matrix(w, g, i, 0), DOT, PRECISION)
    dC = dot(dCB, B, DOT, PRECISION, acc=dC)
    dB = dot(tl.trans(dCB), C, DOT, PRECISION, acc=dB)
    dw += tl.sum(dweights, 0)
    dg += tl.sum(tl.where(i[:, None] > i[None, :], dweights, 0.0), 0)
    ending += of_t
    starting += of_s
    if HAS_REFLECTION:
        k = load_tile(k_ptr, start, heads, i, inside, rows, n)
        strengths = tl.broadcast_to(load_gate(reflection_ptr, start, heads, i, inside)[None, :], CHUNK, CHUNK)
        dyq = -dot(dy, tl.trans(q), DOT, PRECISION)
        dCk, dweights, of_t, of_s = pair_gradients(C, k, dyq, E, strengths, DOT, PRECISION)
        dC = dot(dCk, k, DOT, PRECISION, acc=dC)
        dk = dot(tl.trans(dCk), C, DOT, PRECISION, acc=dk)
        dr += tl.sum(dweights, 0)
        ending += of_t
        starting += of_s
    store_tile(dC_ptr, start, heads, i, inside, rows, n, dC)
    return dB, dk, dw, dg, dr, ending, starting


@triton.jit
def projection_terms(
    inputs, place, q, dv, dB, dk, dw, dg, dr, ending_before, starting,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
    HAS_CARRY: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the terms of k_t.k_s and k_t.B_s."""
    u_ptr, B_ptr, _, _, _, _, k_ptr, reflection_ptr, _ = inputs
    _, _, _, start, remaining, heads = place
    i, rows, columns = tl.arange(0, CHUNK), tl.arange(0, N), tl.arange(0, P)
    inside = i < remaining
    a, a_before, _, w, g = load_gates(inputs, place, i, HAS_CARRY)
    X = decay_matrix(a_before, a, i, 1)
    k = load_tile(k_ptr, start, heads, i, inside, rows, n)
    strengths = tl.broadcast_to(load_gate(reflection_ptr, start, heads, i, inside)[None, :], CHUNK, CHUNK)
    dvq = -dot(dv, tl.trans(q), DOT, PRECISION)
    dkk, dweights, of_t, of_s = pair_gradients(k, k, dvq, X, strengths, DOT, PRECISION)
    dk = dot(dkk + tl.trans(dkk), k, DOT, PRECISION, acc=dk)
    dr += tl.sum(dweights, 0)
    ending_before += of_t
    starting += of_s
    B = load_tile(B_ptr, start, heads, i, inside, rows, n)
    u = load_tile(u_ptr, start, heads, i, inside, columns, channels)
    dvu = dot(dv, tl.trans(u), DOT, PRECISION)
    dkB, dweights, of_t, of_s = pair_gradients(k, B, dvu, X, weight_matrix(w, g, i, 1), DOT, PRECISION)
    dk = dot(dkB, B, DOT, PRECISION, acc=dk)
    dB = dot(tl.trans(dkB), k, DOT, PRECISION, acc=dB)
    dw += tl.sum(dweights, 0)
    dg += tl.sum(tl.where(i[:, None] > i[None, :] + 1, dweights, 0.0), 0)
    return dB, dk, dw, dg, dr, ending_before + of_t, starting + of_s


@triton.jit
def chunk_gradients(
    inputs, initial, kept_ptr, T_ptr, dy_ptr, gradients, pair, chunk, dG, k_next, dv_next, c_next, length, heads,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
    HAS_CARRY: tl.constexpr, HAS_REFLECTION: tl.constexpr, HAS_D: tl.constexpr, SOLVED: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """
    Writes the gradients of all inputs of a chunk, given dG at its end and of the chunk after it the first token's k, dv
    and carry. Returns dG at its start and its own first token's k, dv and carry.
    """
    u_ptr, B_ptr, _, _, _, carry_ptr, k_ptr, _, _ = inputs
    B0_ptr, u0_ptr = initial
    du_ptr, dB_ptr, dC_ptr, dlog_decay_ptr, dwrite_ptr, dcarry_ptr, dk_ptr, dreflection_ptr, dD_ptr = gradients
    i, rows, columns = tl.arange(0, CHUNK), tl.arange(0, N), tl.arange(0, P)
    start, remaining = first_token(pair, chunk, length, heads, CHUNK), length - chunk * CHUNK
    place = (pair, chunk, tl.cdiv(length, CHUNK), start, remaining, heads)
    inside = i < remaining
    q, dv = dG, dG
    if HAS_REFLECTION:
        q, dv = projections_and_gradients(
            inputs, initial, kept_ptr, T_ptr, dy_ptr, place, dG,
            n, channels, N, P, CHUNK, HAS_CARRY, SOLVED, DOT, PRECISION, EXACT,
        )  # fmt: skip
        tl.debug_barrier()
    Bk_next, udv_next = write_value_gradients(
        inputs, dy_ptr, du_ptr, dD_ptr, place, dG, dv, k_next, dv_next, c_next,
        n, channels, N, P, CHUNK, HAS_CARRY, HAS_REFLECTION, HAS_D, DOT, PRECISION,
    )  # fmt: skip
    tl.debug_barrier()
    dB, dC, dk, dw, dg, dr, ending, ending_before, starting, past_end, dG = state_terms(
        inputs, kept_ptr, dy_ptr, place, dG, q, dv,
        n, channels, N, P, CHUNK, HAS_CARRY, HAS_REFLECTION, DOT, PRECISION,
    )  # fmt: skip
    tl.debug_barrier()
    dB, dk, dw, dg, dr, ending, starting = readout_terms(
        inputs, dy_ptr, dC_ptr, place, q, dB, dC, dk, dw, dg, dr, ending, starting,
        n, channels, N, P, CHUNK, HAS_CARRY, HAS_REFLECTION, DOT, PRECISION,
    )  # fmt: skip
    tl.debug_barrier()
    c = 0.0
    if HAS_CARRY:
        c = load_scalar(carry_ptr, start, True)
    if HAS_REFLECTION:
        dB, dk, dw, dg, dr, ending_before, starting = projection_terms(
            inputs, place, q, dv, dB, dk, dw, dg, dr, ending_before, starting,
            n, channels, N, P, CHUNK, HAS_CARRY, DOT, PRECISION,
        )  # fmt: skip
        if HAS_CARRY:
            dB -= last_row(i, c_next * udv_next, k_next, CHUNK)
            dg -= tl.where(i == CHUNK - 1, Bk_next * udv_next, 0.0)
            B_before = load_before(B_ptr, B0_ptr, start, heads, pair, chunk, rows, n)
            u_before = load_before(u_ptr, u0_ptr, start, heads, pair, chunk, columns, channels)
            dk -= first_row(i, c * tl.sum(dv * u_before[None, :], 1), B_before)
            k_next = load_vector(k_ptr, start, True, rows, n)
            dv_next = tl.sum(tl.where((i == 0)[:, None], dv, 0.0), 0)
        store_tile(dk_ptr, start, heads, i, inside, rows, n, dk)
        store_gate(dreflection_ptr, start, heads, i, inside, dr)
    store_tile(dB_ptr, start, heads, i, inside, rows, n, dB)
    store_gate(dwrite_ptr, start, heads, i, inside, dw)
    if HAS_CARRY:
        store_gate(dcarry_ptr, start + heads, heads, i, i < remaining - 1, dg)
    dlog_decay = tl.cumsum(ending + ending_before - starting, 0, reverse=True) + past_end - ending_before
    store_gate(dlog_decay_ptr, start, heads, i, inside, dlog_decay)
    return dG, k_next, dv_next, c


@triton.jit
def initial_gradients(
    B0_ptr, u0_ptr, dB0_ptr, du0_ptr, dcarry_ptr, pair, first, dG, k_first, dv_first, c, rows, columns,
    n: tl.constexpr, channels: tl.constexpr,
):  # fmt: skip
    """Gradients of B0, u0 and the first carry, which write into G but not into what the first reflection reads."""
    B0, u0 = load_vector(B0_ptr, pair, True, rows, n), load_vector(u0_ptr, pair, True, columns, channels)
    dG -= k_first[:, None] * dv_first[None, :]
    dB0 = tl.sum(dG * u0[None, :], 1)
    tl.store(dB0_ptr + pair * n + rows, c * dB0, mask=rows < n)
    tl.store(du0_ptr + pair * channels + columns, c * tl.sum(dG * B0[:, None], 0), mask=columns < channels)
    tl.store(dcarry_ptr + first, tl.sum(dB0 * B0, 0).to(dcarry_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["length", "heads"])
def backward_kernel(
    u_ptr, B_ptr, C_ptr, log_decay_ptr, write_ptr, carry_ptr, k_ptr, reflection_ptr, D_ptr,
    B0_ptr, u0_ptr, kept_ptr, dy_ptr, dh_ptr,
    du_ptr, dB_ptr, dC_ptr, dlog_decay_ptr, dwrite_ptr, dcarry_ptr, dk_ptr, dreflection_ptr, dD_ptr,
    dh0_ptr, dB0_ptr, du0_ptr, length, heads,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
    HAS_CARRY: tl.constexpr, HAS_REFLECTION: tl.constexpr, HAS_D: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    rows, columns = tl.arange(0, N), tl.arange(0, P)
    chunks = tl.cdiv(length, CHUNK)
    dG = load_matrix(dh_ptr, pair, True, rows, columns, n, channels)
    k_next, dv_next, c_next = tl.zeros([N], tl.float32), tl.zeros([P], tl.float32), 0.0
    for back in range(0, chunks):
        dG, k_next, dv_next, c_next = chunk_gradients(
            (u_ptr, B_ptr, C_ptr, log_decay_ptr, write_ptr, carry_ptr, k_ptr, reflection_ptr, D_ptr),
            (B0_ptr, u0_ptr), kept_ptr, None, dy_ptr,
            (du_ptr, dB_ptr, dC_ptr, dlog_decay_ptr, dwrite_ptr, dcarry_ptr, dk_ptr, dreflection_ptr, dD_ptr),
            pair, chunks - 1 - back, dG, k_next, dv_next, c_next, length, heads,
            n, channels, N, P, CHUNK, HAS_CARRY, HAS_REFLECTION, HAS_D, False, DOT, PRECISION, EXACT,
        )  # fmt: skip
    store_matrix(dh0_ptr, pair, rows, columns, n, channels, dG)
    if HAS_CARRY:
        first = first_token(pair, 0, length, heads, CHUNK)
        initial_gradients(
            B0_ptr, u0_ptr, dB0_ptr, du0_ptr, dcarry_ptr, pair, first, dG, k_next, dv_next, c_next, rows, columns,
            n, channels,
        )  # fmt: skip


@triton.jit(do_not_specialize=["length", "heads"])
def backward_chunk_kernel(
    u_ptr, B_ptr, C_ptr, log_decay_ptr, write_ptr, carry_ptr, k_ptr, reflection_ptr, D_ptr,
    B0_ptr, u0_ptr, kept_ptr, T_ptr, dy_ptr, dG_ptr, dv_ptr, dh0_ptr,
    du_ptr, dB_ptr, dC_ptr, dlog_decay_ptr, dwrite_ptr, dcarry_ptr, dk_ptr, dreflection_ptr, dD_ptr,
    dB0_ptr, du0_ptr, length, heads,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
    HAS_CARRY: tl.constexpr, HAS_REFLECTION: tl.constexpr, HAS_D: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    chunk, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows, columns = tl.arange(0, N), tl.arange(0, P)
    chunks = tl.cdiv(length, CHUNK)
    index, has_next = pair * chunks + chunk, chunk + 1 < chunks
    k_next, dv_next, c_next = tl.zeros([N], tl.float32), tl.zeros([P], tl.float32), 0.0
    if HAS_CARRY and HAS_REFLECTION:
        start = first_token(pair, chunk + 1, length, heads, CHUNK)
        k_next = load_vector(k_ptr, start, has_next, rows, n)
        dv_next = load_vector(dv_ptr, index + 1, has_next, columns, channels)
        c_next = load_scalar(carry_ptr, start, has_next)
    dG = load_matrix(dG_ptr, index, True, rows, columns, n, channels)
    _, k_first, dv_first, c = chunk_gradients(
        (u_ptr, B_ptr, C_ptr, log_decay_ptr, write_ptr, carry_ptr, k_ptr, reflection_ptr, D_ptr),
        (B0_ptr, u0_ptr), kept_ptr, T_ptr, dy_ptr,
        (du_ptr, dB_ptr, dC_ptr, dlog_decay_ptr, dwrite_ptr, dcarry_ptr, dk_ptr, dreflection_ptr, dD_ptr),
        pair, chunk, dG, k_next, dv_next, c_next, length, heads,
        n, channels, N, P, CHUNK, HAS_CARRY, HAS_REFLECTION, HAS_D, True, DOT, PRECISION, EXACT,
    )  # fmt: skip
    if HAS_CARRY:  # noqa: SIM102, this is known when compiling, and the next is not
        if chunk == 0:
            dG0 = load_matrix(dh0_ptr, pair, True, rows, columns, n, channels)
            first = first_token(pair, 0, length, heads, CHUNK)
            initial_gradients(
                B0_ptr, u0_ptr, dB0_ptr, du0_ptr, dcarry_ptr, pair, first, dG0, k_first, dv_first, c, rows, columns,
                n, channels,
            )  # fmt: skip


KERNELS = {
    "step_kernel": step_kernel,
    "forward_kernel": forward_kernel,
    "backward_kernel": backward_kernel,
    "solve_kernel": solve_kernel,
    "backward_state_kernel": backward_state_kernel,
    "backward_chunk_kernel": backward_chunk_kernel,
}
