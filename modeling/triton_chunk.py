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

Tiles stay in the dtype they were loaded in until `.to(tl.float32)`: the interpreter is wrong about bfloat16 arithmetic.
Positions past the end of a sequence load zeros, which are the identity step.
"""

import triton
import triton.language as tl


@triton.jit
def dot(a, b, DOT: tl.constexpr, PRECISION: tl.constexpr, acc=None):
    """a @ b + acc in float32, with operands rounded to the dtype DOT, or float32 ones read with Triton's PRECISION."""
    return tl.dot(a.to(DOT), b.to(DOT), acc=acc, input_precision=PRECISION)


@triton.jit
def load_tile(pointer, start, heads, i, inside, columns, WIDTH: tl.constexpr):
    """Rows of a chunk's tokens, from entry `start` on; zero where not `inside`, and in columns past WIDTH."""
    offsets = i[:, None] * (heads * WIDTH) + columns[None, :]
    mask = inside[:, None] & (columns < WIDTH)[None, :]
    return tl.load(pointer + start * WIDTH + offsets, mask=mask, other=0.0)


@triton.jit
def store_tile(pointer, start, heads, i, inside, columns, WIDTH: tl.constexpr, tile):
    offsets = i[:, None] * (heads * WIDTH) + columns[None, :]
    mask = inside[:, None] & (columns < WIDTH)[None, :]
    tl.store(pointer + start * WIDTH + offsets, tile.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_gate(pointer, start, heads, i, inside):
    return tl.load(pointer + start + i * heads, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_gate(pointer, start, heads, i, inside, gate):
    tl.store(pointer + start + i * heads, gate.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def load_scalar(pointer, index, there):
    return tl.load(pointer + index, mask=there, other=0.0).to(tl.float32)


@triton.jit
def load_vector(pointer, row, there, columns, WIDTH: tl.constexpr):
    """One row as float32; zero unless `there`."""
    mask = columns < tl.where(there, WIDTH, 0)
    return tl.load(pointer + row * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_before(pointer, first_pointer, start, heads, pair, chunk, columns, WIDTH: tl.constexpr):
    """The row of the token before a chunk; before the first chunk it is in `first_pointer`."""
    row = load_vector(pointer, start - heads, chunk > 0, columns, WIDTH)
    return row + load_vector(first_pointer, pair, chunk == 0, columns, WIDTH)


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
def pair_gradients(a, b, dab, decay, weights, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """
    For sums over decay[t,s] weights[t,s] (a_t.b_s) x_s with dab[t,s] the product of x_s and the sum's gradient at t:
    the gradients of a_t.b_s and of the weights, and of the logarithm of the decay summed over s and over t.
    """
    dweights = dab * decay * dot(a, tl.trans(b), DOT, PRECISION)
    dlogs = dweights * weights
    return dab * decay * weights, dweights, tl.sum(dlogs, 1), tl.sum(dlogs, 0)
