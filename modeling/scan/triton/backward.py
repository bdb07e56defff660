"""The kernels of the backward pass of the scan; `kernels` says what each does, `chunk` has the equations and names."""

from typing import NamedTuple

from .chunk import (  # isort: skip
    add_token_responses, chunk_inverse, chunk_place, chunk_tokens, decay_from_start, decay_matrix, decay_since, dot,
    entry, exact_dot, first_row, load_carried, load_directions, load_first, load_gates, load_inverse, load_logs,
    load_next, load_scalar, load_state, load_values, load_vector, load_weights, next_phase, program_block,
    program_sequence, slot_sequence, state_responses, store_directions, store_gates, store_state, store_values, tl,
    token_matrix, triton, weight_matrix, whole_block, zero_tile, zero_vector,
)  # fmt: skip


class Sums(NamedTuple):
    """
    What the terms of a chunk give to its gradients: of B, C and k; of w, g and r; and of products of decays, summed
    over the last step of the products (`ending`; `ending_before` where that is t - 1) and over the step before their
    first (`starting`), and of those that reach to the end of the chunk.
    """

    B: tl.tensor
    C: tl.tensor
    k: tl.tensor
    w: tl.tensor
    g: tl.tensor
    r: tl.tensor
    ending: tl.tensor
    ending_before: tl.tensor
    starting: tl.tensor
    past_end: tl.tensor


@triton.jit
def replaced(
    sums, B=None, C=None, k=None, w=None, g=None, r=None, ending=None, ending_before=None, starting=None, past_end=None
):
    """The sums with some of them replaced: compiled code does not know `_replace`."""
    return Sums(
        B=sums.B if B is None else B,
        C=sums.C if C is None else C,
        k=sums.k if k is None else k,
        w=sums.w if w is None else w,
        g=sums.g if g is None else g,
        r=sums.r if r is None else r,
        ending=sums.ending if ending is None else ending,
        ending_before=sums.ending_before if ending_before is None else ending_before,
        starting=sums.starting if starting is None else starting,
        past_end=sums.past_end if past_end is None else past_end,
    )


@triton.jit
def first_of(i, tile):
    """The first row of a tile."""
    return tl.sum(tl.where((i == 0)[:, None], tile, 0.0), 0)


@triton.jit
def last_row(i, values, row, settings: tl.constexpr):
    """A tile whose last row is the last of the values times `row`, and zero above."""
    return tl.where(i == settings.CHUNK - 1, values, 0.0)[:, None] * row[None, :]


@triton.jit
def projection_gradients(inputs, dy_ptr, place, dG, settings: tl.constexpr):
    """r times dq, from the y of the chunk and from the state after it; dv = T' (r dq)."""
    tokens = chunk_tokens(place, settings)
    logs = load_logs(inputs, tokens)
    r = load_gates(inputs.reflection, tokens)
    k, C = load_directions(inputs.k, tokens, settings), load_directions(inputs.C, tokens, settings)
    dy = load_values(dy_ptr, tokens, settings)
    dq = -decay_since(logs.a_last, logs.a)[:, None] * dot(k, dG, settings)
    CkE = dot(C, tl.trans(k), settings) * decay_matrix(logs, tokens.i, 0)
    return r[:, None] * dot(-tl.trans(CkE), dy, settings, acc=dq)


@triton.jit
def state_gradient(inputs, dy_ptr, place, dG, dv, settings: tl.constexpr):
    """dG at the start of a chunk from dG at its end."""
    tokens = chunk_tokens(place, settings)
    logs = load_logs(inputs, tokens)
    C, dy = load_directions(inputs.C, tokens, settings), load_values(dy_ptr, tokens, settings)
    dG *= decay_from_start(logs.a_last)
    dG = dot(tl.trans(C), decay_from_start(logs.a)[:, None] * dy.to(tl.float32), settings, acc=dG)
    if inputs.k is not None:
        k = load_directions(inputs.k, tokens, settings)
        dG = dot(tl.trans(k), decay_from_start(logs.a_before)[:, None] * dv, settings, acc=dG)
    return dG


