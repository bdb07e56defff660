r"""
The kernels of the scan, by name. `chunk` explains the equations and names; `launch` launches these.

| kernel                  | programs                     | work                                                        |
|-------------------------|------------------------------|-------------------------------------------------------------|
| `step_kernel`           | (row, head) x channel blocks | a single step, for decoding                                 |
| `forward_kernel`        | (row, head) x channel blocks | y and the states, chunk after chunk                         |
| `backward_kernel`       | (row, head)                  | all gradients of small states, chunk before chunk           |
| `solve_kernel`          | slots of chunks x heads      | T of every chunk, for larger states                         |
| `backward_state_kernel` | (row, head) x channel blocks | the gradient of G at the end of every chunk                 |
| `backward_chunk_kernel` | slots of chunks x heads      | all other gradients, from those                             |

Arrays are contiguous, shaped as in `definition`. A `pair` is a row and a head; token t of a pair is entry
(row * length + t) * heads + head of an array, or wherever `bounds` and `order` of a `TokenOrder` have it. Chunks have
slots, those of a sequence one after another, and `rows` holds the sequence of each slot. `n` and `channels` are the
sizes, N and P the powers of two, at least 16, that hold them (P a block of the channels where there are several). Every
value is written once and by one program, so results are the same in every run.
"""

from .backward import backward_chunk_kernel, backward_kernel, backward_state_kernel
from .forward import forward_kernel, solve_kernel, step_kernel

KERNELS = {
    "step_kernel": step_kernel,
    "forward_kernel": forward_kernel,
    "backward_kernel": backward_kernel,
    "solve_kernel": solve_kernel,
    "backward_state_kernel": backward_state_kernel,
    "backward_chunk_kernel": backward_chunk_kernel,
}
