"""Stream: how an asynchronous schedule continues from batch to batch."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import ScheduleError


@dataclass(frozen=True)
class Waves:
    """Copies of a stage that update independently and exchange their updates once per wave.

    Source: Park et al. 2020, HetPipe.

    Attributes:
        length: number of updates of one copy in a wave. The last U of a wave sends the sum of the
            wave's updates to the other copies.
        distance: D. The last U of a wave also applies the waves of the other copies, up to D waves
            before its own, and waits until they have arrived.
    """

    length: int
    distance: int = 0

    def awaited(self, version: int) -> int | None:
        """Return the version that the other copies must have reached when a copy makes `version`.

        If it is `version` itself, the copies make it together. None if the copy waits for no other.

        >>> [Waves(length=2, distance=1).awaited(version) for version in (1, 2, 3, 4, 5, 6)]
        [None, None, None, 2, None, 4]
        """
        awaited = version - self.distance * self.length
        return awaited if version % self.length == 0 and awaited >= self.length else None


@dataclass(frozen=True)
class Stream:
    """Batch after batch without a flush between them; the programs of a schedule are a part of it.

    Batch t consists of the micro-batches t * M to (t + 1) * M - 1, and every stage has one U for
    it.

    Attributes:
        batches: number of batches in the programs. From some batch on the programs repeat, so that
            any number of batches can be run.
        weights: name of the weight rule that the order of the ops is designed for.
        pipelines: number of copies of the weights that take turns on the same ranks: batch t reads
            and updates copy t mod `pipelines` (Chen et al. 2023, AvgPipe).
        waves: when copies of a stage on several ranks exchange updates, if not at every U.
    """

    batches: int
    weights: str = "stash"
    pipelines: int = 1
    waves: Waves | None = None

    def __post_init__(self) -> None:
        """Check that all numbers are integers in their range."""
        for name, number, minimum in (
            ("batches", self.batches, 1),
            ("pipelines", self.pipelines, 1),
            ("wave length", self.waves.length if self.waves else 1, 1),
            ("wave distance", self.waves.distance if self.waves else 0, 0),
        ):
            if isinstance(number, bool) or not isinstance(number, int) or number < minimum:
                raise ScheduleError(f"a stream's {name} is {minimum} or more, not {number!r}")
