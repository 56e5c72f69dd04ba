"""How one bucket of gradients is summed over the replicas of a stage.

A reduction has two rounds, each of which starts an operation of `ReplicaCollectives` and does not
wait for it:

    memory   returns new memory, which the caller fills with the gradients
    begin    starts the first round
    advance  when that has ended, starts the second one
    finish   when that has ended, returns the sum, whose memory belongs to the caller

Gradients are copied once, into the memory that is sent; the sum becomes the gradients without a
copy.

| reduction | rounds | result |
|---|---|---|
| `AllReduce` | one all-reduce | for two replicas, to the bit that of `InRankOrder` |
| `InRankOrder` | pieces to their owners, who sum them; sums to all | to the bit the sum in the order of the ranks |
| `LowPrecision` | likewise, in 16 bits | gradients, and then their sum, are rounded to 16 bits; summed in 32 |
| `PowerSgd` | sums of two thin matrices | a low-rank approximation; what it leaves out is added to the next gradient |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from penstock.transport.replica_collectives import ReplicaCollectives
from penstock.transport.wire import PendingWork

#: Seed of the first right factors of PowerSGD, which are the same on all replicas.
_POWER_SGD_SEED = 0x5EED


@dataclass(frozen=True)
class BucketLayout:
    """The gradients of a bucket, one after the other in a flat tensor.

    Attributes:
        shapes: of the gradients.
        dtype: of all gradients.
        device: of all gradients.
    """

    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def size(self) -> int:
        """Number of elements of all gradients."""
        return sum(shape.numel() for shape in self.shapes)

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return self.size * self.dtype.itemsize

    def empty(self) -> Tensor:
        """Return a flat tensor for all gradients, with arbitrary contents."""
        return torch.empty(self.size, dtype=self.dtype, device=self.device)

    def views(self, memory: Tensor) -> list[Tensor]:
        """Return the place of each gradient in a flat tensor."""
        parts = torch.split(memory, [shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


class Reduction(Protocol):
    """The reduction of one bucket, again in every step."""

    @property
    def nbytes(self) -> int:
        """Bytes of its memory during a reduction, with that of the bucket."""
        ...

    def memory(self) -> Tensor:
        """Return flat memory for the gradients, in the dtype that is sent."""
        ...

    def begin(self) -> PendingWork:
        """Start the first round with what the memory holds."""
        ...

    def advance(self) -> PendingWork | None:
        """Start the second round; None if there is none."""
        ...

    def finish(self) -> Tensor:
        """Return the sum, flat, in the dtype of the gradients. Its memory is not used again."""
        ...

    def reset(self) -> None:
        """Forget what was kept from earlier steps."""
        ...


#: Makes the reduction of a bucket.
ReductionFactory = Callable[[BucketLayout], Reduction]


class AllReduce:
    """One all-reduce, for two replicas.

    Args:
        collectives: those of the replicas.
        layout: of the bucket.
    """

    def __init__(self, collectives: ReplicaCollectives, layout: BucketLayout) -> None:
        self._collectives, self._layout = collectives, layout
        self._bucket = torch.empty(0)

    @property
    def nbytes(self) -> int:
        """See `Reduction.nbytes`."""
        return self._layout.nbytes

    def memory(self) -> Tensor:
        """See `Reduction.memory`."""
        self._bucket = self._layout.empty()
        return self._bucket

    def begin(self) -> PendingWork:
        """See `Reduction.begin`."""
        return self._collectives.all_reduce(self._bucket)

    def advance(self) -> None:
        """See `Reduction.advance`."""

    def finish(self) -> Tensor:
        """See `Reduction.finish`. The sum is there already."""
        total, self._bucket = self._bucket, torch.empty(0)
        return total

    def reset(self) -> None:
        """See `Reduction.reset`. Nothing is kept."""


class InRankOrder:
    """Sum in the order of the ranks: each replica sums one piece (Rabenseifner 2004).

    Args:
        collectives: those of the replicas.
        layout: of the bucket.
        wire_dtype: of what is sent; that of the gradients if None.
    """

    def __init__(
        self,
        collectives: ReplicaCollectives,
        layout: BucketLayout,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self._collectives, self._layout = collectives, layout
        self._wire_dtype = wire_dtype or layout.dtype
        # Padded: all pieces have one size.
        self._length = -(-layout.size // collectives.count) * collectives.count
        self._sent = self._received = torch.empty(0)

    @property
    def nbytes(self) -> int:
        """See `Reduction.nbytes`."""
        wire_bytes = 2 * self._length * self._wire_dtype.itemsize
        return wire_bytes + (0 if self._wire_dtype is self._layout.dtype else self._layout.nbytes)

    def memory(self) -> Tensor:
        """See `Reduction.memory`."""
        device = self._layout.device
        self._sent = torch.empty(self._length, dtype=self._wire_dtype, device=device)
        self._sent[self._layout.size :] = 0
        return self._sent[: self._layout.size]

    def begin(self) -> PendingWork:
        """See `Reduction.begin`."""
        self._received = torch.empty_like(self._sent)
        return self._collectives.all_to_all(_bytes(self._received), _bytes(self._sent))

    def advance(self) -> PendingWork:
        """See `Reduction.advance`: sum the piece of this replica."""
        pieces = self._received.chunk(self._collectives.count)
        total = pieces[0].to(self._layout.dtype, copy=True)
        for piece in pieces[1:]:
            total += piece
        # The memory of what was sent is free; what was received is overwritten by the gather.
        piece = self._sent[: len(total)]
        piece.copy_(total)
        return self._collectives.all_gather(_bytes(self._received), _bytes(piece))

    def finish(self) -> Tensor:
        """See `Reduction.finish`."""
        total = self._received[: self._layout.size].to(self._layout.dtype)
        self._sent = self._received = torch.empty(0)
        return total

    def reset(self) -> None:
        """See `Reduction.reset`. Nothing is kept."""


class LowPrecision(InRankOrder):
    """Send 16 bits for each element, as torch's fp16_compress_hook and bf16_compress_hook.

    Unlike these, a sum is formed in the precision of the gradients and rounded once, so that it
    does not depend on the number of replicas by more than that; and it is not divided, since
    Penstock's losses carry their share of the batch. Numbers above 65,504 become infinite in
    float16.
    """


class PowerSgd:
    """A low-rank approximation of the sum of each matrix, with error feedback.

    With gradients M_i of replica i plus the error e_i that its last step left out, and a right
    factor Q from the last step:

        P = orthogonalise(sum_i (M_i + e_i) Q)
        Q = sum_i (M_i + e_i)^T P
        sum of the gradients = P Q^T;  e_i = M_i + e_i - P Q^T / replicas

    Vectors, and matrices that are no larger than their factors, are summed as they are.

    Source: Vogels, Karimireddy and Jaggi 2019, "PowerSGD", algorithms 1 and 2; see
    torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.

    Args:
        collectives: those of the replicas.
        layout: of the bucket.
        rank: number of columns of the factors.
    """

    def __init__(self, collectives: ReplicaCollectives, layout: BucketLayout, rank: int) -> None:
        self._collectives, self._layout, self._rank = collectives, layout, rank
        self._bucket = torch.empty(0)
        self._error = layout.empty()
        matrices: list[tuple[int, int, int]] = []  # first element, rows, columns
        vectors: list[tuple[int, int]] = []  # first element, elements
        first = 0
        for shape in layout.shapes:
            # As in torch's hook: the first dimension counts as rows, all others as columns.
            rows = shape[0] if len(shape) > 1 else 1
            columns = shape.numel() // rows if rows else 0
            if (rows + columns) * rank < rows * columns:
                matrices.append((first, rows, columns))
            else:
                vectors.append((first, shape.numel()))
            first += shape.numel()
        self._vector_places, self._matrix_places = vectors, matrices
        self._vectors: list[Tensor] = []
        self._matrices: list[Tensor] = []
        self._errors = _matrices(self._error, matrices)
        row_counts = [rows for _, rows, _ in matrices]
        column_counts = [columns for _, _, columns in matrices]
        left_count, right_count = sum(row_counts) * rank, sum(column_counts) * rank
        vector_count = sum(count for _, count in vectors)
        # The left factors and the vectors are summed together in the first round.
        self._first = self._error.new_empty(left_count + vector_count)
        self._second = self._error.new_empty(right_count)
        self._lefts = _factors(self._first, row_counts, rank)
        self._rights = _factors(self._second, column_counts, rank)
        self._plain = self._first[left_count:]
        self.reset()

    @property
    def nbytes(self) -> int:
        """See `Reduction.nbytes`."""
        return 2 * self._error.nbytes + self._first.nbytes + self._second.nbytes

    def memory(self) -> Tensor:
        """See `Reduction.memory`."""
        bucket = self._bucket = self._layout.empty()
        self._vectors = [bucket[start : start + count] for start, count in self._vector_places]
        self._matrices = _matrices(bucket, self._matrix_places)
        return bucket

    def begin(self) -> PendingWork:
        """See `Reduction.begin`."""
        for matrix, error, left, right in self._parts():
            matrix.add_(error)
            torch.mm(matrix, right, out=left)
        if self._vectors:
            torch.cat(self._vectors, out=self._plain)
        return self._collectives.all_reduce(self._first)

    def advance(self) -> PendingWork | None:
        """See `Reduction.advance`."""
        if not self._matrices:
            return None
        for matrix, _, left, right in self._parts():
            orthogonalise(left)
            torch.mm(matrix.t(), left, out=right)
        return self._collectives.all_reduce(self._second, second=True)

    def finish(self) -> Tensor:
        """See `Reduction.finish`."""
        for matrix, error, left, right in self._parts():
            product = left @ right.t()
            torch.sub(matrix, product, alpha=1 / self._collectives.count, out=error)
            matrix.copy_(product)
        if self._vectors:
            counts = [len(vector) for vector in self._vectors]
            torch._foreach_copy_(self._vectors, list(torch.split(self._plain, counts)))
        total, self._bucket = self._bucket, torch.empty(0)
        self._vectors, self._matrices = [], []
        return total

    def reset(self) -> None:
        """See `Reduction.reset`: forget errors, and start from the first right factors."""
        self._error.zero_()
        generator = torch.Generator().manual_seed(_POWER_SGD_SEED)
        values = torch.randn(self._second.shape, generator=generator, dtype=torch.float64)
        self._second.copy_(values)

    def _parts(self) -> zip[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Return the matrices with their errors and factors."""
        return zip(self._matrices, self._errors, self._lefts, self._rights, strict=True)