@triton.jit(do_not_specialize=["length", "heads"])
def backward_state_kernel(
    inputs, sequences, T_ptr, dy_ptr, dh_ptr, dG_ptr, dv_ptr, initial_gradients, length, heads, settings: tl.constexpr
):
    """Writes dG at the end of every chunk, dv of every chunk's first token, and dh0."""
    sequence = program_sequence(sequences, length, heads, settings)
    i, block = tl.arange(0, settings.CHUNK), program_block(settings)
    chunks = tl.cdiv(sequence.length, settings.CHUNK)
    dG = load_state(dh_ptr, sequence.pair, block, settings)
    for back in tl.range(0, chunks, disable_licm=True):
        place = chunk_place(sequence, chunks - 1 - back, settings, block)
        store_state(dG_ptr, place.index, block, settings, dG)
        rdq = zero_tile(settings.CHUNK, settings.P)
        dv = rdq
        if inputs.k is not None:
            place = next_phase(place)
            if place.remaining > 0:
                rdq = projection_gradients(inputs, dy_ptr, place, dG, settings)
            place = next_phase(place)
            dv = exact_dot(tl.trans(load_inverse(T_ptr, place.index, settings)), rdq, settings)
            dv_first, columns = first_of(i, dv), block.columns
            tl.store(dv_ptr + place.index * settings.channels + columns, dv_first, mask=columns < settings.channels)
        place = next_phase(place)
        dG = state_gradient(inputs, dy_ptr, place, dG, dv, settings)
    store_state(initial_gradients.h, sequence.pair, block, settings, dG)


@triton.jit
def projections_and_gradients(inputs, initial, kept_ptr, T_ptr, dy_ptr, place, dG, settings: tl.constexpr):
    """q and dv."""
    v = zero_tile(settings.CHUNK, settings.P)
    rdq = v
    T = zero_tile(settings.CHUNK, settings.CHUNK)
    place = next_phase(place)
    if place.remaining > 0:
        v = state_responses(inputs, initial, place, load_state(kept_ptr, place.index, place.block, settings), settings)
    place = next_phase(place)
    if place.remaining > 0:
        v = add_token_responses(inputs, place, v, settings)
    place = next_phase(place)
    if place.remaining > 0:
        T = chunk_inverse(inputs, T_ptr, place, settings)
    q = exact_dot(T, v, settings)
    place = next_phase(place)
    if place.remaining > 0:
        rdq = projection_gradients(inputs, dy_ptr, place, dG, settings)
    place = next_phase(place)
    if T_ptr is not None:
        T = load_inverse(T_ptr, place.index, settings)
    return q, exact_dot(tl.trans(T), rdq, settings)


@triton.jit
def value_gradients(inputs, place, dG, dv, settings: tl.constexpr):
    """du but for the terms of y."""
    tokens = chunk_tokens(place, settings)
    logs, weights = load_logs(inputs, tokens), load_weights(inputs, place, tokens, settings)
    B = load_directions(inputs.B, tokens, settings)
    du = (decay_since(logs.a_last, logs.a) * weights.g)[:, None] * dot(B, dG, settings)
    if inputs.k is not None:
        k = load_directions(inputs.k, tokens, settings)
        du = dot(tl.trans(token_matrix(k, B, logs, weights, tokens.i, 1, settings)), dv, settings, acc=du)
    return du


@triton.jit
def write_value_gradients(inputs, gradients, dy_ptr, place, du, dv_next, settings: tl.constexpr):
    """Adds the terms of y and writes du and dD."""
    tokens = chunk_tokens(place, settings)
    logs, weights = load_logs(inputs, tokens), load_weights(inputs, place, tokens, settings)
    B, C = load_directions(inputs.B, tokens, settings), load_directions(inputs.C, tokens, settings)
    W = token_matrix(C, B, logs, weights, tokens.i, 0, settings)
    dy = load_values(dy_ptr, tokens, settings)
    du = dot(tl.trans(W), dy, settings, acc=du)
    if inputs.D is not None:
        u = load_values(inputs.u, tokens, settings).to(tl.float32)
        du += load_scalar(inputs.D, place.head, True) * dy.to(tl.float32)
        tl.store(gradients.D + place.index, tl.sum(u * dy.to(tl.float32)))
    if inputs.carry is not None and inputs.k is not None:
        k_next, c_next = load_next(inputs, place, settings)
        du -= last_row(tokens.i, c_next * tl.sum(B.to(tl.float32) * k_next[None, :], 1), dv_next, settings)
    store_values(gradients.u, tokens, settings, du)


