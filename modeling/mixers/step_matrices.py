"""
The matrices A_t = gelu(sum_i x_t[i] A[i]) of some steps of a batch: products by them, and the way from their gradients
to those of x and A.

To make a matrix costs more than to multiply by it. So tokens that are the same letter share one, and the rows of all
sequences that meet it at a step are multiplied by it together, in one product of matrices. For that the sequences stand
in an order of that step: by the matrix that they meet. Its gradient, a sum over all that meet it, is one product too.
"""

from itertools import groupby

import torch
import torch.nn.functional as F


class MatricesInChunks:
    """
    The matrices of a sequence, as many steps at a time as memory allows.

    Args:
        x (batch, length, d): Inputs; or with `index` (batch, length) those of letters (number, d), and which letter
            each token is. Then there are few matrices, which are made once for all steps.
        A (d, s, s): As above.
        lengths (batch): Steps of each row that count; all if None.
        size: Steps in a chunk.
    """

    def __init__(self, x, index, A, lengths, size):
        self.x, self.index, self.A = x, index, A
        self.length = (x if index is None else index).shape[1]
        self.steps = [range(start, min(start + size, self.length)) for start in range(0, self.length, size)]
        self.filled = None
        if lengths is not None:
            self.filled = torch.arange(self.length, device=x.device) < lengths[:, None]
        self.shared, self.found = None, None

    def matrices(self, steps: range) -> "OwnMatrices | SharedMatrices":
        """Those of a chunk. Their methods take the numbers of steps in the sequence."""
        if self.index is None:
            return OwnMatrices(self.x, self.A, self.filled, steps)
        if self.shared is None:
            self.shared = SharedMatrices(self.x, self.A, self.index, self.filled)
        return self.shared

    def add_gradients(self, matrices: "OwnMatrices | SharedMatrices", steps: range) -> None:
        """Takes the gradients of a chunk, once they are all there."""
        if self.index is not None:
            return
        if self.found is None:
            self.found = torch.zeros_like(self.x), torch.zeros_like(self.A)
        grad_x, grad_A = matrices.input_gradients()
        self.found[0][:, steps.start : steps.stop] = grad_x
        self.found[1].add_(grad_A)

    def gradients(self) -> tuple[torch.Tensor, None, torch.Tensor]:
        """The gradients of x, index and A."""
        found = self.found if self.shared is None else self.shared.input_gradients()
        grad_x, grad_A = found or (torch.zeros_like(self.x), torch.zeros_like(self.A))
        return grad_x, None, grad_A


