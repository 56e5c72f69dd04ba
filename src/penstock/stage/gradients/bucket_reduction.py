"""How one bucket of gradients is summed over the replicas of a stage.

A reduction has two rounds, each of which starts an operation of `ReplicaCollectives` and does not
wait for it:

    begin    starts the first round
    advance  when that has ended, starts the second one
    finish   when that has ended, the bucket holds the sum

| reduction | rounds | result |
|---|---|---|
| `AllReduce` | one all-reduce | for two replicas, to the bit that of `InRankOrder` |
| `InRankOrder` | pieces to their owners, who sum them; sums to all | to the bit the sum in the order of the ranks |
| `LowPrecision` | likewise, in 16 bits | gradients, and then their sum, are rounded to 16 bits; summed in 32 |
| `PowerSgd` | sums of two thin matrices | a low-rank approximation; what it leaves out is added to the next gradient |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from penstock.transport.replica_collectives import ReplicaCollectives
from penstock.transport.wire import PendingWork

#: Seed of the first right factors of PowerSGD, which are the same on all replicas.
_POWER_SGD_SEED = 0x5EED


class Reduction(Protocol):
    """The reduction of one bucket, again in every step."""

    @property
    def nbytes(self) -> int:
        """Bytes of its memory, without the bucket."""
        ...

    def begin(self) -> PendingWork:
        """Start the first round with what the bucket holds."""
        ...

    def advance(self) -> PendingWork | None:
        """Start the second round; None if there is none."""
        ...

    def finish(self) -> None:
        """Store the sum in the bucket."""
        ...

    def reset(self) -> None:
        """Forget what was kept from earlier steps."""
        ...


#: Makes the reduction of a bucket from its memory and the shapes of its tensors.
ReductionFactory = Callable[[Tensor, Sequence[torch.Size]], Reduction]


class AllReduce:
    """One all-reduce, for two replicas.

    Args:
        collectives: those of the replicas.
        bucket: a flat tensor.
    """

    def __init__(self, collectives: ReplicaCollectives, bucket: Tensor) -> None:
        self._collectives, self._bucket = collectives, bucket

    @property
    def nbytes(self) -> int:
        """See `Reduction.nbytes`."""
        return 0

    def begin(self) -> PendingWork:
        """See `Reduction.begin`."""
        return self._collectives.all_reduce(self._bucket)

    def advance(self) -> None:
        """See `Reduction.advance`."""

    def finish(self) -> None:
        """See `Reduction.finish`. The sum is there already."""

    def reset(self) -> None:
        """See `Reduction.reset`. Nothing is kept."""


class InRankOrder:
    """Sum in the order of the ranks: each replica sums one piece (Rabenseifner 2004).

    Args:
        collectives: those of the replicas.
        bucket: a flat tensor.
        wire_dtype: of what is sent; that of the bucket if None.
    """

    def __init__(
        self,
        collectives: ReplicaCollectives,
        bucket: Tensor,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self._collectives, self._bucket = collectives, bucket
        count = collectives.count
        length = -(-len(bucket) // count) * count
        self._sent = torch.zeros(length, dtype=wire_dtype or bucket.dtype, device=bucket.device)
        self._received = torch.empty_like(self._sent)

    @property
    def nbytes(self) -> int:
        """See `Reduction.nbytes`."""
        return self._sent.nbytes + self._received.nbytes

    def begin(self) -> PendingWork:
        """See `Reduction.begin`."""
        self._sent[: len(self._bucket)] = self._bucket
        return self._collectives.all_to_all(_bytes(self._received), _bytes(self._sent))

    def advance(self) -> PendingWork:
        """See `Reduction.advance`: sum the piece of this replica."""
        pieces = self._received.chunk(self._collectives.count)
        total = pieces[0].to(self._bucket.dtype, copy=True)
        for piece in pieces[1:]:
            total += piece
        # The memory of what was sent is free; what was received is overwritten by the gather.
        piece = self._sent[: len(total)]
        piece.copy_(total)
        return self._collectives.all_gather(_bytes(self._received), _bytes(piece))

    def finish(self) -> None:
        """See `Reduction.finish`."""
        self._bucket.copy_(self._received[: len(self._bucket)])

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
        bucket: a flat tensor.
        shapes: the shapes of its tensors.
        rank: number of columns of the factors.
    """

    def __init__(
        self,
        collectives: ReplicaCollectives,
        bucket: Tensor,
        shapes: Sequence[torch.Size],
        rank: int,
    ) -> None:
        self._collectives, self._bucket, self._rank = collectives, bucket, rank
        self._error = torch.zeros_like(bucket)
        matrices: list[tuple[int, int, int]] = []  # first element, rows, columns
        vectors: list[tuple[int, int]] = []  # first element, elements
        first = 0
        for shape in shapes:
            rows = shape[0] if len(shape) > 1 else 1
            columns = shape.numel() // rows if rows else 0
            if min(rows, columns) > rank and (rows + columns) * rank < rows * columns:
                matrices.append((first, rows, columns))
            else:
                vectors.append((first, shape.numel()))
            first += shape.numel()
        self._vectors = [bucket[start : start + count] for start, count in vectors]
        self._matrices = [bucket[a : a + m * n].view(m, n) for a, m, n in matrices]
        self._errors = [self._error[a : a + m * n].view(m, n) for a, m, n in matrices]
        left_count = sum(m for _, m, _ in matrices) * rank
        right_count = sum(n for *_, n in matrices) * rank
        vector_count = sum(count for _, count in vectors)
        # The left factors and the vectors are summed together in the first round.
        self._first = bucket.new_empty(left_count + vector_count)
        self._second = bucket.new_empty(right_count)
        self._lefts = _factors(self._first, [m for _, m, _ in matrices], rank)
        self._rights = _factors(self._second, [n for *_, n in matrices], rank)
        self._plain = self._first[left_count:]
        self.reset()

    @property
    def nbytes(self) -> int:
        """See `Reduction.nbytes`."""
        return self._error.nbytes + self._first.nbytes + self._second.nbytes

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

    def finish(self) -> None:
        """See `Reduction.finish`."""
        for matrix, error, left, right in self._parts():
            total = left @ right.t()
            torch.sub(matrix, total, alpha=1 / self._collectives.count, out=error)
            matrix.copy_(total)
        if self._vectors:
            counts = [len(vector) for vector in self._vectors]
            torch._foreach_copy_(self._vectors, list(torch.split(self._plain, counts)))

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

    def make(bucket: Tensor, shapes: Sequence[torch.Size]) -> Reduction:
        """Make the reduction of a bucket. Only 32 and 64 bits are compressed."""
        compressible = bucket.dtype in (torch.float32, torch.float64)
        if kind == "powersgd" and compressible:
            return PowerSgd(collectives, bucket, shapes, rank)
        if kind in dtypes and compressible:
            return LowPrecision(collectives, bucket, dtypes[kind])
        # The sum of two numbers does not depend on their order.
        if collectives.count == 2:
            return AllReduce(collectives, bucket)
        return InRankOrder(collectives, bucket)

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
