"""The batches that a rank's ops are about, found by the numbers that these have."""

from __future__ import annotations

from penstock.runtime.batch import Batch


class UnderWay:
    """Batches of `size` numbers each, of which a stream has several under way: batch t has the
    numbers from t * size on.

    The last batch may have fewer. Its missing numbers belong to no batch.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._batches: dict[int, Batch] = {}

    @staticmethod
    def alone(batch: Batch) -> UnderWay:
        """One batch."""
        return _Alone(batch)

    def add(self, index: int, batch: Batch) -> None:
        """One more."""
        self._batches[index] = batch

    def take(self, index: int) -> Batch:
        """One that is done."""
        return self._batches.pop(index)

    def clear(self) -> None:
        """None any more."""
        self._batches.clear()

    def find(self, number: int) -> tuple[Batch, int] | None:
        """The batch of a number, and its number in there; nothing if the batch is a small one
        without it.
        """
        index, own = divmod(number, self.size)
        batch = self._batches[index]
        return (batch, own) if own < len(batch.inputs) else None


class _Alone(UnderWay):
    """One batch, whose numbers are those of its micro-batches. Every op asks for it several times."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(max(1, len(batch.inputs)))
        self.add(0, batch)
        self._places = [(batch, number) for number in range(len(batch.inputs))]

    def find(self, number: int) -> tuple[Batch, int] | None:
        """See `UnderWay.find`."""
        return self._places[number] if number < len(self._places) else None