def orthogonalise(matrix: Tensor) -> None:
    """Make the columns of a matrix orthonormal in place, by Gram and Schmidt's method.

    A column that depends on those before it becomes zero up to rounding, so that it adds nothing.
    """
    # The same bound as in torch's hook: it keeps a column of zeros from being divided by zero.
    tiny = torch.finfo(matrix.dtype).tiny
    for index in range(matrix.shape[1]):
        column = matrix[:, index]
        column /= column.norm() + tiny
        if index + 1 < matrix.shape[1]:
            rest = matrix[:, index + 1 :]
            rest -= torch.outer(column, column @ rest)


def reduction_factory(collectives: ReplicaCollectives, hook: str) -> ReductionFactory:
    """Return what makes the reduction of each bucket.

    Args:
        collectives: those of the replicas.
        hook: see `parse_hook`.
    """
    kind, rank = parse_hook(hook)
    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16}

    def make(layout: BucketLayout) -> Reduction:
        """Make the reduction of a bucket. Only 32 and 64 bits are compressed."""
        compressible = layout.dtype in (torch.float32, torch.float64)
        if kind == "powersgd" and compressible:
            return PowerSgd(collectives, layout, rank)
        if kind in dtypes and compressible:
            return LowPrecision(collectives, layout, dtypes[kind])
        # The sum of two numbers does not depend on their order.
        if collectives.count == 2:
            return AllReduce(collectives, layout)
        return InRankOrder(collectives, layout)

    return make


