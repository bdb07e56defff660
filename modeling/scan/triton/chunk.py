r"""
One chunk of the scan in Triton: what the kernels of `scan_triton_kernels` share.

With G_t = h_t + c_{t+1} B_t u_t', the state that has the next step's carry already, and a chunk that starts from G:

    E[t,s] = d_{s+1} ... d_t,  X[t,s] = E[t-1,s] for s < t,  e_t = E[t,start-1],  g_s = w_s + c_{s+1}
    v_t = e_{t-1} k_t'G + sum_{s<t} X[t,s] g_s (k_t.B_s) u_s - c_t (k_t.B_{t-1}) u_{t-1}
    q_t = k_t' h_{t-1}:  (I + M) q = v,  M[t,s] = X[t,s] r_s (k_t.k_s),  T = (I + M)^-1
    y_t = e_t C_t'G + sum_{s<t} E[t,s] g_s (C_t.B_s) u_s + w_t (C_t.B_t) u_t
          - sum_{s<=t} E[t,s] r_s (C_t.k_s) q_s + D u_t
    G  <- E[last,start-1] G + sum_s E[last,s] (g_s B_s u_s' - r_s k_s q_s')

The last term of v takes back the carry that G_{t-1} holds and h_{t-1} does not: it lowers the weight of u_{t-1} from
g to w, and for the first token of a chunk it is a term of its own, with the token before the chunk.

A `place` is (pair, chunk, index, position, remaining, head, heads, order_ptr) of a chunk: its row and head, its number
in the sequence, its index among all chunks of all heads, its first token's position, how many tokens the sequence has
from there on. Tokens stand in their order, or token numbers at `order_ptr` say in which.

Tiles stay in the dtype they were loaded in until `.to(tl.float32)`: the interpreter is wrong about bfloat16 arithmetic.
Positions past the end of a sequence load zeros, which are the identity step.
"""

# transformers refuses code that imports what is not installed, except in a `try`, whether or not it would be reached.
try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("These kernels need Triton; the other backends of the scan do not.") from error


@triton.jit
def dot(a, b, DOT: tl.constexpr, PRECISION: tl.constexpr, acc=None):
    """a @ b + acc in float32, with operands rounded to the dtype DOT, or float32 ones read with Triton's PRECISION."""
    return tl.dot(a.to(DOT), b.to(DOT), acc=acc, input_precision=PRECISION)


@triton.jit
def find_sequence(bounds_ptr, row, length, CHUNK: tl.constexpr):
    """The position of a sequence's first token among all tokens, its length, and the slot of its first chunk."""
    first, slot = row * length, row * tl.cdiv(length, CHUNK)
    if bounds_ptr is not None:
        first = tl.load(bounds_ptr + 2 * row)
        length = (tl.load(bounds_ptr + 2 * row + 1) - first).to(tl.int32)
        # Each sequence before this one has at most one chunk that is not full.
        slot = first // CHUNK + row
    return first, length, slot


@triton.jit
def find_chunk(bounds_ptr, rows_ptr, slot, length, CHUNK: tl.constexpr):
    """The row of the chunk in a slot, its number, and the position and length of its sequence."""
    row = slot // tl.cdiv(length, CHUNK)
    if rows_ptr is not None:
        row = tl.load(rows_ptr + slot)
    first, length, first_slot = find_sequence(bounds_ptr, row, length, CHUNK)
    return row, slot - first_slot, first, length


@triton.jit
def entries(place, i, inside, SHIFT: tl.constexpr = 0):
    """Where the tokens of a chunk, or those SHIFT after them, lie in an array: an entry, and offsets to add to it."""
    _, _, _, position, _, head, heads, order_ptr = place
    first, offsets = (position + SHIFT) * heads + head, i * heads
    if order_ptr is not None:
        first, offsets = head, tl.load(order_ptr + position + SHIFT + i, mask=inside, other=0) * heads
    return first, offsets


@triton.jit
def entry(place, shift, there):
    """Where the token `shift` after a chunk's first lies in an array."""
    _, _, _, position, _, head, heads, order_ptr = place
    token = position + shift
    if order_ptr is not None:
        token = tl.load(order_ptr + token, mask=there, other=0)
    return token * heads + head


@triton.jit
def load_tile(pointer, at, inside, columns, WIDTH: tl.constexpr):
    """Rows of the tokens at `entries`; zero where not `inside`, and in columns past WIDTH."""
    first, offsets = at
    mask = inside[:, None] & (columns < WIDTH)[None, :]
    return tl.load(pointer + first * WIDTH + (offsets[:, None] * WIDTH + columns[None, :]), mask=mask, other=0.0)