@triton.jit
def end_terms(inputs, place, dG, sums, settings: tl.constexpr):
    """What dG at the end of a chunk gives to dB, to dw and dg, and to the decays."""
    tokens = chunk_tokens(place, settings)
    logs, weights = load_logs(inputs, tokens), load_weights(inputs, place, tokens, settings)
    u = load_values(inputs.u, tokens, settings)
    dB = decay_since(logs.a_last, logs.a)[:, None] * dot(u, tl.trans(dG), settings)
    dw = tl.sum(load_directions(inputs.B, tokens, settings).to(tl.float32) * dB, 1)
    starting = weights.g * dw
    return replaced(sums, B=weights.g[:, None] * dB, w=dw, g=dw, starting=starting, past_end=tl.sum(starting, 0))


@triton.jit
def reflected_end_terms(inputs, place, dG, q, sums, settings: tl.constexpr):
    """What it gives to dk and dr, and to the decays of q."""
    tokens = chunk_tokens(place, settings)
    logs = load_logs(inputs, tokens)
    r = load_gates(inputs.reflection, tokens)
    dk = -decay_since(logs.a_last, logs.a)[:, None] * dot(q, tl.trans(dG), settings)
    dr = tl.sum(load_directions(inputs.k, tokens, settings).to(tl.float32) * dk, 1)
    return replaced(
        sums, k=r[:, None] * dk, r=dr, starting=sums.starting + r * dr, past_end=sums.past_end + tl.sum(r * dr, 0)
    )


@triton.jit
def start_terms(inputs, kept_ptr, dy_ptr, place, dG, sums, settings: tl.constexpr):
    """What G at the start gives to dC and to the decays of y and of G at the end."""
    tokens = chunk_tokens(place, settings)
    logs = load_logs(inputs, tokens)
    G = load_state(kept_ptr, place.index, place.block, settings)
    dy = load_values(dy_ptr, tokens, settings)
    dC = decay_from_start(logs.a)[:, None] * dot(dy, tl.trans(G), settings)
    ending = tl.sum(load_directions(inputs.C, tokens, settings).to(tl.float32) * dC, 1)
    past_end = sums.past_end + decay_from_start(logs.a_last) * tl.sum(G * dG)
    return replaced(sums, C=dC, ending=ending, past_end=past_end)


@triton.jit
def reflected_start_terms(inputs, kept_ptr, place, dv, sums, settings: tl.constexpr):
    """What it gives to dk and to the decays of v."""
    tokens = chunk_tokens(place, settings)
    logs = load_logs(inputs, tokens)
    G = load_state(kept_ptr, place.index, place.block, settings)
    dk = decay_from_start(logs.a_before)[:, None] * dot(dv, tl.trans(G), settings)
    ending_before = tl.sum(load_directions(inputs.k, tokens, settings).to(tl.float32) * dk, 1)
    return replaced(sums, k=sums.k + dk, ending_before=ending_before)


@triton.jit
def boundary_terms(inputs, kept_ptr, dy_ptr, place, dG, q, dv, settings: tl.constexpr):
    """What dG at the end and G at the start of a chunk give."""
    tile, gates = zero_tile(settings.CHUNK, settings.N), zero_vector(settings.CHUNK)
    sums = Sums(tile, tile, tile, gates, gates, gates, gates, gates, gates, 0.0)
    place = next_phase(place)
    if place.remaining > 0:
        sums = end_terms(inputs, place, dG, sums, settings)
    if inputs.k is not None:
        place = next_phase(place)
        if place.remaining > 0:
            sums = reflected_end_terms(inputs, place, dG, q, sums, settings)
    place = next_phase(place)
    if place.remaining > 0:
        sums = start_terms(inputs, kept_ptr, dy_ptr, place, dG, sums, settings)
    if inputs.k is not None:
        place = next_phase(place)
        if place.remaining > 0:
            sums = reflected_start_terms(inputs, kept_ptr, place, dv, sums, settings)
    return sums


