r"""
One chunk of the scan in Triton: what the kernels of `forward` and `backward` share.

With G_t = h_t + c_{t+1} B_t u_t', the state that has the next step's carry already, and a chunk that starts from G:

    E[t,s] = d_{s+1} ... d_t,  X[t,s] = E[t-1,s] for s < t,  e_t = E[t,start-1],  g_s = w_s + c_{s+1}
    v_t = e_{t-1} k_t'G + sum_{s<t} X[t,s] g_s (k_t.B_s) u_s - c_t (k_t.B_{t-1}) u_{t-1}
    q_t = k_t' h_{t-1}:  (I + M) q = v,  M[t,s] = X[t,s] r_s (k_t.k_s),  T = (I + M)^-1
    y_t = e_t C_t'G + sum_{s<t} E[t,s] g_s (C_t.B_s) u_s + w_t (C_t.B_t) u_t
          - sum_{s<=t} E[t,s] r_s (C_t.k_s) q_s + D u_t
    G  <- E[last,start-1] G + sum_s E[last,s] (g_s B_s u_s' - r_s k_s q_s')

The last term of v takes back the carry that G_{t-1} holds and h_{t-1} does not: it lowers the weight of u_{t-1} from
g to w, and for the first token of a chunk it is a term of its own, with the token before the chunk.

`inputs`, `initial` and `sequences` are a `ScanInputs`, a `ScanState` and a `TokenOrder` of pointers, with None for what
is absent, so that `inputs.k is not None` is known when compiling; `settings` are those of `launch`. A tuple of another
kind must not be given to the same function: compiled code is found by the types in a tuple, whatever their names.

Tiles stay in the dtype they were loaded in until `.to(tl.float32)`: the interpreter is wrong about bfloat16 arithmetic.
Positions past the end of a sequence load zeros, which are the identity step. Compilers need other numbers of registers
for the same operations in another order, even those of indices: `make kernels` shows what a change has done to spills.
"""

from typing import NamedTuple

# transformers refuses code that imports what is not installed, except in a `try`, whether or not it would be reached.
try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("These kernels need Triton; the other backends of the scan do not.") from error


class Block(NamedTuple):
    """What a program works on of the states: all elements, of some or all channels."""

    rows: tl.tensor
    columns: tl.tensor


class Sequence(NamedTuple):
    """One head of a sequence."""

    pair: tl.tensor  # row and head as one number
    head: tl.tensor
    heads: tl.tensor
    first: tl.tensor  # position of its first token among all tokens
    length: tl.tensor
    slot: tl.tensor  # of its first chunk
    order: tl.tensor | None  # pointer to the number of the token at each position; None if tokens stand in their order


class Place(NamedTuple):
    """A chunk of one head of a sequence, or of a block of its channels."""

    pair: tl.tensor
    chunk: tl.tensor  # its number in the sequence
    index: tl.tensor  # its number among all chunks of all heads
    remaining: tl.tensor  # tokens that the sequence has from its first on
    position: tl.tensor  # of its first token among all tokens
    head: tl.tensor
    heads: tl.tensor
    order: tl.tensor | None
    block: Block


class Tokens(NamedTuple):
    """The tokens of a chunk, and where they lie in arrays of one entry a token and head."""

    i: tl.tensor  # 0, 1, ... CHUNK - 1
    inside: tl.tensor  # false past the end of the sequence
    first: tl.tensor  # an entry, and offsets from there
    offsets: tl.tensor
    block: Block


class Logs(NamedTuple):
    """Logarithms of products of decays from the start of a chunk, each in two parts as `sum_logs` has them."""

    a: tuple  # a_t = log d_start + ... + log d_t
    a_before: tuple  # a_{t-1}
    a_last: tuple


class Weights(NamedTuple):
    """Of the token s in a state: w_s as long as it is the newest, and then g_s."""

    w: tl.tensor
    g: tl.tensor


