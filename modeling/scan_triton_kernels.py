r"""
The kernels of the scan. `triton_chunk` explains the equations and names; `scan_triton` launches these.

| kernel                  | programs                       | work                                                           |
|-------------------------|--------------------------------|----------------------------------------------------------------|
| `forward_kernel`        | (row, head) x channel blocks   | y and the states, chunk after chunk                            |
| `backward_kernel`       | (row, head)                    | all gradients of small states, chunks from the last to the first |
| `solve_kernel`          | chunks x (row, head)           | T of every chunk, for the larger states                        |
| `backward_state_kernel` | (row, head) x channel blocks   | the gradient of G at the end of every chunk                    |
| `backward_chunk_kernel` | chunks x (row, head)           | all other gradients, from those                                |
| `step_kernel`           | (row, head) x channel blocks   | a single step, for decoding                                    |

Arrays are contiguous, shaped as in `scan_definition`. A `pair` is a row and a head; token t of a pair is entry
(row * length + t) * heads + head of an array. `n` and `channels` are the sizes, N and P the powers of two, at least 16,
that hold them (P a block of the channels where there are several). Every value is written once and by one program, so
results are the same in every run.
"""

import triton
import triton.language as tl

from .triton_chunk import (
    decays,
    dot,
    first_row,
    last_row,
    load_before,
    load_gate,
    load_inverse,
    load_matrix,
    load_tile,
    load_vector,
    projection_gradients,
    projections,
    store_matrix,
    store_tile,
    unit_lower_inverse,
    write_weights,
)


@triton.jit
def tokens_of_chunk(pair, chunk, length, heads, i, CHUNK: tl.constexpr):
    """Entries of a chunk's tokens, whether each one is there, and whether the one after it is."""
    t = chunk * CHUNK + i
    row, head = pair // heads, pair % heads
    return (row * length + t) * heads + head, t < length, t + 1 < length


@triton.jit
def load_weights(write_ptr, carry_ptr, tokens, inside, followed, heads, HAS_CARRY: tl.constexpr):
    """w and g."""
    w = load_gate(write_ptr, tokens, inside)
    g = w
    if HAS_CARRY:
        g += load_gate(carry_ptr, tokens + heads, followed)
    return w, g


@triton.jit
def load_start(
    h0_ptr, kept_ptr, c, B_before, u_before, pair, chunk, chunks, rows, columns, n: tl.constexpr, channels: tl.constexpr
):
    """G at the start of a chunk: kept, or for the first one made of the initial state and its carry."""
    G = load_matrix(h0_ptr, pair, chunk == 0, rows, columns, n, channels)
    G += tl.where(chunk == 0, c, 0.0) * B_before[:, None] * u_before[None, :]
    return G + load_matrix(kept_ptr, pair * (chunks - 1) + chunk - 1, chunk > 0, rows, columns, n, channels)