@triton.jit
def pair_gradients(a, b, dab, weights, settings: tl.constexpr):
    """
    For sums over decay[t,s] weights[t,s] (a_t.b_s) x_s, with dab[t,s] the decay times the product of x_s and the sum's
    gradient at t: the gradients of a_t.b_s and of the weights, and of the logarithm of the decay summed over s and
    over t.
    """
    dweights = dab * dot(a, tl.trans(b), settings)
    dlogs = dweights * weights
    return dab * weights, dweights, tl.sum(dlogs, 1), tl.sum(dlogs, 0)


@triton.jit
def load_strengths(inputs, tokens, settings: tl.constexpr):
    """r_s for every t."""
    return tl.broadcast_to(load_gates(inputs.reflection, tokens)[None, :], settings.CHUNK, settings.CHUNK)


@triton.jit
def write_terms(inputs, tokens, weights, a_ptr, dab, da, sums, LAG: tl.constexpr, settings: tl.constexpr):
    """Adds the terms of a_t.B_s to da and to the sums, but for those of decays, which it gives over s and over t."""
    a, B = load_directions(a_ptr, tokens, settings), load_directions(inputs.B, tokens, settings)
    dab, dweights, of_t, of_s = pair_gradients(a, B, dab, weight_matrix(weights, tokens.i, LAG), settings)
    da = dot(dab, B, settings, acc=da)
    dB = dot(tl.trans(dab), a, settings, acc=sums.B)
    dw = sums.w + tl.sum(dweights, 0)
    older = tokens.i[:, None] > tokens.i[None, :] + LAG
    dg = sums.g + tl.sum(tl.where(older, dweights, 0.0), 0)
    return da, replaced(sums, B=dB, w=dw, g=dg), of_t, of_s


@triton.jit
def readout_terms(inputs, dy_ptr, place, sums, settings: tl.constexpr):
    """Adds the terms of C_t.B_s."""
    tokens = chunk_tokens(place, settings)
    logs, weights = load_logs(inputs, tokens), load_weights(inputs, place, tokens, settings)
    u, dy = load_values(inputs.u, tokens, settings), load_values(dy_ptr, tokens, settings)
    dyu = dot(dy, tl.trans(u), settings) * decay_matrix(logs, tokens.i, 0)
    dC, sums, of_t, of_s = write_terms(inputs, tokens, weights, inputs.C, dyu, sums.C, sums, 0, settings)
    return replaced(sums, C=dC, ending=sums.ending + of_t, starting=sums.starting + of_s)


@triton.jit
def reflected_readout_terms(inputs, dy_ptr, place, q, sums, settings: tl.constexpr):
    """Adds the terms of C_t.k_s."""
    tokens = chunk_tokens(place, settings)
    logs = load_logs(inputs, tokens)
    dy = load_values(dy_ptr, tokens, settings)
    dyq = -dot(dy, tl.trans(q), settings) * decay_matrix(logs, tokens.i, 0)
    C, k = load_directions(inputs.C, tokens, settings), load_directions(inputs.k, tokens, settings)
    dCk, dweights, of_t, of_s = pair_gradients(C, k, dyq, load_strengths(inputs, tokens, settings), settings)
    dC = dot(dCk, k, settings, acc=sums.C)
    dk = dot(tl.trans(dCk), C, settings, acc=sums.k)
    dr = sums.r + tl.sum(dweights, 0)
    return replaced(sums, C=dC, k=dk, r=dr, ending=sums.ending + of_t, starting=sums.starting + of_s)


@triton.jit
def reflected_projection_terms(inputs, place, q, dv, sums, settings: tl.constexpr):
    """Adds the terms of k_t.k_s."""
    tokens = chunk_tokens(place, settings)
    logs = load_logs(inputs, tokens)
    dvq = -dot(dv, tl.trans(q), settings) * decay_matrix(logs, tokens.i, 1)
    k = load_directions(inputs.k, tokens, settings)
    dkk, dweights, of_t, of_s = pair_gradients(k, k, dvq, load_strengths(inputs, tokens, settings), settings)
    dk = dot(dkk + tl.trans(dkk), k, settings, acc=sums.k)
    dr = sums.r + tl.sum(dweights, 0)
    return replaced(sums, k=dk, r=dr, ending_before=sums.ending_before + of_t, starting=sums.starting + of_s)