def parse_hook(hook: str) -> tuple[str, int]:
    """Return kind and rank of a gradient hook: "none", "fp16", "bf16", "powersgd" or "powersgd-R".

    >>> parse_hook("bf16"), parse_hook("powersgd"), parse_hook("powersgd-8")
    (('bf16', 0), ('powersgd', 4), ('powersgd', 8))

    Raises:
        ValueError: it is none of these.
    """
    kind, dash, rank = hook.partition("-")
    if kind == "powersgd":
        if dash and not (rank.isascii() and rank.isdecimal() and 1 <= int(rank) <= 1024):
            raise ValueError(hook)
        return kind, int(rank or 4)
    if hook not in ("none", "fp16", "bf16"):
        raise ValueError(hook)
    return kind, 0


def _matrices(memory: Tensor, places: Sequence[tuple[int, int, int]]) -> list[Tensor]:
    """Return matrices in a flat tensor, each with its first element, rows and columns."""
    return [
        memory[first : first + rows * columns].view(rows, columns)
        for first, rows, columns in places
    ]


def _factors(memory: Tensor, lengths: Sequence[int], rank: int) -> list[Tensor]:
    """Return matrices of `rank` columns one after the other in a flat tensor."""
    factors = []
    first = 0
    for length in lengths:
        factors.append(memory[first : first + length * rank].view(length, rank))
        first += length * rank
    return factors


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor: back ends do not add up what they move here."""
    return tensor.view(torch.uint8)
