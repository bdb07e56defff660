"""The kernels of the forward pass of the scan; `kernels` says what each does."""

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
    load_gate,
    load_gates,
    load_matrix,
    load_scalar,
    load_tile,
    load_vector,
    next_phase,
    state_responses,
    store_inverse,
    store_matrix,
    store_tile,
    sum_logs,
    tl,
    triton,
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


@triton.jit(do_not_specialize=["length", "heads"])
def solve_kernel(
    log_decay_ptr, k_ptr, reflection_ptr, bounds_ptr, order_ptr, rows_ptr, T_ptr, length, heads,
    n: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    slot, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, chunk, first, length = find_chunk(bounds_ptr, rows_ptr, slot, length, CHUNK)
    index, remaining = slot * heads + head, length - chunk * CHUNK
    place = (row * heads + head, chunk, index, first + chunk * CHUNK, remaining, head, heads, order_ptr)
    inputs = (None, None, None, log_decay_ptr, None, None, k_ptr, reflection_ptr, None)
    T = chunk_inverse(inputs, None, place, n, N, CHUNK, False, DOT, PRECISION, EXACT)
    store_inverse(T_ptr, index, tl.arange(0, CHUNK), CHUNK, T)


@triton.jit
def projections(
    inputs, T_ptr, place, v, n: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
    SOLVED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """q."""
    T = chunk_inverse(inputs, T_ptr, place, n, N, CHUNK, SOLVED, DOT, PRECISION, EXACT)
    return dot(T, v, tl.float32, EXACT)


@triton.jit
def state_readout(
    inputs, place, G,
    n: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What G, from which a chunk starts, gives to y."""
    _, _, C_ptr, log_decay_ptr, _, _, _, _, _ = inputs
    i, rows = tl.arange(0, CHUNK), tl.arange(0, N)
    inside = i < place[4]
    at = entries(place, i, inside)
    a, _, _ = sum_logs(load_gate(log_decay_ptr, at, inside))
    return decay_from_start(a)[:, None] * dot(load_tile(C_ptr, at, inside, rows, n), G, DOT, PRECISION)


@triton.jit
def updated_state(
    inputs, place, G, q, columns,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
    HAS_CARRY: tl.constexpr, HAS_REFLECTION: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """G at the end of a chunk from G at its start."""
    u_ptr, B_ptr, _, _, _, _, k_ptr, reflection_ptr, _ = inputs
    i, rows = tl.arange(0, CHUNK), tl.arange(0, N)
    inside = i < place[4]
    at = entries(place, i, inside)
    a, _, a_last, _, g = load_gates(inputs, place, i, HAS_CARRY)
    to_end = decay_since(a_last, a)
    u = load_tile(u_ptr, at, inside, columns, channels)
    B = load_tile(B_ptr, at, inside, rows, n)
    G *= decay_from_start(a_last)
    # Channels are split among warps, so that scaling u and q takes fewer registers than scaling B and k.
    G = dot(tl.trans(B), (to_end * g)[:, None] * u.to(tl.float32), DOT, PRECISION, acc=G)
    if HAS_REFLECTION:
        k = load_tile(k_ptr, at, inside, rows, n)
        r = load_gate(reflection_ptr, at, inside)
        G = dot(tl.trans(k), (to_end * -r)[:, None] * q, DOT, PRECISION, acc=G)
    return G


@triton.jit
def add_token_readout(
    inputs, place, y, columns,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
    HAS_CARRY: tl.constexpr, HAS_D: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds to y what the chunk's own tokens write."""
    u_ptr, B_ptr, C_ptr, _, _, _, _, _, D_ptr = inputs
    i, rows = tl.arange(0, CHUNK), tl.arange(0, N)
    inside = i < place[4]
    at = entries(place, i, inside)
    a, _, _, w, g = load_gates(inputs, place, i, HAS_CARRY)
    C = load_tile(C_ptr, at, inside, rows, n)
    B = load_tile(B_ptr, at, inside, rows, n)
    u = load_tile(u_ptr, at, inside, columns, channels)
    W = dot(C, tl.trans(B), DOT, PRECISION) * decay_matrix(a, a, i, 0) * weight_matrix(w, g, i, 0)
    y = dot(W, u, DOT, PRECISION, acc=y)
    if HAS_D:
        y += load_scalar(D_ptr, place[5], True) * u.to(tl.float32)
    return y


@triton.jit
def write_readout(
    inputs, y_ptr, place, y, q, columns,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
    HAS_REFLECTION: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes from y what the reflections take away, and writes it."""
    _, _, C_ptr, log_decay_ptr, _, _, k_ptr, reflection_ptr, _ = inputs
    i, rows = tl.arange(0, CHUNK), tl.arange(0, N)
    inside = i < place[4]
    at = entries(place, i, inside)
    if HAS_REFLECTION:
        a, _, _ = sum_logs(load_gate(log_decay_ptr, at, inside))
        C = load_tile(C_ptr, at, inside, rows, n)
        k = load_tile(k_ptr, at, inside, rows, n)
        r = load_gate(reflection_ptr, at, inside)
        CkE = dot(C, tl.trans(k), DOT, PRECISION) * decay_matrix(a, a, i, 0)
        y = dot(CkE * -r[None, :], q, DOT, PRECISION, acc=y)
    store_tile(y_ptr, at, inside, columns, channels, y)


@triton.jit(do_not_specialize=["length", "heads"])
def forward_kernel(
    u_ptr, B_ptr, C_ptr, log_decay_ptr, write_ptr, carry_ptr, k_ptr, reflection_ptr, D_ptr,
    h0_ptr, B0_ptr, u0_ptr, bounds_ptr, order_ptr, T_ptr, y_ptr, h_ptr, kept_ptr, length, heads,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
    HAS_CARRY: tl.constexpr, HAS_REFLECTION: tl.constexpr, HAS_D: tl.constexpr, SOLVED: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    head = pair % heads
    first, length, slot = find_sequence(bounds_ptr, pair // heads, length, CHUNK)
    rows, columns = tl.arange(0, N), tl.program_id(1) * P + tl.arange(0, P)
    inputs = (u_ptr, B_ptr, C_ptr, log_decay_ptr, write_ptr, carry_ptr, k_ptr, reflection_ptr, D_ptr)
    G = load_matrix(h0_ptr, pair, True, rows, columns, n, channels)
    if HAS_CARRY:
        B0, u0 = load_vector(B0_ptr, pair, True, rows, n), load_vector(u0_ptr, pair, True, columns, channels)
        start = entry((pair, 0, 0, first, length, head, heads, order_ptr), 0, length > 0)
        G += load_scalar(carry_ptr, start, length > 0) * B0[:, None] * u0[None, :]
    if length > 0:
        store_matrix(kept_ptr, slot * heads + head, rows, columns, n, channels, G)
    for chunk in tl.range(0, tl.cdiv(length, CHUNK), disable_licm=True):
        index, remaining = (slot + chunk) * heads + head, length - chunk * CHUNK
        place = (pair, chunk, index, first + chunk * CHUNK, remaining, head, heads, order_ptr)
        q, y = tl.zeros([CHUNK, P], tl.float32), tl.zeros([CHUNK, P], tl.float32)
        if HAS_REFLECTION:
            v = state_responses(
                inputs, (B0_ptr, u0_ptr), place, G, columns, n, channels, N, CHUNK, HAS_CARRY, DOT, PRECISION
            )
            place = next_phase(place)
            if place[4] > 0:
                v = add_token_responses(inputs, place, v, columns, n, channels, N, CHUNK, HAS_CARRY, DOT, PRECISION)
            place = next_phase(place)
            if place[4] > 0:
                q = projections(inputs, T_ptr, place, v, n, N, CHUNK, SOLVED, DOT, PRECISION, EXACT)
        place = next_phase(place)
        if place[4] > 0:
            y = state_readout(inputs, place, G, n, N, CHUNK, DOT, PRECISION)
        place = next_phase(place)
        G = updated_state(
            inputs, place, G, q, columns, n, channels, N, CHUNK, HAS_CARRY, HAS_REFLECTION, DOT, PRECISION
        )
        # Written here rather than when the next chunk starts, G is finished before the products that follow.
        if place[4] > CHUNK:
            store_matrix(kept_ptr, index + heads, rows, columns, n, channels, G)
        # The readout is last because Triton lays out all matrix products after the last one's result: this one's is
        # split among warps by channels. After the state's, which may be taller than wide, each warp would hold all.
        place = next_phase(place)
        if place[4] > 0:
            y = add_token_readout(inputs, place, y, columns, n, channels, N, CHUNK, HAS_CARRY, HAS_D, DOT, PRECISION)
        place = next_phase(place)
        if place[4] > 0:
            write_readout(inputs, y_ptr, place, y, q, columns, n, channels, N, CHUNK, HAS_REFLECTION, DOT, PRECISION)
    store_matrix(h_ptr, pair, rows, columns, n, channels, G)