@triton.jit(do_not_specialize=["length", "heads"])
def solve_kernel(
    log_decay_ptr, k_ptr, reflection_ptr, T_ptr, length, heads,
    n: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    chunk, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, CHUNK)
    tokens, inside, _ = tokens_of_chunk(pair, chunk, length, heads, i, CHUNK)
    k = load_tile(k_ptr, tokens, inside, tl.arange(0, N), n)
    r = load_gate(reflection_ptr, tokens, inside)
    _, X, _, _, _, _ = decays(load_gate(log_decay_ptr, tokens, inside), i)
    T = unit_lower_inverse(dot(k, tl.trans(k), DOT, PRECISION) * X * r[None, :], i, CHUNK, EXACT)
    index = pair * tl.cdiv(length, CHUNK) + chunk
    stored = (i // 16)[:, None] >= (i // 16)[None, :]
    tl.store(T_ptr + index * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None, :], T, mask=stored)


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
    first, _, _ = tokens_of_chunk(pair, 0, length, heads, 0, CHUNK)
    G = load_matrix(h0_ptr, pair, True, rows, columns, n, channels)
    if HAS_CARRY:
        B_before = load_vector(B0_ptr, pair, True, rows, n)
        u_before = load_vector(u0_ptr, pair, True, columns, channels)
        G += tl.load(carry_ptr + first).to(tl.float32) * B_before[:, None] * u_before[None, :]
    for chunk in range(0, chunks):
        tokens, inside, followed = tokens_of_chunk(pair, chunk, length, heads, i, CHUNK)
        u = load_tile(u_ptr, tokens, inside, columns, channels)
        B = load_tile(B_ptr, tokens, inside, rows, n)
        C = load_tile(C_ptr, tokens, inside, rows, n)
        w, g = load_weights(write_ptr, carry_ptr, tokens, inside, followed, heads, HAS_CARRY)
        E, X, e, e_before, to_end, whole = decays(load_gate(log_decay_ptr, tokens, inside), i)
        if chunk > 0:
            store_matrix(kept_ptr, pair * (chunks - 1) + chunk - 1, rows, columns, n, channels, G)

        W = dot(C, tl.trans(B), DOT, PRECISION) * E * write_weights(w, g, i, 0)
        y = dot(W, u, DOT, PRECISION) + e[:, None] * dot(C, G, DOT, PRECISION)
        update = dot(tl.trans((to_end * g)[:, None] * B.to(tl.float32)), u, DOT, PRECISION)
        if HAS_REFLECTION:
            k = load_tile(k_ptr, tokens, inside, rows, n)
            r = load_gate(reflection_ptr, tokens, inside)
            if SOLVED:
                T = load_inverse(T_ptr, pair * chunks + chunk, i, CHUNK)
            else:
                M = dot(k, tl.trans(k), DOT, PRECISION) * X * r[None, :]
                T = unit_lower_inverse(M, i, CHUNK, EXACT)
            V = dot(k, tl.trans(B), DOT, PRECISION) * X * write_weights(w, g, i, 1)
            v = dot(V, u, DOT, PRECISION) + e_before[:, None] * dot(k, G, DOT, PRECISION)
            if HAS_CARRY:
                c = load_gate(carry_ptr, tokens, inside)
                v -= first_row(i, c * tl.sum(k.to(tl.float32) * B_before[None, :], 1), u_before)
            q = dot(T, v, tl.float32, EXACT)
            y -= dot(dot(C, tl.trans(k), DOT, PRECISION) * E * r[None, :], q, DOT, PRECISION)
            update -= dot(tl.trans((to_end * r)[:, None] * k.to(tl.float32)), q, DOT, PRECISION)
        if HAS_D:
            y += tl.load(D_ptr + pair % heads).to(tl.float32) * u.to(tl.float32)
        store_tile(y_ptr, tokens, inside, columns, channels, y)
        G = whole * G + update
        if HAS_CARRY and HAS_REFLECTION:
            # A chunk that is not full is the last one, and the token before the next is not asked for.
            next_start, has_next, _ = tokens_of_chunk(pair, chunk + 1, length, heads, 0, CHUNK)
            B_before = load_vector(B_ptr, next_start - heads, has_next, rows, n)
            u_before = load_vector(u_ptr, next_start - heads, has_next, columns, channels)
    store_matrix(h_ptr, pair, rows, columns, n, channels, G)


