"""The kernels of the forward pass of the scan; `kernels` says what each does, `chunk` has the equations and names."""

from .chunk import (  # isort: skip
    add_token_responses, chunk_inverse, chunk_place, chunk_tokens, decay_from_start, decay_matrix, decay_since, dot,
    entry, exact_dot, load_directions, load_first, load_gates, load_logs, load_scalar, load_state, load_values,
    load_vector, load_weights, next_phase, program_block, program_sequence, slot_sequence, state_responses,
    store_inverse, store_state, store_values, tl, token_matrix, triton, zero_tile,
)  # fmt: skip


@triton.jit(do_not_specialize=["heads"])
def step_kernel(inputs, initial, y_ptr, h_ptr, heads, settings: tl.constexpr):
    """The recurrence itself, for a length of 1."""
    pair = tl.program_id(0).to(tl.int64)
    block = program_block(settings)
    rows, columns = block
    h = load_state(initial.h, pair, block, settings)
    u = load_vector(inputs.u, pair, True, columns, settings.channels)
    B = load_vector(inputs.B, pair, True, rows, settings.n)
    decay = tl.exp(load_scalar(inputs.log_decay, pair, True))
    new = decay * h + load_scalar(inputs.write, pair, True) * B[:, None] * u[None, :]
    if inputs.carry is not None:
        B0, u0 = load_first(initial, pair, block, settings)
        new += decay * load_scalar(inputs.carry, pair, True) * B0[:, None] * u0[None, :]
    if inputs.k is not None:
        k = load_vector(inputs.k, pair, True, rows, settings.n)
        q = tl.sum(k[:, None] * h, 0)
        new -= load_scalar(inputs.reflection, pair, True) * k[:, None] * q[None, :]
    y = tl.sum(load_vector(inputs.C, pair, True, rows, settings.n)[:, None] * new, 0)
    if inputs.D is not None:
        y += load_scalar(inputs.D, pair % heads, True) * u
    tl.store(y_ptr + pair * settings.channels + columns, y.to(y_ptr.dtype.element_ty), mask=columns < settings.channels)
    store_state(h_ptr, pair, block, settings, new)


@triton.jit(do_not_specialize=["length", "heads"])
def solve_kernel(inputs, sequences, rows_ptr, T_ptr, length, heads, settings: tl.constexpr):
    slot, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence, chunk = slot_sequence(sequences, rows_ptr, slot, head, length, heads, settings)
    place = chunk_place(sequence, chunk, settings, index=slot * heads + head)
    store_inverse(T_ptr, place.index, settings, chunk_inverse(inputs, None, place, settings))


@triton.jit
def state_readout(inputs, place, G, settings: tl.constexpr):
    """What G, from which a chunk starts, gives to y."""
    tokens = chunk_tokens(place, settings)
    logs = load_logs(inputs, tokens)
    return decay_from_start(logs.a)[:, None] * dot(load_directions(inputs.C, tokens, settings), G, settings)


@triton.jit
def updated_state(inputs, place, G, q, settings: tl.constexpr):
    """G at the end of a chunk from G at its start."""
    tokens = chunk_tokens(place, settings)
    logs, weights = load_logs(inputs, tokens), load_weights(inputs, place, tokens, settings)
    to_end = decay_since(logs.a_last, logs.a)
    u, B = load_values(inputs.u, tokens, settings), load_directions(inputs.B, tokens, settings)
    G *= decay_from_start(logs.a_last)
    # Channels are split among warps, so that scaling u and q takes fewer registers than scaling B and k.
    G = dot(tl.trans(B), (to_end * weights.g)[:, None] * u.to(tl.float32), settings, acc=G)
    if inputs.k is not None:
        k = load_directions(inputs.k, tokens, settings)
        r = load_gates(inputs.reflection, tokens)
        G = dot(tl.trans(k), (to_end * -r)[:, None] * q, settings, acc=G)
    return G


@triton.jit
def add_token_readout(inputs, place, y, settings: tl.constexpr):
    """Adds to y what the chunk's own tokens write."""
    tokens = chunk_tokens(place, settings)
    logs, weights = load_logs(inputs, tokens), load_weights(inputs, place, tokens, settings)
    C, B = load_directions(inputs.C, tokens, settings), load_directions(inputs.B, tokens, settings)
    u = load_values(inputs.u, tokens, settings)
    y = dot(token_matrix(C, B, logs, weights, tokens.i, 0, settings), u, settings, acc=y)
    if inputs.D is not None:
        y += load_scalar(inputs.D, place.head, True) * u.to(tl.float32)
    return y


@triton.jit
def write_readout(inputs, y_ptr, place, y, q, settings: tl.constexpr):
    """Takes from y what the reflections take away, and writes it."""
    tokens = chunk_tokens(place, settings)
    if inputs.k is not None:
        logs = load_logs(inputs, tokens)
        C, k = load_directions(inputs.C, tokens, settings), load_directions(inputs.k, tokens, settings)
        r = load_gates(inputs.reflection, tokens)
        CkE = dot(C, tl.trans(k), settings) * decay_matrix(logs, tokens.i, 0)
        y = dot(CkE * -r[None, :], q, settings, acc=y)
    store_values(y_ptr, tokens, settings, y)


@triton.jit(do_not_specialize=["length", "heads"])
def forward_kernel(inputs, initial, sequences, T_ptr, y_ptr, h_ptr, kept_ptr, length, heads, settings: tl.constexpr):
    sequence = program_sequence(sequences, length, heads, settings)
    block = program_block(settings)
    G = load_state(initial.h, sequence.pair, block, settings)
    if inputs.carry is not None:
        B0, u0 = load_first(initial, sequence.pair, block, settings)
        start = entry(chunk_place(sequence, 0, settings, block), 0, sequence.length > 0)
        G += load_scalar(inputs.carry, start, sequence.length > 0) * B0[:, None] * u0[None, :]
    if sequence.length > 0:
        store_state(kept_ptr, sequence.slot * heads + sequence.head, block, settings, G)
    for chunk in tl.range(0, tl.cdiv(sequence.length, settings.CHUNK), disable_licm=True):
        place = chunk_place(sequence, chunk, settings, block)
        q = zero_tile(settings.CHUNK, settings.P)
        y = q
        if inputs.k is not None:
            v = state_responses(inputs, initial, place, G, settings)
            place = next_phase(place)
            if place.remaining > 0:
                v = add_token_responses(inputs, place, v, settings)
            place = next_phase(place)
            if place.remaining > 0:
                q = exact_dot(chunk_inverse(inputs, T_ptr, place, settings), v, settings)
        place = next_phase(place)
        if place.remaining > 0:
            y = state_readout(inputs, place, G, settings)
        place = next_phase(place)
        G = updated_state(inputs, place, G, q, settings)
        # Written here rather than when the next chunk starts, G is finished before the products that follow.
        if place.remaining > settings.CHUNK:
            store_state(kept_ptr, place.index + heads, block, settings, G)
        # The readout is last because Triton lays out all matrix products after the last one's result: this one's is
        # split among warps by channels. After the state's, which may be taller than wide, each warp would hold all.
        place = next_phase(place)
        if place.remaining > 0:
            y = add_token_readout(inputs, place, y, settings)
        place = next_phase(place)
        if place.remaining > 0:
            write_readout(inputs, y_ptr, place, y, q, settings)
    store_state(h_ptr, sequence.pair, block, settings, G)