@triton.jit
def projection_terms(inputs, place, dv, sums, settings: tl.constexpr):
    """Adds the terms of k_t.B_s."""
    tokens = chunk_tokens(place, settings)
    logs, weights = load_logs(inputs, tokens), load_weights(inputs, place, tokens, settings)
    dvu = dot(dv, tl.trans(load_values(inputs.u, tokens, settings)), settings) * decay_matrix(logs, tokens.i, 1)
    dk, sums, of_t, of_s = write_terms(inputs, tokens, weights, inputs.k, dvu, sums.k, sums, 1, settings)
    return replaced(sums, k=dk, ending_before=sums.ending_before + of_t, starting=sums.starting + of_s)


@triton.jit
def carry_terms(inputs, initial, place, dv, dv_next, sums, settings: tl.constexpr):
    """Adds what the first token after the chunk takes back of its last one, and its first one of the token before."""
    tokens = chunk_tokens(place, settings)
    k_next, c_next = load_next(inputs, place, settings)
    Bk_next = tl.sum(load_directions(inputs.B, tokens, settings).to(tl.float32) * k_next[None, :], 1)
    udv_next = tl.sum(load_values(inputs.u, tokens, settings).to(tl.float32) * dv_next[None, :], 1)
    dB = sums.B - last_row(tokens.i, c_next * udv_next, k_next, settings)
    dg = sums.g - tl.where(tokens.i == settings.CHUNK - 1, Bk_next * udv_next, 0.0)
    B_before, u_before, c = load_carried(inputs, initial, place, settings)
    dk = sums.k - first_row(tokens.i, c * tl.sum(dv * u_before[None, :], 1), B_before)
    return replaced(sums, B=dB, k=dk, g=dg)


@triton.jit
def chunk_gradients(inputs, initial, gradients, kept_ptr, T_ptr, dy_ptr, place, dG, dv_next, settings: tl.constexpr):
    """
    Writes the gradients of all inputs of a chunk, given dG at its end and dv of the first token after it. Returns dG at
    its start and dv of its own first token.
    """
    i = tl.arange(0, settings.CHUNK)
    q, dv = dG, dG
    if inputs.k is not None:
        q, dv = projections_and_gradients(inputs, initial, kept_ptr, T_ptr, dy_ptr, place, dG, settings)
    du = zero_tile(settings.CHUNK, settings.P)
    place = next_phase(place)
    if place.remaining > 0:
        du = value_gradients(inputs, place, dG, dv, settings)
    place = next_phase(place)
    if place.remaining > 0:
        write_value_gradients(inputs, gradients, dy_ptr, place, du, dv_next, settings)
    sums = boundary_terms(inputs, kept_ptr, dy_ptr, place, dG, q, dv, settings)
    place = next_phase(place)
    if place.remaining > 0:
        dG = state_gradient(inputs, dy_ptr, place, dG, dv, settings)
    place = next_phase(place)
    if place.remaining > 0:
        sums = readout_terms(inputs, dy_ptr, place, sums, settings)
    if inputs.k is not None:
        place = next_phase(place)
        if place.remaining > 0:
            sums = reflected_readout_terms(inputs, dy_ptr, place, q, sums, settings)
    place = next_phase(place)
    store_directions(gradients.C, chunk_tokens(place, settings), settings, sums.C)
    if inputs.k is not None:
        place = next_phase(place)
        if place.remaining > 0:
            sums = reflected_projection_terms(inputs, place, q, dv, sums, settings)
        place = next_phase(place)
        if place.remaining > 0:
            sums = projection_terms(inputs, place, dv, sums, settings)
        if inputs.carry is not None:
            place = next_phase(place)
            if place.remaining > 0:
                sums = carry_terms(inputs, initial, place, dv, dv_next, sums, settings)
        place = next_phase(place)
        dv_next = first_of(i, dv)
        tokens = chunk_tokens(place, settings)
        store_directions(gradients.k, tokens, settings, sums.k)
        store_gates(gradients.reflection, tokens, sums.r)
    tokens = chunk_tokens(place, settings)
    store_directions(gradients.B, tokens, settings, sums.B)
    store_gates(gradients.write, tokens, sums.w)
    if inputs.carry is not None:
        store_gates(gradients.carry, chunk_tokens(place, settings, 1), sums.g)
    steps = sums.ending + sums.ending_before - sums.starting
    dlog_decay = tl.cumsum(steps, 0, reverse=True) + sums.past_end - sums.ending_before
    store_gates(gradients.log_decay, tokens, dlog_decay)
    return dG, dv_next