@triton.jit
def dot(a, b, settings: tl.constexpr, acc=None):
    """a @ b + acc in float32, with operands rounded to the dtype DOT, or float32 ones read with Triton's PRECISION."""
    if settings.DOT == "bf16":
        a, b = a.to(tl.bfloat16), b.to(tl.bfloat16)
    else:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc=acc, input_precision=settings.PRECISION)


@triton.jit
def exact_dot(a, b, settings: tl.constexpr, acc=None):
    """a @ b + acc of float32 operands, as good as float32 itself."""
    return tl.dot(a, b, acc=acc, input_precision=settings.EXACT)


@triton.jit
def zero_tile(HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """A function, because Triton 3.7 takes arguments in a list of sizes, but not what is in a tuple of constants."""
    return tl.zeros([HEIGHT, WIDTH], tl.float32)


@triton.jit
def zero_vector(WIDTH: tl.constexpr):
    return tl.zeros([WIDTH], tl.float32)


@triton.jit
def whole_block(settings: tl.constexpr):
    return Block(tl.arange(0, settings.N), tl.arange(0, settings.P))


@triton.jit
def program_block(settings: tl.constexpr):
    """The block of a program, of which there is one for every P channels."""
    return Block(tl.arange(0, settings.N), tl.program_id(1) * settings.P + tl.arange(0, settings.P))


@triton.jit
def find_sequence(bounds_ptr, row, length, settings: tl.constexpr):
    """The position of a sequence's first token among all tokens, its length, and the slot of its first chunk."""
    first, slot = row * length, row * tl.cdiv(length, settings.CHUNK)
    if bounds_ptr is not None:
        first = tl.load(bounds_ptr + 2 * row)
        length = (tl.load(bounds_ptr + 2 * row + 1) - first).to(tl.int32)
        # Each sequence before this one has at most one chunk that is not full.
        slot = first // settings.CHUNK + row
    return first, length, slot


@triton.jit
def program_sequence(sequences, length, heads, settings: tl.constexpr):
    """The sequence of a program, of which there is one for each row and head, or for each block of its channels."""
    pair = tl.program_id(0).to(tl.int64)
    head = pair % heads
    first, length, slot = find_sequence(sequences.bounds, pair // heads, length, settings)
    return Sequence(pair, head, heads, first, length, slot, sequences.order)


@triton.jit
def slot_sequence(sequences, rows_ptr, slot, head, length, heads, settings: tl.constexpr):
    """The sequence of the chunk in a slot, and the number of the chunk."""
    row = slot // tl.cdiv(length, settings.CHUNK)
    if rows_ptr is not None:
        row = tl.load(rows_ptr + slot)
    first, length, first_slot = find_sequence(sequences.bounds, row, length, settings)
    chunk = slot - first_slot
    return Sequence(row * heads + head, head, heads, first, length, first_slot, sequences.order), chunk


@triton.jit
def chunk_place(sequence, chunk, settings: tl.constexpr, block=None, index=None):
    """The place of a chunk of a sequence, with all channels if no block is given; `index` saves finding it."""
    if index is None:
        index = (sequence.slot + chunk) * sequence.heads + sequence.head
    return Place(
        pair=sequence.pair,
        chunk=chunk,
        index=index,
        remaining=sequence.length - chunk * settings.CHUNK,
        position=sequence.first + chunk * settings.CHUNK,
        head=sequence.head,
        heads=sequence.heads,
        order=sequence.order,
        block=whole_block(settings) if block is None else block,
    )


@triton.jit
def chunk_tokens(place, settings: tl.constexpr, SHIFT: tl.constexpr = 0):
    """The tokens of a chunk, or those SHIFT after them."""
    i = tl.arange(0, settings.CHUNK)
    inside = i < place.remaining - SHIFT
    first, offsets = (place.position + SHIFT) * place.heads + place.head, i * place.heads
    if place.order is not None:
        numbers = tl.load(place.order + place.position + SHIFT + i, mask=inside, other=0)
        first, offsets = place.head, numbers * place.heads
    return Tokens(i, inside, first, offsets, place.block)


@triton.jit
def entry(place, shift, there):
    """Where the token `shift` after a chunk's first lies in an array."""
    token = place.position + shift
    if place.order is not None:
        token = tl.load(place.order + token, mask=there, other=0)
    return token * place.heads + place.head


@triton.jit
def tile_pointers(pointer, tokens, columns, WIDTH: tl.constexpr):
    """Pointers to the rows of tokens, and which of them are there: not past the sequence, nor in columns past WIDTH."""
    mask = tokens.inside[:, None] & (columns < WIDTH)[None, :]
    return pointer + tokens.first * WIDTH + (tokens.offsets[:, None] * WIDTH + columns[None, :]), mask


@triton.jit
def load_directions(pointer, tokens, settings: tl.constexpr):
    """B, C or k of tokens, (CHUNK, N)."""
    pointers, mask = tile_pointers(pointer, tokens, tokens.block.rows, settings.n)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def load_values(pointer, tokens, settings: tl.constexpr):
    """u, y or dy of tokens, (CHUNK, P)."""
    pointers, mask = tile_pointers(pointer, tokens, tokens.block.columns, settings.channels)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def store_directions(pointer, tokens, settings: tl.constexpr, tile):
    pointers, mask = tile_pointers(pointer, tokens, tokens.block.rows, settings.n)
    tl.store(pointers, tile.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def store_values(pointer, tokens, settings: tl.constexpr, tile):
    pointers, mask = tile_pointers(pointer, tokens, tokens.block.columns, settings.channels)
    tl.store(pointers, tile.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_gates(pointer, tokens):
    """The log_decay, write, carry or reflection of tokens, as float32."""
    return tl.load(pointer + tokens.first + tokens.offsets, mask=tokens.inside, other=0.0).to(tl.float32)


@triton.jit
def store_gates(pointer, tokens, gates):
    tl.store(pointer + tokens.first + tokens.offsets, gates.to(pointer.dtype.element_ty), mask=tokens.inside)


@triton.jit
def load_scalar(pointer, index, there):
    return tl.load(pointer + index, mask=there, other=0.0).to(tl.float32)


@triton.jit
def load_vector(pointer, row, there, columns, WIDTH: tl.constexpr):
    """One row as float32; zero unless `there`."""
    mask = columns < tl.where(there, WIDTH, 0)
    return tl.load(pointer + row * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_first(initial, pair, block, settings: tl.constexpr):
    """B and u of the token before a sequence."""
    B0 = load_vector(initial.B, pair, True, block.rows, settings.n)
    return B0, load_vector(initial.u, pair, True, block.columns, settings.channels)


@triton.jit
def load_before(pointer, first_pointer, place, columns, WIDTH: tl.constexpr):
    """The row of the token before a chunk; before the first chunk it is in `first_pointer`."""
    row = load_vector(pointer, entry(place, -1, place.chunk > 0), place.chunk > 0, columns, WIDTH)
    return row + load_vector(first_pointer, place.pair, place.chunk == 0, columns, WIDTH)


@triton.jit
def load_carried(inputs, initial, place, settings: tl.constexpr):
    """B and u of the token before a chunk, and the weight with which the first token carries them on."""
    B_before = load_before(inputs.B, initial.B, place, place.block.rows, settings.n)
    u_before = load_before(inputs.u, initial.u, place, place.block.columns, settings.channels)
    return B_before, u_before, load_scalar(inputs.carry, entry(place, 0, True), True)


@triton.jit
def load_next(inputs, place, settings: tl.constexpr):
    """k and carry of the first token after a chunk; zero if there is none."""
    there = place.remaining > settings.CHUNK
    start = entry(place, settings.CHUNK, there)
    k_next = load_vector(inputs.k, start, there, place.block.rows, settings.n)
    return k_next, load_scalar(inputs.carry, start, there)


@triton.jit
def state_pointers(pointer, index, block, settings: tl.constexpr):
    """Pointers to the block of state `index` of a stack of (n, channels), and which of them are there."""
    mask = (block.rows < settings.n)[:, None] & (block.columns < settings.channels)[None, :]
    offsets = block.rows[:, None] * settings.channels + block.columns[None, :]
    return pointer + index * (settings.n * settings.channels) + offsets, mask


@triton.jit
def load_state(pointer, index, block, settings: tl.constexpr):
    """State `index` as float32, (N, P)."""
    pointers, mask = state_pointers(pointer, index, block, settings)
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_state(pointer, index, block, settings: tl.constexpr, state):
    pointers, mask = state_pointers(pointer, index, block, settings)
    tl.store(pointers, state.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def inverse_pointers(pointer, index, settings: tl.constexpr):
    """Pointers to T of a chunk, and which are stored: the 16 x 16 blocks above the diagonal are zero, and are not."""
    i = tl.arange(0, settings.CHUNK)
    stored = (i // 16)[:, None] >= (i // 16)[None, :]
    return pointer + index * (settings.CHUNK * settings.CHUNK) + i[:, None] * settings.CHUNK + i[None, :], stored


@triton.jit
def load_inverse(pointer, index, settings: tl.constexpr):
    pointers, stored = inverse_pointers(pointer, index, settings)
    return tl.load(pointers, mask=stored, other=0.0)


@triton.jit
def store_inverse(pointer, index, settings: tl.constexpr, T):
    pointers, stored = inverse_pointers(pointer, index, settings)
    tl.store(pointers, T, mask=stored)


@triton.jit
def sum_logs(log_decay):
    """
    Sums of logarithms in two parts: of multiples of 2^-8, whose sums are exact, and of rests, whose sums are small, so
    that differences of large sums lose no digits. exp(-100) is 0 beside anything in float32.
    """
    log_decay = tl.where(log_decay < -100.0, -100.0, log_decay)
    coarse = tl.floor(log_decay * 256.0 + 0.5) / 256.0
    fine = log_decay - coarse
    a = (tl.cumsum(coarse, 0), tl.cumsum(fine, 0))
    return Logs(a, (a[0] - coarse, a[1] - fine), (tl.sum(coarse, 0), tl.sum(fine, 0)))


@triton.jit
def load_logs(inputs, tokens):
    return sum_logs(load_gates(inputs.log_decay, tokens))


@triton.jit
def load_weights(inputs, place, tokens, settings: tl.constexpr):
    w = load_gates(inputs.write, tokens)
    g = w
    if inputs.carry is not None:
        g += load_gates(inputs.carry, chunk_tokens(place, settings, 1))
    return Weights(w, g)


@triton.jit
def decay_since(a, b):
    """exp(a - b) of two sums of logarithms."""
    return tl.exp((a[0] - b[0]) + (a[1] - b[1]))


@triton.jit
def decay_from_start(a):
    return tl.exp(a[0] + a[1])


@triton.jit
def decay_matrix(logs, i, LAG: tl.constexpr):
    """E with LAG 0, X with LAG 1; zero where s > t - LAG."""
    a = logs.a_before if LAG else logs.a
    b = logs.a
    exponents = (a[0][:, None] - b[0][None, :]) + (a[1][:, None] - b[1][None, :])
    return tl.exp(tl.where(i[:, None] >= i[None, :] + LAG, exponents, float("-inf")))


@triton.jit
def weight_matrix(weights, i, LAG: tl.constexpr):
    """g_s, but w_s where s = t - LAG: the newest token, whose carry is still to come."""
    return tl.where(i[:, None] == i[None, :] + LAG, weights.w[None, :], weights.g[None, :])


@triton.jit
def unit_lower_inverse(M, i, settings: tl.constexpr):
    """
    T = (I + M)^-1 for a strictly lower triangular M, in float32: forward substitution in the 16 x 16 blocks on the
    diagonal, all blocks at once, then blocks merged in pairs. A series in M would explode for repeated directions.
    """
    same_block = (i // 16)[:, None] == (i // 16)[None, :]
    T = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    in_blocks = tl.where(same_block, M, 0.0)
    for j in range(15):
        column = tl.sum(tl.where((i % 16 == j)[None, :], in_blocks, 0.0), 1)
        row = tl.sum(tl.where((i % 16 == j)[:, None], T, 0.0), 0)
        T -= tl.where(same_block, column[:, None] * row[None, :], 0.0)
    if settings.CHUNK == 32:
        between = exact_dot(tl.where(same_block, 0.0, -M), T, settings)
        T = exact_dot(T, between, settings, acc=T)
    return T


@triton.jit
def first_row(i, values, row):
    """A tile whose first row is values_0 times `row`, and zero below."""
    return tl.where(i == 0, values, 0.0)[:, None] * row[None, :]


# The passes over a chunk are cut into phases, so that a thread's registers hold what it needs at any time:
#
#     place = next_phase(place)
#     if place.remaining > 0:
#         result = ...
#
# Loads do not cross the barrier in `next_phase`, so each phase loads its tiles from a cache once more. Its place comes
# by a way on which compilers lose sight of the old one, or they would keep all offsets and masks for the phases after
# it. The condition, which always holds, has sums finished where they stand: in a straight run of code ptxas puts them
# off until their use, with all their terms in registers. But the result of a condition is held in every layout that it
# is ever used in, which is why some that many products read, as G forward and q and dv backward, are found outside. The
# loops over chunks have `disable_licm` because offsets computed before the loop stay in registers, too.


@triton.jit
def hidden(value):
    """The same int32, as the result of a reduction, which no compiler looks through."""
    return tl.max(tl.full([2], value, tl.int32), 0)


@triton.jit
def next_phase(place):
    tl.debug_barrier()
    return Place(
        pair=place.pair,
        chunk=place.chunk,
        index=place.index,
        remaining=hidden(place.remaining),
        position=place.position,
        head=place.head,
        heads=hidden(place.heads),
        order=place.order,
        block=place.block,
    )


@triton.jit
def chunk_inverse(inputs, T_ptr, place, settings: tl.constexpr):
    """T of a chunk, as a kernel before this one left it or solved for here."""
    if T_ptr is not None:
        T = load_inverse(T_ptr, place.index, settings)
    else:
        tokens = chunk_tokens(place, settings)
        k = load_directions(inputs.k, tokens, settings)
        r = load_gates(inputs.reflection, tokens)
        logs = load_logs(inputs, tokens)
        M = dot(k, tl.trans(k), settings) * decay_matrix(logs, tokens.i, 1) * r[None, :]
        T = unit_lower_inverse(M, tokens.i, settings)
    return T


@triton.jit
def state_responses(inputs, initial, place, G, settings: tl.constexpr):
    """What G, from which a chunk starts, and the token before it give to v."""
    tokens = chunk_tokens(place, settings)
    logs = load_logs(inputs, tokens)
    k = load_directions(inputs.k, tokens, settings)
    v = decay_from_start(logs.a_before)[:, None] * dot(k, G, settings)
    if inputs.carry is not None:
        B_before, u_before, c = load_carried(inputs, initial, place, settings)
        v -= first_row(tokens.i, c * tl.sum(k.to(tl.float32) * B_before[None, :], 1), u_before)
    return v


@triton.jit
def token_matrix(a, B, logs, weights, i, LAG: tl.constexpr, settings: tl.constexpr):
    """What the chunk's own u_s give to v_t (of a = k with LAG 1) and to y_t (of a = C with LAG 0)."""
    return dot(a, tl.trans(B), settings) * decay_matrix(logs, i, LAG) * weight_matrix(weights, i, LAG)


@triton.jit
def add_token_responses(inputs, place, v, settings: tl.constexpr):
    """Adds to v what the tokens of the chunk give."""
    tokens = chunk_tokens(place, settings)
    logs, weights = load_logs(inputs, tokens), load_weights(inputs, place, tokens, settings)
    k, B = load_directions(inputs.k, tokens, settings), load_directions(inputs.B, tokens, settings)
    V = token_matrix(k, B, logs, weights, tokens.i, 1, settings)
    return dot(V, load_values(inputs.u, tokens, settings), settings, acc=v)