class OwnMatrices:
    """
    Every token has a matrix of its own.

    Args:
        x (batch, length, d), A (d, s, s): As above.
        filled (batch, length): Whether a step counts; its matrix is the identity where it does not. All do if None.
        steps: Those whose matrices are made.
    """

    def __init__(self, x: torch.Tensor, A: torch.Tensor, filled: torch.Tensor | None, steps: range):
        part = slice(steps.start, steps.stop)
        self.A, self.start, self.shape = A, steps.start, (len(steps), x.shape[0], *A.shape[1:])
        self.inputs = x[:, part].transpose(0, 1).flatten(0, 1)
        self.sums = self.inputs @ A.flatten(1)
        self.matrices = F.gelu(self.sums).view(self.shape)
        self.empty = None if filled is None else ~filled[:, part].T[..., None, None]
        if filled is not None:
            eye = torch.eye(A.shape[1], dtype=A.dtype, device=A.device)
            self.matrices = torch.where(self.empty, eye, self.matrices)
        self.gradients = None

    def arrange(self, rows: torch.Tensor, before: int | None, step: int | None) -> torch.Tensor:
        """Rows (batch, ...) from the order of one step into that of another; None stands for the batch's own."""
        return rows

    def multiply(self, step: int, rows: torch.Tensor, transposed: bool = False) -> torch.Tensor:
        """Rows (batch, number, s), in the order of the step, times the matrix that each sequence meets there."""
        matrices = self.matrices[step - self.start]
        return torch.bmm(rows, matrices.mT if transposed else matrices)

    def norms(self, step: int) -> torch.Tensor:
        """How much a step can make the largest element of a row grow at most, (batch,) in its order."""
        return self.matrices[step - self.start].abs().sum(-1).amax(-1)

    def add_gradient(self, step: int, left: torch.Tensor, right: torch.Tensor) -> None:
        """Counts left' right, both (batch, number, s) in the order of the step, for its matrices; once a step."""
        if self.gradients is None:
            self.gradients = self.sums.new_empty(self.shape)
        self.gradients[step - self.start] = torch.bmm(left.mT, right)

    def input_gradients(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of x and A."""
        self.matrices = None  # their memory is needed
        if self.empty is not None:
            self.gradients.masked_fill_(self.empty, 0.0)
        gradients = torch.ops.aten.gelu_backward(self.gradients.view_as(self.sums), self.sums)
        grad_x = (gradients @ self.A.flatten(1).mT).unflatten(0, self.shape[:2]).transpose(0, 1)
        return grad_x, (self.inputs.mT @ gradients).view_as(self.A)


class SharedMatrices:
    """
    Tokens that are the same letter share a matrix; the methods are those of `OwnMatrices`.

    Args:
        table (number, d), A (d, s, s): The inputs of the letters, and A as above.
        index (batch, length): Which letter each token is.
        filled (batch, length): As above.
    """

    def __init__(self, table: torch.Tensor, A: torch.Tensor, index: torch.Tensor, filled: torch.Tensor | None):
        self.A, self.table = A, table
        self.sums = table @ A.flatten(1)
        self.matrices = F.gelu(self.sums).view(-1, *A.shape[1:])
        self.gradients = None
        self.none = len(table)  # what a step that does not count meets
        met = index if filled is None else index.masked_fill(~filled, self.none)
        self.met, order = met.T.sort(dim=1)
        self.order, self.place = order.unbind(), order.argsort(dim=1).unbind()
        self.groups = [runs(step) for step in self.met.tolist()]

    def arrange(self, rows: torch.Tensor, before: int | None, step: int | None) -> torch.Tensor:
        if before is None:
            return rows.index_select(0, self.order[step])
        place = self.place[before]
        return rows.index_select(0, place if step is None else place[self.order[step]])

    def multiply(self, step: int, rows: torch.Tensor, transposed: bool = False) -> torch.Tensor:
        result = torch.empty_like(rows)
        for letter, part in self.groups[step]:
            if letter == self.none:
                result[part] = rows[part]
            else:
                matrix = self.matrices[letter]
                torch.mm(rows[part].flatten(0, 1), matrix.mT if transposed else matrix, out=result[part].flatten(0, 1))
        return result

    def norms(self, step: int) -> torch.Tensor:
        of_letters = self.matrices.abs().sum(-1).amax(-1)
        return torch.cat([of_letters, of_letters.new_ones(1)])[self.met[step]]

    def add_gradient(self, step: int, left: torch.Tensor, right: torch.Tensor) -> None:
        if self.gradients is None:
            self.gradients = torch.zeros_like(self.matrices)
        for letter, part in self.groups[step]:
            if letter != self.none:
                self.gradients[letter].addmm_(left[part].flatten(0, 1).mT, right[part].flatten(0, 1))

    def input_gradients(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of the table and A."""
        gradients = torch.ops.aten.gelu_backward(self.gradients.view_as(self.sums), self.sums)
        return gradients @ self.A.flatten(1).mT, (self.table.mT @ gradients).view_as(self.A)


def runs(letters: list[int]) -> list[tuple[int, slice]]:
    """The letters of a sorted list, each with where it stands."""
    found, start = [], 0
    for letter, equal in groupby(letters):
        stop = start + len(list(equal))
        found.append((letter, slice(start, stop)))
        start = stop
    return found
