"""
Random numbers as a pure function of where they are used: no state, so that any row of any batch can be made alone, on
every machine and in every process, and comes out the same.

The numbers are taken from the raw output of the Philox counter, which is fixed for good, and not from the methods of
numpy generators, which may change from one version to the next.
"""

import hashlib
from collections.abc import Sequence

import numpy as np


class CounterRandom:
    """
    `numbers` random 64-bit words for each of some rows, drawn in the order of the calls below.

    Args:
        purpose: Name of the stream. Two purposes never share numbers, whatever their seeds.
        seed, step: Which batch of the stream.
        first_row, rows: Which rows of that batch: so many from the first on or, if `rows` is an array, those that many
            after the first, in any order.
        numbers: Words for each row, the same for all rows of a stream.
    """

    def __init__(self, purpose: str, seed: int, step: int, first_row: int, rows: int | np.ndarray, numbers: int):
        self.rows = rows if isinstance(rows, int) else len(rows)
        self.taken = 0
        per_row = -(-numbers // 4) * 4  # the counter gives four words at a time
        key = int.from_bytes(hashlib.sha256(f"{purpose}/{seed}".encode()).digest()[:16], "little")
        runs = [(0, rows)] if isinstance(rows, int) else [(int(row), 1) for row in rows]
        words = [
            np.random.Philox(key=key, counter=[(first_row + start) * per_row // 4, 0, step, 0]).random_raw(
                count * per_row
            )
            for start, count in runs
        ]
        self.words = np.concatenate(words).reshape(self.rows, per_row)

    def take(self, *shape: int) -> np.ndarray:
        count = int(np.prod(shape))
        self.taken += count
        if self.taken > self.words.shape[1]:
            raise ValueError(
                f"{self.taken} random numbers were drawn for each row; only {self.words.shape[1]} are there."
            )
        return self.words[:, self.taken - count : self.taken].reshape(self.rows, *shape)

    def uniform(self, *shape: int) -> np.ndarray:
        """Numbers in [0, 1), of shape (rows, *shape)."""
        return (self.take(*shape) >> np.uint64(11)) * 2.0**-53

    def integers(self, high: int | np.ndarray, *shape: int) -> np.ndarray:
        """Whole numbers from 0 to high - 1, of shape (rows, *shape); `high` broadcasts."""
        # The upper half of the product of a 32-bit word and `high`: uniform to one part in 2^32 / high.
        return (((self.take(*shape) >> np.uint64(32)) * np.asarray(high, dtype=np.uint64)) >> np.uint64(32)).astype(
            np.int64
        )


def split_rows(batch_size: int, rank: int, world_size: int) -> tuple[int, int]:
    """The first row and the number of rows of a process's equal share of a batch."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} is not allowed: it must be 0 to world_size - 1 = {world_size - 1}.")
    if batch_size % world_size:
        raise ValueError(f"batch_size={batch_size} is not allowed: it must be a multiple of world_size={world_size}.")
    share = batch_size // world_size
    return rank * share, share


def checksum(arrays: Sequence[np.ndarray]) -> str:
    """A fingerprint of some arrays: of their types, shapes and bytes."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
