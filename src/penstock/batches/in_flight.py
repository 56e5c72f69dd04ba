"""Batches in flight, looked up by the micro-batch numbers of ops."""

from __future__ import annotations

from penstock.batches.batch import Batch


class BatchesInFlight:
    """The batches in flight; a stream has several.

    Batch t has the numbers from t * size on. A batch may have fewer micro-batches than `size`; its
    missing numbers belong to no batch.

    Args:
        size: numbers per batch.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._batches: dict[int, Batch] = {}

    @staticmethod
    def alone(batch: Batch) -> BatchesInFlight:
        """Return the container for a single batch."""
        return _SingleBatch(batch)

    def add(self, index: int, batch: Batch) -> None:
        """Add a batch."""
        self._batches[index] = batch

    def take(self, index: int) -> Batch:
        """Remove a batch that is done, and return it."""
        return self._batches.pop(index)

    def clear(self) -> None:
        """Remove all batches."""
        self._batches.clear()

    def find(self, number: int) -> tuple[Batch, int] | None:
        """Return the batch of a number and the number in that batch.

        Returns:
            None if the batch is small and has no micro-batch of that number.
        """
        index, number_in_batch = divmod(number, self.size)
        batch = self._batches[index]
        return (batch, number_in_batch) if number_in_batch < len(batch.inputs) else None


class _SingleBatch(BatchesInFlight):
    """A single batch. Its entries are precomputed: every op looks them up several times."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(max(1, len(batch.inputs)))
        self.add(0, batch)
        self._entries = [(batch, number) for number in range(len(batch.inputs))]

    def find(self, number: int) -> tuple[Batch, int] | None:
        """See `BatchesInFlight.find`."""
        return self._entries[number] if number < len(self._entries) else None
