"""
Finite groups of permutations: Z_n, S_n, A_n and direct products of them.

An element is a permutation p of the points 0 .. degree - 1 in one-line notation, p[i] the point that i goes to. The
product g o s applies s first: (g o s)[i] = g[s[i]]. As matrices, with M(p)[p[i], i] = 1, M(g o s) = M(g) M(s).

Elements are numbered from 0, the identity:

- Z_n by the amount of the shift, i -> i + shift mod n;
- S_n and A_n in the lexicographic order of the one-line notation;
- products with the last factor counting fastest; the points of the second factor come after those of the first.

Generators are the shift by 1 for Z_n, the adjacent transpositions for S_n (number j swaps j and j + 1), the 3-cycles
(0 1 j) for A_n, and for a product those of its factors, one factor after the other.
"""

import math
import re
from dataclasses import dataclass
from functools import cache
from itertools import permutations, product

import numpy as np

LARGEST_ORDER = 5040
NAME = re.compile(r"([zsa])([1-9]\d*)")


@dataclass(frozen=True, eq=False)
class Group:
    """
    Attributes:
        name: Such as "s5" or "z2xa4".
        elements (order, degree): The permutation of each element.
        table (order, order): table[g, s] is the number of g o s.
        generators: Numbers of the generators.
    """

    name: str
    elements: np.ndarray
    table: np.ndarray
    generators: tuple[int, ...]

    @property
    def order(self) -> int:
        return len(self.elements)

    def element_name(self, number: int) -> str:
        """The one-line notation of an element, such as "1 0 2 3 4"."""
        return " ".join(map(str, self.elements[number]))

    def prefix_products(self, words: np.ndarray) -> np.ndarray:
        """s_t = g_t o s_{t-1} from s_0 = identity, for numbers of elements (rows, length)."""
        state = np.zeros(len(words), dtype=self.table.dtype)
        products = np.empty(words.shape[::-1], dtype=self.table.dtype)
        for t, letters in enumerate(words.T):
            state = self.table[letters, state]
            products[t] = state
        return products.T

    def times(self, other: "Group") -> "Group":
        """The direct product with another group."""
        pairs = list(product(self.elements, other.elements + self.elements.shape[1]))
        first, second = np.divmod(np.arange(len(pairs)), other.order)
        table = self.table[first[:, None], first] * other.order + other.table[second[:, None], second]
        generators = (*(g * other.order for g in self.generators), *other.generators)
        return Group(f"{self.name}x{other.name}", np.array([[*a, *b] for a, b in pairs]), table, generators)


@cache
def make_group(name: str) -> Group:
    """The group called `name`: z, s or a with a number, or several joined by x, such as "s5" or "z2xa4"."""
    factors = [NAME.fullmatch(part) for part in name.split("x")]
    if not all(factors):
        raise ValueError(f"group={name!r} is not allowed: it must be like z5, s5, a5, or a product like z2xs3.")
    families = [(factor[1], int(factor[2])) for factor in factors]
    order = math.prod(ORDERS[family](n) for family, n in families)
    if order > LARGEST_ORDER:
        raise ValueError(f"group={name!r} has {order} elements; at most {LARGEST_ORDER} are allowed.")
    groups = [FAMILIES[family](n) for family, n in families]
    for other in groups[1:]:
        groups[0] = groups[0].times(other)
    return groups[0]


def cyclic(n: int) -> Group:
    shifts = ((np.arange(n) + np.arange(n)[:, None]) % n).astype(np.int32)
    return Group(f"z{n}", shifts, shifts, (1 % n,))


def symmetric(n: int) -> Group:
    elements = np.array(list(permutations(range(n))))
    swaps = [[*range(j), j + 1, j, *range(j + 2, n)] for j in range(n - 1)]
    return permutation_group(f"s{n}", elements, swaps)


def alternating(n: int) -> Group:
    elements = np.array([p for p in permutations(range(n)) if is_even(p)])
    # The cycle 0 -> 1 -> j -> 0 for each j.
    cycles = [[1, j, *(0 if i == j else i for i in range(2, n))] for j in range(2, n)]
    return permutation_group(f"a{n}", elements, cycles)


FAMILIES = {"z": cyclic, "s": symmetric, "a": alternating}
ORDERS = {"z": lambda n: n, "s": math.factorial, "a": lambda n: max(math.factorial(n) // 2, 1)}


def permutation_group(name: str, elements: np.ndarray, generators: list[list[int]]) -> Group:
    """A group from all its elements, in order, and the one-line notation of its generators."""
    degree = elements.shape[1]
    weights = degree ** np.arange(degree)
    number_of_code = np.zeros(degree**degree, dtype=np.int32)
    number_of_code[elements @ weights] = np.arange(len(elements))
    table = np.stack([number_of_code[g[elements] @ weights] for g in elements])
    return Group(name, elements, table, tuple(int(number_of_code[np.array(g) @ weights]) for g in generators))


def is_even(p: tuple[int, ...]) -> bool:
    return sum(p[i] > p[j] for i in range(len(p)) for j in range(i + 1, len(p))) % 2 == 0