@triton.jit
def store_tile(pointer, at, inside, columns, WIDTH: tl.constexpr, tile):
    first, offsets = at
    mask = inside[:, None] & (columns < WIDTH)[None, :]
    pointers = pointer + first * WIDTH + (offsets[:, None] * WIDTH + columns[None, :])
    tl.store(pointers, tile.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_gate(pointer, at, inside):
    first, offsets = at
    return tl.load(pointer + first + offsets, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_gate(pointer, at, inside, gate):
    first, offsets = at
    tl.store(pointer + first + offsets, gate.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def load_scalar(pointer, index, there):
    return tl.load(pointer + index, mask=there, other=0.0).to(tl.float32)


@triton.jit
def load_vector(pointer, row, there, columns, WIDTH: tl.constexpr):
    """One row as float32; zero unless `there`."""
    mask = columns < tl.where(there, WIDTH, 0)
    return tl.load(pointer + row * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_before(pointer, first_pointer, place, columns, WIDTH: tl.constexpr):
    """The row of the token before a chunk; before the first chunk it is in `first_pointer`."""
    pair, chunk = place[0], place[1]
    row = load_vector(pointer, entry(place, -1, chunk > 0), chunk > 0, columns, WIDTH)
    return row + load_vector(first_pointer, pair, chunk == 0, columns, WIDTH)


@triton.jit
def load_next(k_ptr, carry_ptr, place, rows, n: tl.constexpr, CHUNK: tl.constexpr):
    """k and carry of the first token after a chunk; zero if there is none."""
    there = place[4] > CHUNK
    start = entry(place, CHUNK, there)
    return load_vector(k_ptr, start, there, rows, n), load_scalar(carry_ptr, start, there)


@triton.jit
def load_matrix(pointer, index, there, rows, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Matrix `index` of a stack of (HEIGHT, WIDTH) as float32; zero unless `there`, and past its bounds."""
    mask = (rows < tl.where(there, HEIGHT, 0))[:, None] & (columns < WIDTH)[None, :]
    offsets = rows[:, None] * WIDTH + columns[None, :]
    return tl.load(pointer + index * (HEIGHT * WIDTH) + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_matrix(pointer, index, rows, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, matrix):
    mask = (rows < HEIGHT)[:, None] & (columns < WIDTH)[None, :]
    offsets = rows[:, None] * WIDTH + columns[None, :]
    tl.store(pointer + index * (HEIGHT * WIDTH) + offsets, matrix.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_inverse(pointer, index, i, CHUNK: tl.constexpr):
    """T as `store_inverse` left it: its 16 x 16 blocks above the diagonal are zero and not stored."""
    stored = (i // 16)[:, None] >= (i // 16)[None, :]
    return tl.load(pointer + index * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None, :], mask=stored, other=0.0)


@triton.jit
def store_inverse(pointer, index, i, CHUNK: tl.constexpr, T):
    stored = (i // 16)[:, None] >= (i // 16)[None, :]
    tl.store(pointer + index * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None, :], T, mask=stored)


@triton.jit
def sum_logs(log_decay):
    """
    a_t = log d_start + ... + log d_t, a_{t-1} and a_last, each in two parts: multiples of 2^-8, whose sums are exact,
    and rests, whose sums are small, so that differences of large sums lose no digits. exp(-100) is 0 beside anything
    in float32.
    """
    log_decay = tl.where(log_decay < -100.0, -100.0, log_decay)
    coarse = tl.floor(log_decay * 256.0 + 0.5) / 256.0
    fine = log_decay - coarse
    a = (tl.cumsum(coarse, 0), tl.cumsum(fine, 0))
    return a, (a[0] - coarse, a[1] - fine), (tl.sum(coarse, 0), tl.sum(fine, 0))


@triton.jit
def decay_since(a, b):
    """exp(a - b) of two such sums."""
    return tl.exp((a[0] - b[0]) + (a[1] - b[1]))


@triton.jit
def decay_from_start(a):
    return tl.exp(a[0] + a[1])


@triton.jit
def decay_matrix(a, b, i, LAG: tl.constexpr):
    """exp(a_t - b_s) for s <= t - LAG, else 0: E of (a_t, a_s) with LAG 0, X of (a_{t-1}, a_s) with LAG 1."""
    logs = (a[0][:, None] - b[0][None, :]) + (a[1][:, None] - b[1][None, :])
    return tl.exp(tl.where(i[:, None] >= i[None, :] + LAG, logs, float("-inf")))


@triton.jit
def weight_matrix(w, g, i, LAG: tl.constexpr):
    """g_s, but w_s where s = t - LAG: the newest token, whose carry is still to come."""
    return tl.where(i[:, None] == i[None, :] + LAG, w[None, :], g[None, :])


@triton.jit
def unit_lower_inverse(M, i, CHUNK: tl.constexpr, EXACT: tl.constexpr):
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
    if CHUNK == 32:
        between = dot(tl.where(same_block, 0.0, -M), T, tl.float32, EXACT)
        T = dot(T, between, tl.float32, EXACT, acc=T)
    return T


@triton.jit
def first_row(i, values, row):
    """A tile whose first row is values_0 times `row`, and zero below."""
    return tl.where(i == 0, values, 0.0)[:, None] * row[None, :]


@triton.jit
def last_row(i, values, row, CHUNK: tl.constexpr):
    return tl.where(i == CHUNK - 1, values, 0.0)[:, None] * row[None, :]


@triton.jit
def pair_gradients(a, b, dab, weights, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """
    For sums over decay[t,s] weights[t,s] (a_t.b_s) x_s, with dab[t,s] the decay times the product of x_s and the sum's
    gradient at t: the gradients of a_t.b_s and of the weights, and of the logarithm of the decay summed over s and
    over t.
    """
    dweights = dab * dot(a, tl.trans(b), DOT, PRECISION)
    dlogs = dweights * weights
    return dab * weights, dweights, tl.sum(dlogs, 1), tl.sum(dlogs, 0)


@triton.jit
def load_weights(write_ptr, carry_ptr, place, i, HAS_CARRY: tl.constexpr):
    """w and g."""
    remaining = place[4]
    w = load_gate(write_ptr, entries(place, i, i < remaining), i < remaining)
    g = w
    if HAS_CARRY:
        has_next = i < remaining - 1
        g += load_gate(carry_ptr, entries(place, i, has_next, 1), has_next)
    return w, g


@triton.jit
def load_gates(inputs, place, i, HAS_CARRY: tl.constexpr):
    """The sums of log d up to t, up to t - 1 and to the end, then w and g."""
    _, _, _, log_decay_ptr, write_ptr, carry_ptr, _, _, _ = inputs
    inside = i < place[4]
    a, a_before, a_last = sum_logs(load_gate(log_decay_ptr, entries(place, i, inside), inside))
    w, g = load_weights(write_ptr, carry_ptr, place, i, HAS_CARRY)
    return a, a_before, a_last, w, g


# The passes over a chunk are cut into phases, so that a thread's registers hold what it needs at any time:
#
#     place = next_phase(place)
#     if place[4] > 0:
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
    pair, chunk, index, position, remaining, head, heads, order_ptr = place
    tl.debug_barrier()
    return pair, chunk, index, position, hidden(remaining), head, hidden(heads), order_ptr


@triton.jit
def chunk_inverse(
    inputs, T_ptr, place, n: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
    SOLVED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """T of a chunk, as a kernel before this one left it or solved for here."""
    _, _, _, log_decay_ptr, _, _, k_ptr, reflection_ptr, _ = inputs
    i = tl.arange(0, CHUNK)
    if SOLVED:
        T = load_inverse(T_ptr, place[2], i, CHUNK)
    else:
        inside = i < place[4]
        at = entries(place, i, inside)
        k = load_tile(k_ptr, at, inside, tl.arange(0, N), n)
        r = load_gate(reflection_ptr, at, inside)
        a, a_before, _ = sum_logs(load_gate(log_decay_ptr, at, inside))
        M = dot(k, tl.trans(k), DOT, PRECISION) * decay_matrix(a_before, a, i, 1) * r[None, :]
        T = unit_lower_inverse(M, i, CHUNK, EXACT)
    return T


@triton.jit
def state_responses(
    inputs, initial, place, G, columns,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
    HAS_CARRY: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What G, from which a chunk starts, and the token before it give to v."""
    u_ptr, B_ptr, _, log_decay_ptr, _, carry_ptr, k_ptr, _, _ = inputs
    B0_ptr, u0_ptr = initial
    i, rows = tl.arange(0, CHUNK), tl.arange(0, N)
    inside = i < place[4]
    at = entries(place, i, inside)
    _, a_before, _ = sum_logs(load_gate(log_decay_ptr, at, inside))
    k = load_tile(k_ptr, at, inside, rows, n)
    v = decay_from_start(a_before)[:, None] * dot(k, G, DOT, PRECISION)
    if HAS_CARRY:
        B_before = load_before(B_ptr, B0_ptr, place, rows, n)
        u_before = load_before(u_ptr, u0_ptr, place, columns, channels)
        c = load_scalar(carry_ptr, entry(place, 0, True), True)
        v -= first_row(i, c * tl.sum(k.to(tl.float32) * B_before[None, :], 1), u_before)
    return v


@triton.jit
def add_token_responses(
    inputs, place, v, columns,
    n: tl.constexpr, channels: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
    HAS_CARRY: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds to v what the tokens of the chunk give."""
    u_ptr, B_ptr, _, _, _, _, k_ptr, _, _ = inputs
    i, rows = tl.arange(0, CHUNK), tl.arange(0, N)
    inside = i < place[4]
    at = entries(place, i, inside)
    a, a_before, _, w, g = load_gates(inputs, place, i, HAS_CARRY)
    k = load_tile(k_ptr, at, inside, rows, n)
    B = load_tile(B_ptr, at, inside, rows, n)
    V = dot(k, tl.trans(B), DOT, PRECISION) * decay_matrix(a_before, a, i, 1) * weight_matrix(w, g, i, 1)
    u = load_tile(u_ptr, at, inside, columns, channels)
    return dot(V, u, DOT, PRECISION, acc=v)
