"""Stream: how an asynchronous schedule goes on from batch to batch."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import ScheduleError


@dataclass(frozen=True)
class Waves:
    """Copies of a stage that each update for themselves and tell each other only now and then (Park
    et al. 2020, HetPipe).

    Attributes:
        length: updates of one copy in a wave. The last U of a wave hands the wave's sum to the
        other copies. distance: D. That U also takes in the waves of the others, up to D waves
        before its own, and waits until they are there.
    """

    length: int
    distance: int = 0

    def awaited(self, version: int) -> int | None:
        """The version that the other copies must have made, or make together with a copy that makes
        `version`; None if it waits for nobody.

        >>> [Waves(length=2, distance=1).awaited(version) for version in (1, 2, 3, 4, 5, 6)]
        [None, None, None, 2, None, 4]
        """
        other = version - self.distance * self.length
        return other if version % self.length == 0 and other >= self.length else None


@dataclass(frozen=True)
class Stream:
    """What the programs of an asynchronous schedule are a part of: batch after batch, with no flush
    between them.

    Batch t has the micro-batches from t * M on, M in each, and every stage has a U of its own for
    it.

    Attributes:
        batches: how many of them the programs run. From some place on they repeat, so that any
        number can be run. weights: name of the weight rule that the order of the ops is made for.
        pipelines: how many copies of the weights take turns on the same ranks: batch t reads and
        updates copy t mod `pipelines`
            (Chen et al. 2023, AvgPipe).
        waves: when copies of a stage on several ranks do not meet at every U.
    """

    batches: int
    weights: str = "stash"
    pipelines: int = 1
    waves: Waves | None = None

    def __post_init__(self) -> None:
        for name, number, least in (
            ("batches", self.batches, 1),
            ("pipelines", self.pipelines, 1),
            ("wave length", self.waves.length if self.waves else 1, 1),
            ("wave distance", self.waves.distance if self.waves else 0, 0),
        ):
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise ScheduleError(f"a stream's {name} is {least} or more, not {number!r}")
