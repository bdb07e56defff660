"""The kernels of the backward pass of the scan; `kernels` says what each does."""

from .chunk import (
    add_token_responses,
    chunk_inverse,
    decay_from_start,
    decay_matrix,
    decay_since,
    dot,
    entries,
    entry,
    find_chunk,
    find_sequence,
    first_row,
    last_row,
    load_before,
    load_gate,
    load_gates,
    load_inverse,
    load_matrix,
    load_next,
    load_scalar,
    load_tile,
    load_vector,
    next_phase,
    pair_gradients,
    state_responses,
    store_gate,
    store_matrix,
    store_tile,
    sum_logs,
    tl,
    triton,
    weight_matrix,
)


@triton.jit
def projection_gradients(
    inputs, dy_ptr, place, dG, columns,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """r times dq, from the y of the chunk and from the state after it; dv = T' (r dq)."""
    _, _, C_ptr, log_decay_ptr, _, _, k_ptr, reflection_ptr, _ = inputs
    i, rows = tl.arange(0, CHUNK), tl.arange(0, N)
    inside = i < place[4]
    at = entries(place, i, inside)
    a, _, a_last = sum_logs(load_gate(log_decay_ptr, at, inside))
    r = load_gate(reflection_ptr, at, inside)
    k = load_tile(k_ptr, at, inside, rows, n)
    C = load_tile(C_ptr, at, inside, rows, n)
    dy = load_tile(dy_ptr, at, inside, columns, channels)
    dq = -decay_since(a_last, a)[:, None] * dot(k, dG, DOT, PRECISION)
    CkE = dot(C, tl.trans(k), DOT, PRECISION) * decay_matrix(a, a, i, 0)
    return r[:, None] * dot(-tl.trans(CkE), dy, DOT, PRECISION, acc=dq)


@triton.jit
def state_gradient(
    inputs, dy_ptr, place, dG, dv, columns,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
    HAS_REFLECTION: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dG at the start of a chunk from dG at its end."""
    _, _, C_ptr, log_decay_ptr, _, _, k_ptr, _, _ = inputs
    i, rows = tl.arange(0, CHUNK), tl.arange(0, N)
    inside = i < place[4]
    at = entries(place, i, inside)
    a, a_before, a_last = sum_logs(load_gate(log_decay_ptr, at, inside))
    C = load_tile(C_ptr, at, inside, rows, n)
    dy = load_tile(dy_ptr, at, inside, columns, channels)
    dG *= decay_from_start(a_last)
    dG = dot(tl.trans(C), decay_from_start(a)[:, None] * dy.to(tl.float32), DOT, PRECISION, acc=dG)
    if HAS_REFLECTION:
        k = load_tile(k_ptr, at, inside, rows, n)
        dG = dot(tl.trans(k), decay_from_start(a_before)[:, None] * dv, DOT, PRECISION, acc=dG)
    return dG


@triton.jit(do_not_specialize=["length", "heads"])
def backward_state_kernel(
    C_ptr, log_decay_ptr, k_ptr, reflection_ptr, bounds_ptr, order_ptr, T_ptr, dy_ptr, dh_ptr, dG_ptr, dv_ptr, dh0_ptr,
    length, heads,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
    HAS_REFLECTION: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Writes dG at the end of every chunk, dv of every chunk's first token, and dh0."""
    pair = tl.program_id(0).to(tl.int64)
    head = pair % heads
    first, length, slot = find_sequence(bounds_ptr, pair // heads, length, CHUNK)
    i, rows, columns = tl.arange(0, CHUNK), tl.arange(0, N), tl.program_id(1) * P + tl.arange(0, P)
    chunks = tl.cdiv(length, CHUNK)
    inputs = (None, None, C_ptr, log_decay_ptr, None, None, k_ptr, reflection_ptr, None)
    dG = load_matrix(dh_ptr, pair, True, rows, columns, n, channels)
    for back in tl.range(0, chunks, disable_licm=True):
        chunk = chunks - 1 - back
        index, remaining = (slot + chunk) * heads + head, length - chunk * CHUNK
        place = (pair, chunk, index, first + chunk * CHUNK, remaining, head, heads, order_ptr)
        store_matrix(dG_ptr, index, rows, columns, n, channels, dG)
        rdq, dv = tl.zeros([CHUNK, P], tl.float32), tl.zeros([CHUNK, P], tl.float32)
        if HAS_REFLECTION:
            place = next_phase(place)
            if place[4] > 0:
                rdq = projection_gradients(inputs, dy_ptr, place, dG, columns, n, channels, N, CHUNK, DOT, PRECISION)
            place = next_phase(place)
            dv = dot(tl.trans(load_inverse(T_ptr, index, i, CHUNK)), rdq, tl.float32, EXACT)
            dv_first = tl.sum(tl.where((i == 0)[:, None], dv, 0.0), 0)
            tl.store(dv_ptr + index * channels + columns, dv_first, mask=columns < channels)
        place = next_phase(place)
        dG = state_gradient(
            inputs, dy_ptr, place, dG, dv, columns, n, channels, N, CHUNK, HAS_REFLECTION, DOT, PRECISION
        )
    store_matrix(dh0_ptr, pair, rows, columns, n, channels, dG)


@triton.jit
def start_responses(
    inputs, initial, kept_ptr, place,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
    HAS_CARRY: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`state_responses` for the G that was kept."""
    rows, columns = tl.arange(0, N), tl.arange(0, P)
    G = load_matrix(kept_ptr, place[2], True, rows, columns, n, channels)
    return state_responses(inputs, initial, place, G, columns, n, channels, N, CHUNK, HAS_CARRY, DOT, PRECISION)


@triton.jit
def projections_and_gradients(
    inputs, initial, kept_ptr, T_ptr, dy_ptr, place, dG,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
    HAS_CARRY: tl.constexpr, SOLVED: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """q and dv."""
    i, columns = tl.arange(0, CHUNK), tl.arange(0, P)
    v, rdq = tl.zeros([CHUNK, P], tl.float32), tl.zeros([CHUNK, P], tl.float32)
    T = tl.zeros([CHUNK, CHUNK], tl.float32)
    place = next_phase(place)
    if place[4] > 0:
        v = start_responses(inputs, initial, kept_ptr, place, n, channels, N, P, CHUNK, HAS_CARRY, DOT, PRECISION)
    place = next_phase(place)
    if place[4] > 0:
        v = add_token_responses(inputs, place, v, columns, n, channels, N, CHUNK, HAS_CARRY, DOT, PRECISION)
    place = next_phase(place)
    if place[4] > 0:
        T = chunk_inverse(inputs, T_ptr, place, n, N, CHUNK, SOLVED, DOT, PRECISION, EXACT)
    q = dot(T, v, tl.float32, EXACT)
    place = next_phase(place)
    if place[4] > 0:
        rdq = projection_gradients(inputs, dy_ptr, place, dG, columns, n, channels, N, CHUNK, DOT, PRECISION)
    place = next_phase(place)
    if SOLVED:
        T = load_inverse(T_ptr, place[2], i, CHUNK)
    return q, dot(tl.trans(T), rdq, tl.float32, EXACT)


@triton.jit
def value_gradients(
    inputs, place, dG, dv,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
    HAS_CARRY: tl.constexpr, HAS_REFLECTION: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """du but for the terms of y."""
    _, B_ptr, _, _, _, _, k_ptr, _, _ = inputs
    i, rows = tl.arange(0, CHUNK), tl.arange(0, N)
    inside = i < place[4]
    at = entries(place, i, inside)
    a, a_before, a_last, w, g = load_gates(inputs, place, i, HAS_CARRY)
    B = load_tile(B_ptr, at, inside, rows, n)
    du = (decay_since(a_last, a) * g)[:, None] * dot(B, dG, DOT, PRECISION)
    if HAS_REFLECTION:
        k = load_tile(k_ptr, at, inside, rows, n)
        V = dot(k, tl.trans(B), DOT, PRECISION) * decay_matrix(a_before, a, i, 1) * weight_matrix(w, g, i, 1)
        du = dot(tl.trans(V), dv, DOT, PRECISION, acc=du)
    return du


@triton.jit
def write_value_gradients(
    inputs, dy_ptr, du_ptr, dD_ptr, place, du, dv_next,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
    HAS_CARRY: tl.constexpr, HAS_REFLECTION: tl.constexpr, HAS_D: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the terms of y and writes du and dD."""
    u_ptr, B_ptr, C_ptr, _, _, carry_ptr, k_ptr, _, D_ptr = inputs
    i, rows, columns = tl.arange(0, CHUNK), tl.arange(0, N), tl.arange(0, P)
    inside = i < place[4]
    at = entries(place, i, inside)
    a, _, _, w, g = load_gates(inputs, place, i, HAS_CARRY)
    B = load_tile(B_ptr, at, inside, rows, n)
    C = load_tile(C_ptr, at, inside, rows, n)
    W = dot(C, tl.trans(B), DOT, PRECISION) * decay_matrix(a, a, i, 0) * weight_matrix(w, g, i, 0)
    dy = load_tile(dy_ptr, at, inside, columns, channels)
    du = dot(tl.trans(W), dy, DOT, PRECISION, acc=du)
    if HAS_D:
        u = load_tile(u_ptr, at, inside, columns, channels).to(tl.float32)
        du += load_scalar(D_ptr, place[5], True) * dy.to(tl.float32)
        tl.store(dD_ptr + place[2], tl.sum(u * dy.to(tl.float32)))
    if HAS_CARRY and HAS_REFLECTION:
        k_next, c_next = load_next(k_ptr, carry_ptr, place, rows, n, CHUNK)
        du -= last_row(i, c_next * tl.sum(B.to(tl.float32) * k_next[None, :], 1), dv_next, CHUNK)
    store_tile(du_ptr, at, inside, columns, channels, du)


@triton.jit
def end_terms(
    inputs, place, dG,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
    HAS_CARRY: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What dG at the end of a chunk gives to dB, to dw and dg, and to the decays."""
    u_ptr, B_ptr, _, _, _, _, _, _, _ = inputs
    i, rows, columns = tl.arange(0, CHUNK), tl.arange(0, N), tl.arange(0, P)
    inside = i < place[4]
    at = entries(place, i, inside)
    a, _, a_last, _, g = load_gates(inputs, place, i, HAS_CARRY)
    u = load_tile(u_ptr, at, inside, columns, channels)
    dB = decay_since(a_last, a)[:, None] * dot(u, tl.trans(dG), DOT, PRECISION)
    dw = tl.sum(load_tile(B_ptr, at, inside, rows, n).to(tl.float32) * dB, 1)
    starting = g * dw
    return g[:, None] * dB, dw, dw, starting, tl.sum(starting, 0)


@triton.jit
def reflected_end_terms(
    inputs, place, dG, q, starting, past_end,
    n: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What it gives to dk and dr, and to the decays of q."""
    _, _, _, log_decay_ptr, _, _, k_ptr, reflection_ptr, _ = inputs
    i, rows = tl.arange(0, CHUNK), tl.arange(0, N)
    inside = i < place[4]
    at = entries(place, i, inside)
    a, _, a_last = sum_logs(load_gate(log_decay_ptr, at, inside))
    r = load_gate(reflection_ptr, at, inside)
    dk = -decay_since(a_last, a)[:, None] * dot(q, tl.trans(dG), DOT, PRECISION)
    dr = tl.sum(load_tile(k_ptr, at, inside, rows, n).to(tl.float32) * dk, 1)
    return r[:, None] * dk, dr, starting + r * dr, past_end + tl.sum(r * dr, 0)


@triton.jit
def start_terms(
    inputs, kept_ptr, dy_ptr, place, dG, past_end,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What G at the start gives to dC and to the decays of y and of G at the end."""
    _, _, C_ptr, log_decay_ptr, _, _, _, _, _ = inputs
    i, rows, columns = tl.arange(0, CHUNK), tl.arange(0, N), tl.arange(0, P)
    inside = i < place[4]
    at = entries(place, i, inside)
    a, _, a_last = sum_logs(load_gate(log_decay_ptr, at, inside))
    G = load_matrix(kept_ptr, place[2], True, rows, columns, n, channels)
    dy = load_tile(dy_ptr, at, inside, columns, channels)
    dC = decay_from_start(a)[:, None] * dot(dy, tl.trans(G), DOT, PRECISION)
    ending = tl.sum(load_tile(C_ptr, at, inside, rows, n).to(tl.float32) * dC, 1)
    return dC, ending, past_end + decay_from_start(a_last) * tl.sum(G * dG)


@triton.jit
def reflected_start_terms(
    inputs, kept_ptr, place, dv, dk,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What it gives to dk and to the decays of v."""
    _, _, _, log_decay_ptr, _, _, k_ptr, _, _ = inputs
    i, rows, columns = tl.arange(0, CHUNK), tl.arange(0, N), tl.arange(0, P)
    inside = i < place[4]
    at = entries(place, i, inside)
    _, a_before, _ = sum_logs(load_gate(log_decay_ptr, at, inside))
    G = load_matrix(kept_ptr, place[2], True, rows, columns, n, channels)
    dk_start = decay_from_start(a_before)[:, None] * dot(dv, tl.trans(G), DOT, PRECISION)
    ending_before = tl.sum(load_tile(k_ptr, at, inside, rows, n).to(tl.float32) * dk_start, 1)
    return dk + dk_start, ending_before


@triton.jit
def boundary_terms(
    inputs, kept_ptr, dy_ptr, place, dG, q, dv,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
    HAS_CARRY: tl.constexpr, HAS_REFLECTION: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """
    What dG at the end and G at the start of a chunk give: dB, dC and dk; dw, dg and dr; and the gradients of products
    of decays, summed over the last step of the products (`ending`; `ending_before` where that is t - 1) and over the
    step before their first (`starting`), and of those that reach to the end of the chunk.
    """
    dB, dC, dk = tl.zeros([CHUNK, N], tl.float32), tl.zeros([CHUNK, N], tl.float32), tl.zeros([CHUNK, N], tl.float32)
    dw, dg, dr = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
    ending, ending_before, starting, past_end = dw, dw, dw, 0.0
    place = next_phase(place)
    if place[4] > 0:
        dB, dw, dg, starting, past_end = end_terms(
            inputs, place, dG, n, channels, N, P, CHUNK, HAS_CARRY, DOT, PRECISION
        )
    if HAS_REFLECTION:
        place = next_phase(place)
        if place[4] > 0:
            dk, dr, starting, past_end = reflected_end_terms(
                inputs, place, dG, q, starting, past_end, n, N, CHUNK, DOT, PRECISION
            )
    place = next_phase(place)
    if place[4] > 0:
        dC, ending, past_end = start_terms(
            inputs, kept_ptr, dy_ptr, place, dG, past_end, n, channels, N, P, CHUNK, DOT, PRECISION
        )
    if HAS_REFLECTION:
        place = next_phase(place)
        if place[4] > 0:
            dk, ending_before = reflected_start_terms(
                inputs, kept_ptr, place, dv, dk, n, channels, N, P, CHUNK, DOT, PRECISION
            )
    return dB, dC, dk, dw, dg, dr, ending, ending_before, starting, past_end


@triton.jit
def readout_terms(
    inputs, dy_ptr, place, dB, dC, dw, dg, ending, starting,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
    HAS_CARRY: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the terms of C_t.B_s."""
    u_ptr, B_ptr, C_ptr, _, _, _, _, _, _ = inputs
    i, rows, columns = tl.arange(0, CHUNK), tl.arange(0, N), tl.arange(0, P)
    inside = i < place[4]
    at = entries(place, i, inside)
    a, _, _, w, g = load_gates(inputs, place, i, HAS_CARRY)
    u = load_tile(u_ptr, at, inside, columns, channels)
    dy = load_tile(dy_ptr, at, inside, columns, channels)
    dyu = dot(dy, tl.trans(u), DOT, PRECISION) * decay_matrix(a, a, i, 0)
    C = load_tile(C_ptr, at, inside, rows, n)
    B = load_tile(B_ptr, at, inside, rows, n)
    dCB, dweights, of_t, of_s = pair_gradients(C, B, dyu, weight_matrix(w, g, i, 0), DOT, PRECISION)
    dC = dot(dCB, B, DOT, PRECISION, acc=dC)
    dB = dot(tl.trans(dCB), C, DOT, PRECISION, acc=dB)
    dw += tl.sum(dweights, 0)
    dg += tl.sum(tl.where(i[:, None] > i[None, :], dweights, 0.0), 0)
    return dB, dC, dw, dg, ending + of_t, starting + of_s


@triton.jit
def reflected_readout_terms(
    inputs, dy_ptr, place, q, dC, dk, dr, ending, starting,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the terms of C_t.k_s."""
    _, _, C_ptr, log_decay_ptr, _, _, k_ptr, reflection_ptr, _ = inputs
    i, rows, columns = tl.arange(0, CHUNK), tl.arange(0, N), tl.arange(0, P)
    inside = i < place[4]
    at = entries(place, i, inside)
    a, _, _ = sum_logs(load_gate(log_decay_ptr, at, inside))
    dy = load_tile(dy_ptr, at, inside, columns, channels)
    dyq = -dot(dy, tl.trans(q), DOT, PRECISION) * decay_matrix(a, a, i, 0)
    C = load_tile(C_ptr, at, inside, rows, n)
    k = load_tile(k_ptr, at, inside, rows, n)
    strengths = tl.broadcast_to(load_gate(reflection_ptr, at, inside)[None, :], CHUNK, CHUNK)
    dCk, dweights, of_t, of_s = pair_gradients(C, k, dyq, strengths, DOT, PRECISION)
    dC = dot(dCk, k, DOT, PRECISION, acc=dC)
    dk = dot(tl.trans(dCk), C, DOT, PRECISION, acc=dk)
    return dC, dk, dr + tl.sum(dweights, 0), ending + of_t, starting + of_s


@triton.jit
def reflected_projection_terms(
    inputs, place, q, dv, dk, dr, ending_before, starting,
    n: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the terms of k_t.k_s."""
    _, _, _, log_decay_ptr, _, _, k_ptr, reflection_ptr, _ = inputs
    i, rows = tl.arange(0, CHUNK), tl.arange(0, N)
    inside = i < place[4]
    at = entries(place, i, inside)
    a, a_before, _ = sum_logs(load_gate(log_decay_ptr, at, inside))
    dvq = -dot(dv, tl.trans(q), DOT, PRECISION) * decay_matrix(a_before, a, i, 1)
    k = load_tile(k_ptr, at, inside, rows, n)
    strengths = tl.broadcast_to(load_gate(reflection_ptr, at, inside)[None, :], CHUNK, CHUNK)
    dkk, dweights, of_t, of_s = pair_gradients(k, k, dvq, strengths, DOT, PRECISION)
    dk = dot(dkk + tl.trans(dkk), k, DOT, PRECISION, acc=dk)
    return dk, dr + tl.sum(dweights, 0), ending_before + of_t, starting + of_s


@triton.jit
def projection_terms(
    inputs, place, dv, dB, dk, dw, dg, ending_before, starting,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
    HAS_CARRY: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the terms of k_t.B_s."""
    u_ptr, B_ptr, _, _, _, _, k_ptr, _, _ = inputs
    i, rows, columns = tl.arange(0, CHUNK), tl.arange(0, N), tl.arange(0, P)
    inside = i < place[4]
    at = entries(place, i, inside)
    a, a_before, _, w, g = load_gates(inputs, place, i, HAS_CARRY)
    u = load_tile(u_ptr, at, inside, columns, channels)
    dvu = dot(dv, tl.trans(u), DOT, PRECISION) * decay_matrix(a_before, a, i, 1)
    k = load_tile(k_ptr, at, inside, rows, n)
    B = load_tile(B_ptr, at, inside, rows, n)
    dkB, dweights, of_t, of_s = pair_gradients(k, B, dvu, weight_matrix(w, g, i, 1), DOT, PRECISION)
    dk = dot(dkB, B, DOT, PRECISION, acc=dk)
    dB = dot(tl.trans(dkB), k, DOT, PRECISION, acc=dB)
    dw += tl.sum(dweights, 0)
    dg += tl.sum(tl.where(i[:, None] > i[None, :] + 1, dweights, 0.0), 0)
    return dB, dk, dw, dg, ending_before + of_t, starting + of_s


@triton.jit
def carry_terms(
    inputs, initial, place, dv, dv_next, dB, dk, dg,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Adds what the first token after the chunk takes back of its last one, and its first one of the token before."""
    u_ptr, B_ptr, _, _, _, carry_ptr, k_ptr, _, _ = inputs
    B0_ptr, u0_ptr = initial
    i, rows, columns = tl.arange(0, CHUNK), tl.arange(0, N), tl.arange(0, P)
    inside = i < place[4]
    at = entries(place, i, inside)
    k_next, c_next = load_next(k_ptr, carry_ptr, place, rows, n, CHUNK)
    Bk_next = tl.sum(load_tile(B_ptr, at, inside, rows, n).to(tl.float32) * k_next[None, :], 1)
    udv_next = tl.sum(load_tile(u_ptr, at, inside, columns, channels).to(tl.float32) * dv_next[None, :], 1)
    dB -= last_row(i, c_next * udv_next, k_next, CHUNK)
    dg -= tl.where(i == CHUNK - 1, Bk_next * udv_next, 0.0)
    B_before = load_before(B_ptr, B0_ptr, place, rows, n)
    u_before = load_before(u_ptr, u0_ptr, place, columns, channels)
    c = load_scalar(carry_ptr, entry(place, 0, True), True)
    dk -= first_row(i, c * tl.sum(dv * u_before[None, :], 1), B_before)
    return dB, dk, dg


@triton.jit
def chunk_gradients(
    inputs, initial, kept_ptr, T_ptr, dy_ptr, gradients, place, dG, dv_next,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
    HAS_CARRY: tl.constexpr, HAS_REFLECTION: tl.constexpr, HAS_D: tl.constexpr, SOLVED: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """
    Writes the gradients of all inputs of a chunk, given dG at its end and dv of the first token after it. Returns dG at
    its start and dv of its own first token.
    """
    du_ptr, dB_ptr, dC_ptr, dlog_decay_ptr, dwrite_ptr, dcarry_ptr, dk_ptr, dreflection_ptr, dD_ptr = gradients
    i, rows, columns = tl.arange(0, CHUNK), tl.arange(0, N), tl.arange(0, P)
    q, dv = dG, dG
    if HAS_REFLECTION:
        q, dv = projections_and_gradients(
            inputs, initial, kept_ptr, T_ptr, dy_ptr, place, dG,
            n, channels, N, P, CHUNK, HAS_CARRY, SOLVED, DOT, PRECISION, EXACT,
        )  # fmt: skip
    du = tl.zeros([CHUNK, P], tl.float32)
    place = next_phase(place)
    if place[4] > 0:
        du = value_gradients(inputs, place, dG, dv, n, channels, N, P, CHUNK, HAS_CARRY, HAS_REFLECTION, DOT, PRECISION)
    place = next_phase(place)
    if place[4] > 0:
        write_value_gradients(
            inputs, dy_ptr, du_ptr, dD_ptr, place, du, dv_next,
            n, channels, N, P, CHUNK, HAS_CARRY, HAS_REFLECTION, HAS_D, DOT, PRECISION,
        )  # fmt: skip
    dB, dC, dk, dw, dg, dr, ending, ending_before, starting, past_end = boundary_terms(
        inputs, kept_ptr, dy_ptr, place, dG, q, dv,
        n, channels, N, P, CHUNK, HAS_CARRY, HAS_REFLECTION, DOT, PRECISION,
    )  # fmt: skip
    place = next_phase(place)
    if place[4] > 0:
        dG = state_gradient(
            inputs, dy_ptr, place, dG, dv, columns, n, channels, N, CHUNK, HAS_REFLECTION, DOT, PRECISION
        )
    place = next_phase(place)
    if place[4] > 0:
        dB, dC, dw, dg, ending, starting = readout_terms(
            inputs, dy_ptr, place, dB, dC, dw, dg, ending, starting,
            n, channels, N, P, CHUNK, HAS_CARRY, DOT, PRECISION,
        )  # fmt: skip
    if HAS_REFLECTION:
        place = next_phase(place)
        if place[4] > 0:
            dC, dk, dr, ending, starting = reflected_readout_terms(
                inputs, dy_ptr, place, q, dC, dk, dr, ending, starting, n, channels, N, P, CHUNK, DOT, PRECISION
            )
    place = next_phase(place)
    inside = i < place[4]
    store_tile(dC_ptr, entries(place, i, inside), inside, rows, n, dC)
    if HAS_REFLECTION:
        place = next_phase(place)
        if place[4] > 0:
            dk, dr, ending_before, starting = reflected_projection_terms(
                inputs, place, q, dv, dk, dr, ending_before, starting, n, N, CHUNK, DOT, PRECISION
            )
        place = next_phase(place)
        if place[4] > 0:
            dB, dk, dw, dg, ending_before, starting = projection_terms(
                inputs, place, dv, dB, dk, dw, dg, ending_before, starting,
                n, channels, N, P, CHUNK, HAS_CARRY, DOT, PRECISION,
            )  # fmt: skip
        if HAS_CARRY:
            place = next_phase(place)
            if place[4] > 0:
                dB, dk, dg = carry_terms(inputs, initial, place, dv, dv_next, dB, dk, dg, n, channels, N, P, CHUNK)
        place = next_phase(place)
        dv_next = tl.sum(tl.where((i == 0)[:, None], dv, 0.0), 0)
        inside = i < place[4]
        store_tile(dk_ptr, entries(place, i, inside), inside, rows, n, dk)
        store_gate(dreflection_ptr, entries(place, i, inside), inside, dr)
    inside, has_next = i < place[4], i < place[4] - 1
    at = entries(place, i, inside)
    store_tile(dB_ptr, at, inside, rows, n, dB)
    store_gate(dwrite_ptr, at, inside, dw)
    if HAS_CARRY:
        store_gate(dcarry_ptr, entries(place, i, has_next, 1), has_next, dg)
    dlog_decay = tl.cumsum(ending + ending_before - starting, 0, reverse=True) + past_end - ending_before
    store_gate(dlog_decay_ptr, at, inside, dlog_decay)
    return dG, dv_next


@triton.jit
def initial_gradients(
    B0_ptr, u0_ptr, dB0_ptr, du0_ptr, carry_ptr, k_ptr, dcarry_ptr, place, dG, dv_first,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, P: tl.constexpr, HAS_REFLECTION: tl.constexpr,
):  # fmt: skip
    """Gradients of B0, u0 and the first carry, which write into G but not into what the first reflection reads."""
    rows, columns = tl.arange(0, N), tl.arange(0, P)
    pair, there = place[0], place[4] > 0
    start = entry(place, 0, there)
    B0, u0 = load_vector(B0_ptr, pair, True, rows, n), load_vector(u0_ptr, pair, True, columns, channels)
    if HAS_REFLECTION:
        dG -= load_vector(k_ptr, start, there, rows, n)[:, None] * dv_first[None, :]
    c = load_scalar(carry_ptr, start, there)
    dB0 = tl.sum(dG * u0[None, :], 1)
    tl.store(dB0_ptr + pair * n + rows, c * dB0, mask=rows < n)
    tl.store(du0_ptr + pair * channels + columns, c * tl.sum(dG * B0[:, None], 0), mask=columns < channels)
    tl.store(dcarry_ptr + start, tl.sum(dB0 * B0, 0).to(dcarry_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["length", "heads"])
def backward_kernel(
    u_ptr, B_ptr, C_ptr, log_decay_ptr, write_ptr, carry_ptr, k_ptr, reflection_ptr, D_ptr,
    B0_ptr, u0_ptr, bounds_ptr, order_ptr, kept_ptr, dy_ptr, dh_ptr,
    du_ptr, dB_ptr, dC_ptr, dlog_decay_ptr, dwrite_ptr, dcarry_ptr, dk_ptr, dreflection_ptr, dD_ptr,
    dh0_ptr, dB0_ptr, du0_ptr, length, heads,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
    HAS_CARRY: tl.constexpr, HAS_REFLECTION: tl.constexpr, HAS_D: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    head = pair % heads
    first, length, slot = find_sequence(bounds_ptr, pair // heads, length, CHUNK)
    rows, columns = tl.arange(0, N), tl.arange(0, P)
    chunks = tl.cdiv(length, CHUNK)
    dG = load_matrix(dh_ptr, pair, True, rows, columns, n, channels)
    dv_next = tl.zeros([P], tl.float32)
    for back in tl.range(0, chunks, disable_licm=True):
        chunk = chunks - 1 - back
        index, remaining = (slot + chunk) * heads + head, length - chunk * CHUNK
        dG, dv_next = chunk_gradients(
            (u_ptr, B_ptr, C_ptr, log_decay_ptr, write_ptr, carry_ptr, k_ptr, reflection_ptr, D_ptr),
            (B0_ptr, u0_ptr), kept_ptr, None, dy_ptr,
            (du_ptr, dB_ptr, dC_ptr, dlog_decay_ptr, dwrite_ptr, dcarry_ptr, dk_ptr, dreflection_ptr, dD_ptr),
            (pair, chunk, index, first + chunk * CHUNK, remaining, head, heads, order_ptr),
            dG, dv_next,
            n, channels, N, P, CHUNK, HAS_CARRY, HAS_REFLECTION, HAS_D, False, DOT, PRECISION, EXACT,
        )  # fmt: skip
    store_matrix(dh0_ptr, pair, rows, columns, n, channels, dG)
    if HAS_CARRY:
        initial_gradients(
            B0_ptr, u0_ptr, dB0_ptr, du0_ptr, carry_ptr, k_ptr, dcarry_ptr,
            (pair, 0, 0, first, length, head, heads, order_ptr), dG, dv_next, n, channels, N, P, HAS_REFLECTION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["length", "heads"])
def backward_chunk_kernel(
    u_ptr, B_ptr, C_ptr, log_decay_ptr, write_ptr, carry_ptr, k_ptr, reflection_ptr, D_ptr,
    B0_ptr, u0_ptr, bounds_ptr, order_ptr, rows_ptr, kept_ptr, T_ptr, dy_ptr, dG_ptr, dv_ptr, dh0_ptr,
    du_ptr, dB_ptr, dC_ptr, dlog_decay_ptr, dwrite_ptr, dcarry_ptr, dk_ptr, dreflection_ptr, dD_ptr,
    dB0_ptr, du0_ptr, length, heads,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
    HAS_CARRY: tl.constexpr, HAS_REFLECTION: tl.constexpr, HAS_D: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    slot, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, chunk, first, length = find_chunk(bounds_ptr, rows_ptr, slot, length, CHUNK)
    pair, index, remaining = row * heads + head, slot * heads + head, length - chunk * CHUNK
    if remaining <= 0:
        return
    place = (pair, chunk, index, first + chunk * CHUNK, remaining, head, heads, order_ptr)
    rows, columns = tl.arange(0, N), tl.arange(0, P)
    dv_next = tl.zeros([P], tl.float32)
    if HAS_CARRY and HAS_REFLECTION:
        dv_next = load_vector(dv_ptr, index + heads, remaining > CHUNK, columns, channels)
    dG = load_matrix(dG_ptr, index, True, rows, columns, n, channels)
    _, dv_first = chunk_gradients(
        (u_ptr, B_ptr, C_ptr, log_decay_ptr, write_ptr, carry_ptr, k_ptr, reflection_ptr, D_ptr),
        (B0_ptr, u0_ptr), kept_ptr, T_ptr, dy_ptr,
        (du_ptr, dB_ptr, dC_ptr, dlog_decay_ptr, dwrite_ptr, dcarry_ptr, dk_ptr, dreflection_ptr, dD_ptr),
        place, dG, dv_next,
        n, channels, N, P, CHUNK, HAS_CARRY, HAS_REFLECTION, HAS_D, True, DOT, PRECISION, EXACT,
    )  # fmt: skip
    if HAS_CARRY:  # noqa: SIM102, this is known when compiling, and the next is not
        if chunk == 0:
            dG0 = load_matrix(dh0_ptr, pair, True, rows, columns, n, channels)
            initial_gradients(
                B0_ptr, u0_ptr, dB0_ptr, du0_ptr, carry_ptr, k_ptr, dcarry_ptr, place, dG0, dv_first,
                n, channels, N, P, HAS_REFLECTION,
            )  # fmt: skip