@triton.jit
def chunk_products(B, C, k, HAS_REFLECTION: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """C_t.B_s, C_t.k_s, k_t.B_s and k_t.k_s; without a reflection only the first is of use."""
    CB = dot(C, tl.trans(B), DOT, PRECISION)
    Ck, kB, kk = CB, CB, CB
    if HAS_REFLECTION:
        Ck = dot(C, tl.trans(k), DOT, PRECISION)
        kB = dot(k, tl.trans(B), DOT, PRECISION)
        kk = dot(k, tl.trans(k), DOT, PRECISION)
    return CB, Ck, kB, kk


@triton.jit
def block_gradients(
    u, dy, B, k, G, dG, CB, Ck, kB, T, E, X, e_before, to_end, w, g, r, taken_back, u_before, i,
    HAS_REFLECTION: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """
    For a block of channels with dG, the gradient of G after the chunk: du but for what other chunks and D add, dv, the
    products over channels dy.u, dy.q, dv.u, dv.q (chunk, chunk), and dy G', dv G', u dG', q dG' (chunk, N).
    """
    du = dot(tl.trans(CB * E * write_weights(w, g, i, 0)), dy, DOT, PRECISION)
    du += (to_end * g)[:, None] * dot(B, dG, DOT, PRECISION)
    dyu, dyG, udG = (
        dot(dy, tl.trans(u), DOT, PRECISION),
        dot(dy, tl.trans(G), DOT, PRECISION),
        dot(u, tl.trans(dG), DOT, PRECISION),
    )
    dv, dyq, dvu, dvq, dvG, qdG = du, dyu, dyu, dyu, dyG, dyG
    if HAS_REFLECTION:
        V = kB * X * write_weights(w, g, i, 1)
        q = projections(u, k, G, V, T, e_before, taken_back, u_before, i, DOT, PRECISION, EXACT)
        dv = projection_gradients(dy, k, dG, Ck * E, T, to_end, r, DOT, PRECISION, EXACT)
        du += dot(tl.trans(V), dv, DOT, PRECISION)
        dyq, dvu, dvq = (
            dot(dy, tl.trans(q), DOT, PRECISION),
            dot(dv, tl.trans(u), DOT, PRECISION),
            dot(dv, tl.trans(q), DOT, PRECISION),
        )
        dvG, qdG = dot(dv, tl.trans(G), DOT, PRECISION), dot(q, tl.trans(dG), DOT, PRECISION)
    return du, dv, dyu, dyq, dvu, dvq, dyG, dvG, udG, qdG


@triton.jit
def chunk_gradients(
    B, C, k, CB, Ck, kB, kk, E, X, e, e_before, to_end, whole, w, g, r,
    dyu, dyq, dvu, dvq, dyG, dvG, udG, qdG, GdG, i,
    HAS_REFLECTION: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """
    Gradients of B, C and k but for what is taken back across chunks, of w, g and r, and of the logarithm of d, from the
    products of `block_gradients` summed over the channels, and GdG, the product of G and dG.
    """
    below = i[:, None] > i[None, :]
    first_weights = write_weights(w, g, i, 0)
    dCB = dyu * E * first_weights
    dC = dot(dCB, B, DOT, PRECISION) + e[:, None] * dyG
    dB = dot(tl.trans(dCB), C, DOT, PRECISION) + (to_end * g)[:, None] * udG
    weighted = dyu * E * CB
    dg_end = to_end * tl.sum(B.to(tl.float32) * udG, 1)
    dw = tl.sum(weighted, 0) + dg_end
    dg = tl.sum(tl.where(below, weighted, 0.0), 0) + dg_end
    # Each entry Z[t,s] of a sum with E[t,s] belongs to the decays of the steps s + 1 to t.
    Z = weighted * first_weights
    ending = tl.sum(Z, 1) + e * tl.sum(C.to(tl.float32) * dyG, 1)
    starting = tl.sum(Z, 0) + g * dg_end
    past_end = whole * GdG + tl.sum(g * dg_end, 0)
    ending_before = tl.zeros_like(ending)
    dk, dr = dB, dw
    if HAS_REFLECTION:
        second_weights = write_weights(w, g, i, 1)
        dCk, dkB, dkk = -dyq * E * r[None, :], dvu * X * second_weights, -dvq * X * r[None, :]
        dC += dot(dCk, k, DOT, PRECISION)
        dB += dot(tl.trans(dkB), k, DOT, PRECISION)
        dk = dot(tl.trans(dCk), C, DOT, PRECISION) + dot(dkB, B, DOT, PRECISION)
        dk += dot(dkk + tl.trans(dkk), k, DOT, PRECISION)
        dk += e_before[:, None] * dvG - (to_end * r)[:, None] * qdG
        dr_end = to_end * tl.sum(k.to(tl.float32) * qdG, 1)
        read, solved, weighted = -dyq * E * Ck, -dvq * X * kk, dvu * X * kB
        dr = tl.sum(read, 0) + tl.sum(solved, 0) - dr_end
        dw += tl.sum(weighted, 0)
        dg += tl.sum(tl.where(i[:, None] > i[None, :] + 1, weighted, 0.0), 0)
        Z_before = weighted * second_weights + solved * r[None, :]
        ending_before = tl.sum(Z_before, 1) + e_before * tl.sum(k.to(tl.float32) * dvG, 1)
        ending += tl.sum(read * r[None, :], 1) + ending_before
        starting += tl.sum(read * r[None, :] + Z_before, 0) - r * dr_end
        past_end -= tl.sum(r * dr_end, 0)
    dlog_decay = tl.cumsum(ending - starting, 0, reverse=True) + past_end - ending_before
    return dB, dC, dk, dw, dg, dr, dlog_decay


@triton.jit
def initial_gradients(dG, c, k_first, dv_first, B0, u0):
    """Gradients of B0, u0 and the first carry, which write into G but not into what the first reflection reads."""
    taken = dG - k_first[:, None] * dv_first[None, :]
    dB0 = tl.sum(taken * u0[None, :], 1)
    return c * dB0, c * tl.sum(taken * B0[:, None], 0), tl.sum(dB0 * B0, 0)


@triton.jit(do_not_specialize=["length", "heads"])
def backward_kernel(
    u_ptr, B_ptr, C_ptr, log_decay_ptr, write_ptr, carry_ptr, k_ptr, reflection_ptr, D_ptr,
    h0_ptr, B0_ptr, u0_ptr, kept_ptr, dy_ptr, dh_ptr,
    du_ptr, dB_ptr, dC_ptr, dlog_decay_ptr, dwrite_ptr, dcarry_ptr, dk_ptr, dreflection_ptr, dD_ptr,
    dh0_ptr, dB0_ptr, du0_ptr, length, heads,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
    HAS_CARRY: tl.constexpr, HAS_REFLECTION: tl.constexpr, HAS_D: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    i, rows, columns = tl.arange(0, CHUNK), tl.arange(0, N), tl.arange(0, P)
    chunks = tl.cdiv(length, CHUNK)
    first, _, _ = tokens_of_chunk(pair, 0, length, heads, 0, CHUNK)
    dG = load_matrix(dh_ptr, pair, True, rows, columns, n, channels)
    # Of the chunk after this one: the first token's k, dv and carry.
    k_next, dv_next, c_next = tl.zeros([N], tl.float32), tl.zeros([P], tl.float32), 0.0
    for back in range(0, chunks):
        chunk = chunks - 1 - back
        tokens, inside, followed = tokens_of_chunk(pair, chunk, length, heads, i, CHUNK)
        start, _, _ = tokens_of_chunk(pair, chunk, length, heads, 0, CHUNK)
        u = load_tile(u_ptr, tokens, inside, columns, channels)
        dy = load_tile(dy_ptr, tokens, inside, columns, channels)
        B = load_tile(B_ptr, tokens, inside, rows, n)
        C = load_tile(C_ptr, tokens, inside, rows, n)
        w, g = load_weights(write_ptr, carry_ptr, tokens, inside, followed, heads, HAS_CARRY)
        E, X, e, e_before, to_end, whole = decays(load_gate(log_decay_ptr, tokens, inside), i)
        c, B_before, u_before = 0.0, tl.zeros([N], tl.float32), tl.zeros([P], tl.float32)
        if HAS_CARRY:
            c = tl.load(carry_ptr + start).to(tl.float32)
            B_before = load_before(B_ptr, B0_ptr, start, heads, pair, chunk, rows, n)
            u_before = load_before(u_ptr, u0_ptr, start, heads, pair, chunk, columns, channels)
        G = load_start(h0_ptr, kept_ptr, c, B_before, u_before, pair, chunk, chunks, rows, columns, n, channels)
        k, r, T, taken_back = B, w, E, w
        if HAS_REFLECTION:
            k = load_tile(k_ptr, tokens, inside, rows, n)
            r = load_gate(reflection_ptr, tokens, inside)
        CB, Ck, kB, kk = chunk_products(B, C, k, HAS_REFLECTION, DOT, PRECISION)
        if HAS_REFLECTION:
            T = unit_lower_inverse(kk * X * r[None, :], i, CHUNK, EXACT)
            taken_back = c * tl.sum(k.to(tl.float32) * B_before[None, :], 1)

        du, dv, dyu, dyq, dvu, dvq, dyG, dvG, udG, qdG = block_gradients(
            u, dy, B, k, G, dG, CB, Ck, kB, T, E, X, e_before, to_end, w, g, r, taken_back, u_before, i,
            HAS_REFLECTION, DOT, PRECISION, EXACT,
        )  # fmt: skip
        dB, dC, dk, dw, dg, dr, dlog_decay = chunk_gradients(
            B, C, k, CB, Ck, kB, kk, E, X, e, e_before, to_end, whole, w, g, r,
            dyu, dyq, dvu, dvq, dyG, dvG, udG, qdG, tl.sum(G * dG), i,
            HAS_REFLECTION, DOT, PRECISION,
        )  # fmt: skip
        dG = whole * dG + dot(tl.trans(e[:, None] * C.to(tl.float32)), dy, DOT, PRECISION)
        if HAS_D:
            du += tl.load(D_ptr + pair % heads).to(tl.float32) * dy.to(tl.float32)
            tl.store(dD_ptr + pair * chunks + chunk, tl.sum(u.to(tl.float32) * dy.to(tl.float32)))
        if HAS_REFLECTION:
            dG += dot(tl.trans(e_before[:, None] * k.to(tl.float32)), dv, DOT, PRECISION)
            if HAS_CARRY:
                Bk_next = tl.sum(B.to(tl.float32) * k_next[None, :], 1)
                udv_next = tl.sum(u.to(tl.float32) * dv_next[None, :], 1)
                du -= last_row(i, c_next * Bk_next, dv_next, CHUNK)
                dB -= last_row(i, c_next * udv_next, k_next, CHUNK)
                dg -= tl.where(i == CHUNK - 1, Bk_next * udv_next, 0.0)
                dk -= first_row(i, c * tl.sum(dv * u_before[None, :], 1), B_before)
                k_next, c_next = load_vector(k_ptr, start, True, rows, n), c
                dv_next = tl.sum(tl.where((i == 0)[:, None], dv, 0.0), 0)
            store_tile(dk_ptr, tokens, inside, rows, n, dk)
            tl.store(dreflection_ptr + tokens, dr, mask=inside)
        store_tile(du_ptr, tokens, inside, columns, channels, du)
        store_tile(dB_ptr, tokens, inside, rows, n, dB)
        store_tile(dC_ptr, tokens, inside, rows, n, dC)
        tl.store(dlog_decay_ptr + tokens, dlog_decay, mask=inside)
        tl.store(dwrite_ptr + tokens, dw, mask=inside)
        if HAS_CARRY:
            tl.store(dcarry_ptr + tokens + heads, dg, mask=followed)
    store_matrix(dh0_ptr, pair, rows, columns, n, channels, dG)
    if HAS_CARRY:
        B0, u0 = load_vector(B0_ptr, pair, True, rows, n), load_vector(u0_ptr, pair, True, columns, channels)
        c = tl.load(carry_ptr + first).to(tl.float32)
        dB0, du0, dc = initial_gradients(dG, c, k_next, dv_next, B0, u0)
        tl.store(dB0_ptr + pair * n + rows, dB0, mask=rows < n)
        tl.store(du0_ptr + pair * channels + columns, du0, mask=columns < channels)
        tl.store(dcarry_ptr + first, dc)


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
        tokens, inside, _ = tokens_of_chunk(pair, chunk, length, heads, i, CHUNK)
        dy = load_tile(dy_ptr, tokens, inside, columns, channels)
        C = load_tile(C_ptr, tokens, inside, rows, n)
        E, _, e, e_before, to_end, whole = decays(load_gate(log_decay_ptr, tokens, inside), i)
        index = pair * chunks + chunk
        store_matrix(dG_ptr, index, rows, columns, n, channels, dG)
        update = dot(tl.trans(e[:, None] * C.to(tl.float32)), dy, DOT, PRECISION)
        if HAS_REFLECTION:
            k = load_tile(k_ptr, tokens, inside, rows, n)
            r = load_gate(reflection_ptr, tokens, inside)
            T = load_inverse(T_ptr, index, i, CHUNK)
            CkE = dot(C, tl.trans(k), DOT, PRECISION) * E
            dv = projection_gradients(dy, k, dG, CkE, T, to_end, r, DOT, PRECISION, EXACT)
            update += dot(tl.trans(e_before[:, None] * k.to(tl.float32)), dv, DOT, PRECISION)
            dv_first = tl.sum(tl.where((i == 0)[:, None], dv, 0.0), 0)
            tl.store(dv_ptr + index * channels + columns, dv_first, mask=columns < channels)
        dG = whole * dG + update
    store_matrix(dh0_ptr, pair, rows, columns, n, channels, dG)


@triton.jit(do_not_specialize=["length", "heads"])
def backward_chunk_kernel(
    u_ptr, B_ptr, C_ptr, log_decay_ptr, write_ptr, carry_ptr, k_ptr, reflection_ptr, D_ptr,
    h0_ptr, B0_ptr, u0_ptr, kept_ptr, T_ptr, dy_ptr, dG_ptr, dv_ptr, dh0_ptr,
    du_ptr, dB_ptr, dC_ptr, dlog_decay_ptr, dwrite_ptr, dcarry_ptr, dk_ptr, dreflection_ptr, dD_ptr,
    dB0_ptr, du0_ptr, length, heads,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
    HAS_CARRY: tl.constexpr, HAS_REFLECTION: tl.constexpr, HAS_D: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    chunk, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i, rows = tl.arange(0, CHUNK), tl.arange(0, N)
    chunks = tl.cdiv(length, CHUNK)
    index = pair * chunks + chunk
    tokens, inside, followed = tokens_of_chunk(pair, chunk, length, heads, i, CHUNK)
    start, _, _ = tokens_of_chunk(pair, chunk, length, heads, 0, CHUNK)
    next_start, has_next, _ = tokens_of_chunk(pair, chunk + 1, length, heads, 0, CHUNK)
    B = load_tile(B_ptr, tokens, inside, rows, n)
    C = load_tile(C_ptr, tokens, inside, rows, n)
    w, g = load_weights(write_ptr, carry_ptr, tokens, inside, followed, heads, HAS_CARRY)
    E, X, e, e_before, to_end, whole = decays(load_gate(log_decay_ptr, tokens, inside), i)
    c, B_before = 0.0, tl.zeros([N], tl.float32)
    if HAS_CARRY:
        c = tl.load(carry_ptr + start).to(tl.float32)
        B_before = load_before(B_ptr, B0_ptr, start, heads, pair, chunk, rows, n)
    k, r, T, taken_back, Bk_next = B, w, E, w, w
    if HAS_REFLECTION:
        k = load_tile(k_ptr, tokens, inside, rows, n)
        r = load_gate(reflection_ptr, tokens, inside)
        T = load_inverse(T_ptr, index, i, CHUNK)
        taken_back = c * tl.sum(k.to(tl.float32) * B_before[None, :], 1)
        # Of the chunk after this one: the first token's k and carry.
        k_next = load_vector(k_ptr, next_start, has_next, rows, n)
        Bk_next = tl.sum(B.to(tl.float32) * k_next[None, :], 1)
        c_next = 0.0
        if HAS_CARRY:
            c_next = tl.load(carry_ptr + next_start, mask=has_next, other=0.0).to(tl.float32)
    CB, Ck, kB, kk = chunk_products(B, C, k, HAS_REFLECTION, DOT, PRECISION)

    dyu, dyq = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    dvu, dvq = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    dyG, dvG = tl.zeros([CHUNK, N], tl.float32), tl.zeros([CHUNK, N], tl.float32)
    udG, qdG = tl.zeros([CHUNK, N], tl.float32), tl.zeros([CHUNK, N], tl.float32)
    dvu_before, udv_next = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
    GdG, dD = tl.zeros([N], tl.float32), tl.zeros([CHUNK], tl.float32)
    for block in range(0, tl.cdiv(channels, P)):
        columns = block * P + tl.arange(0, P)
        u = load_tile(u_ptr, tokens, inside, columns, channels)
        dy = load_tile(dy_ptr, tokens, inside, columns, channels)
        u_before = tl.zeros([P], tl.float32)
        if HAS_CARRY:
            u_before = load_before(u_ptr, u0_ptr, start, heads, pair, chunk, columns, channels)
        G = load_start(h0_ptr, kept_ptr, c, B_before, u_before, pair, chunk, chunks, rows, columns, n, channels)
        dG = load_matrix(dG_ptr, index, True, rows, columns, n, channels)
        du, dv, dyu_block, dyq_block, dvu_block, dvq_block, dyG_block, dvG_block, udG_block, qdG_block = block_gradients(
            u, dy, B, k, G, dG, CB, Ck, kB, T, E, X, e_before, to_end, w, g, r, taken_back, u_before, i,
            HAS_REFLECTION, DOT, PRECISION, EXACT,
        )  # fmt: skip
        dyu += dyu_block
        dyG += dyG_block
        udG += udG_block
        GdG += tl.sum(G * dG, 1)
        if HAS_REFLECTION:
            dyq += dyq_block
            dvu += dvu_block
            dvq += dvq_block
            dvG += dvG_block
            qdG += qdG_block
            if HAS_CARRY:
                dv_next = load_vector(dv_ptr, index + 1, has_next, columns, channels)
                du -= last_row(i, c_next * Bk_next, dv_next, CHUNK)
                udv_next += tl.sum(u.to(tl.float32) * dv_next[None, :], 1)
                dvu_before += tl.sum(dv * u_before[None, :], 1)
        if HAS_D:
            du += tl.load(D_ptr + pair % heads).to(tl.float32) * dy.to(tl.float32)
            dD += tl.sum(u.to(tl.float32) * dy.to(tl.float32), 1)
        store_tile(du_ptr, tokens, inside, columns, channels, du)

    dB, dC, dk, dw, dg, dr, dlog_decay = chunk_gradients(
        B, C, k, CB, Ck, kB, kk, E, X, e, e_before, to_end, whole, w, g, r,
        dyu, dyq, dvu, dvq, dyG, dvG, udG, qdG, tl.sum(GdG, 0), i,
        HAS_REFLECTION, DOT, PRECISION,
    )  # fmt: skip
    if HAS_REFLECTION:
        if HAS_CARRY:
            dB -= last_row(i, c_next * udv_next, k_next, CHUNK)
            dg -= tl.where(i == CHUNK - 1, Bk_next * udv_next, 0.0)
            dk -= first_row(i, c * dvu_before, B_before)
        store_tile(dk_ptr, tokens, inside, rows, n, dk)
        tl.store(dreflection_ptr + tokens, dr, mask=inside)
    store_tile(dB_ptr, tokens, inside, rows, n, dB)
    store_tile(dC_ptr, tokens, inside, rows, n, dC)
    tl.store(dlog_decay_ptr + tokens, dlog_decay, mask=inside)
    tl.store(dwrite_ptr + tokens, dw, mask=inside)
    if HAS_D:
        tl.store(dD_ptr + index, tl.sum(dD, 0))
    if HAS_CARRY:
        tl.store(dcarry_ptr + tokens + heads, dg, mask=followed)
        if chunk == 0:
            dB0, dc = tl.zeros([N], tl.float32), 0.0
            k_first = tl.zeros([N], tl.float32)
            if HAS_REFLECTION:
                k_first += load_vector(k_ptr, start, True, rows, n)
            for block in range(0, tl.cdiv(channels, P)):
                columns = block * P + tl.arange(0, P)
                u0 = load_vector(u0_ptr, pair, True, columns, channels)
                dv_first = tl.zeros([P], tl.float32)
                if HAS_REFLECTION:
                    dv_first += load_vector(dv_ptr, index, True, columns, channels)
                dG0 = load_matrix(dh0_ptr, pair, True, rows, columns, n, channels)
                dB0_block, du0, dc_block = initial_gradients(dG0, c, k_first, dv_first, B_before, u0)
                tl.store(du0_ptr + pair * channels + columns, du0, mask=columns < channels)
                dB0 += dB0_block
                dc += dc_block
            tl.store(dB0_ptr + pair * n + rows, dB0, mask=rows < n)
            tl.store(dcarry_ptr + start, dc)


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
    decay = tl.exp(tl.load(log_decay_ptr + pair).to(tl.float32))
    new = decay * h + tl.load(write_ptr + pair).to(tl.float32) * B[:, None] * u[None, :]
    if HAS_CARRY:
        B0, u0 = load_vector(B0_ptr, pair, True, rows, n), load_vector(u0_ptr, pair, True, columns, channels)
        new += decay * tl.load(carry_ptr + pair).to(tl.float32) * B0[:, None] * u0[None, :]
    if HAS_REFLECTION:
        k = load_vector(k_ptr, pair, True, rows, n)
        q = tl.sum(k[:, None] * h, 0)
        new -= tl.load(reflection_ptr + pair).to(tl.float32) * k[:, None] * q[None, :]
    y = tl.sum(load_vector(C_ptr, pair, True, rows, n)[:, None] * new, 0)
    if HAS_D:
        y += tl.load(D_ptr + pair % heads).to(tl.float32) * u
    tl.store(y_ptr + pair * channels + columns, y.to(y_ptr.dtype.element_ty), mask=columns < channels)
    store_matrix(h_ptr, pair, rows, columns, n, channels, new)


KERNELS = {
    "step_kernel": step_kernel,
    "forward_kernel": forward_kernel,
    "backward_kernel": backward_kernel,
    "solve_kernel": solve_kernel,
    "backward_state_kernel": backward_state_kernel,
    "backward_chunk_kernel": backward_chunk_kernel,
}