@triton.jit
def write_initial_gradients(inputs, initial, gradients, initial_gradients, place, dG, dv_first, settings: tl.constexpr):
    """Gradients of B0, u0 and the first carry, which write into G but not into what the first reflection reads."""
    rows, columns = place.block
    pair, there = place.pair, place.remaining > 0
    start = entry(place, 0, there)
    B0, u0 = load_first(initial, pair, place.block, settings)
    if inputs.k is not None:
        dG -= load_vector(inputs.k, start, there, rows, settings.n)[:, None] * dv_first[None, :]
    c = load_scalar(inputs.carry, start, there)
    dB0 = tl.sum(dG * u0[None, :], 1)
    tl.store(initial_gradients.B + pair * settings.n + rows, c * dB0, mask=rows < settings.n)
    du0_ptr = initial_gradients.u + pair * settings.channels
    tl.store(du0_ptr + columns, c * tl.sum(dG * B0[:, None], 0), mask=columns < settings.channels)
    dcarry_ptr = gradients.carry + start
    tl.store(dcarry_ptr, tl.sum(dB0 * B0, 0).to(gradients.carry.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["length", "heads"])
def backward_kernel(
    inputs, initial, sequences, kept_ptr, dy_ptr, dh_ptr, gradients, initial_gradients, length, heads,
    settings: tl.constexpr,
):  # fmt: skip
    sequence = program_sequence(sequences, length, heads, settings)
    block = whole_block(settings)
    chunks = tl.cdiv(sequence.length, settings.CHUNK)
    dG = load_state(dh_ptr, sequence.pair, block, settings)
    dv_next = zero_vector(settings.P)
    for back in tl.range(0, chunks, disable_licm=True):
        place = chunk_place(sequence, chunks - 1 - back, settings, block)
        dG, dv_next = chunk_gradients(inputs, initial, gradients, kept_ptr, None, dy_ptr, place, dG, dv_next, settings)
    store_state(initial_gradients.h, sequence.pair, block, settings, dG)
    if inputs.carry is not None:
        start = chunk_place(sequence, 0, settings, block)
        write_initial_gradients(inputs, initial, gradients, initial_gradients, start, dG, dv_next, settings)


@triton.jit(do_not_specialize=["length", "heads"])
def backward_chunk_kernel(
    inputs, initial, sequences, rows_ptr, kept_ptr, T_ptr, dy_ptr, dG_ptr, dv_ptr, gradients, initial_gradients,
    length, heads, settings: tl.constexpr,
):  # fmt: skip
    slot, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence, chunk = slot_sequence(sequences, rows_ptr, slot, head, length, heads, settings)
    index = slot * heads + head
    if sequence.length - chunk * settings.CHUNK <= 0:
        return
    place = chunk_place(sequence, chunk, settings, index=index)
    dv_next = zero_vector(settings.P)
    if inputs.carry is not None and inputs.k is not None:
        columns = place.block.columns
        dv_next = load_vector(dv_ptr, index + heads, place.remaining > settings.CHUNK, columns, settings.channels)
    dG = load_state(dG_ptr, place.index, place.block, settings)
    _, dv_first = chunk_gradients(inputs, initial, gradients, kept_ptr, T_ptr, dy_ptr, place, dG, dv_next, settings)
    if inputs.carry is not None:  # noqa: SIM102, this is known when compiling, and the next is not
        if place.chunk == 0:
            dG0 = load_state(initial_gradients.h, place.pair, place.block, settings)
            write_initial_gradients(inputs, initial, gradients, initial_gradients, place, dG0, dv_first, settings)
