"""Walk: one pass over programs with updates, which notes how far every stage's weights have come
when a micro-batch gets there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.schedule.op import Kind, Op
from penstock.weights.reads import Place

#: A rank's ops, each with its batch.
Row = Sequence[tuple[Op, int]]


@dataclass(slots=True)
class Standing:
    """What is noted of one micro-batch on one stage.

    Versions are of the copy of the weights that it uses, and the newest at that moment: at its F,
    at its B (or I), and at its gradient (B or W). `order` is that of its F among those of its batch
    on its rank, `after` the number of the next F on the same copy of the weights, None if there is
    none.
    """

    rank: int
    batch: int
    order: int
    at_forward: int
    at_backward: int = 0
    at_gradient: int = 0
    after: int | None = None


@dataclass(slots=True)
class Share:
    """What a rank runs of a batch on one stage: how many micro-batches, versions at the first F and
    the first B, the last gradient.
    """

    count: int
    at_forward: int
    at_backward: int | None = None
    last: int = 0


@dataclass(frozen=True)
class Walk:
    """What the pass has found: per stage, standings by number; and shares by rank, stage and batch."""

    standings: tuple[dict[int, Standing], ...]
    shares: dict[tuple[int, int, int], Share] = field(default_factory=dict)

    def share(self, stage: int, number: int) -> Share:
        """That to which a micro-batch belongs."""
        found = self.standings[stage][number]
        return self.shares[found.rank, stage, found.batch]

    def place(self, stage: int, number: int) -> Place:
        """Where a micro-batch stands on a stage, as weight rules want to know it."""
        found, share = self.standings[stage][number], self.share(stage, number)
        return Place(
            stage,
            len(self.standings),
            found.batch,
            found.order,
            share.count,
            found.at_forward,
            found.at_backward,
            share.at_forward,
            share.at_backward or 0,
            self.standings[0][number].at_forward,
        )


def walk(rows: Sequence[Row], stages: int, pipelines: int = 1) -> Walk:
    """Walk through the programs of all ranks.

    Args:
        rows: of sound programs, each op with its batch.
        stages: how many there are.
        pipelines: how many copies of the weights take turns: batch t uses copy t mod `pipelines`.
    """
    found = Walk(tuple({} for _ in range(stages)))
    for rank, row in enumerate(rows):
        newest: dict[tuple[int, int], int] = {}
        before: dict[tuple[int, int], Standing] = {}
        for (kind, stage, number), batch in row:
            copy = stage, batch % pipelines
            version = newest.get(copy, 0)
            if kind is Kind.F:
                share = found.shares.setdefault((rank, stage, batch), Share(0, version))
                new = Standing(rank, batch, share.count, version)
                share.count += 1
                if copy in before:
                    before[copy].after = number
                before[copy] = found.standings[stage][number] = new
            elif kind is Kind.U:
                newest[copy] = version + 1
            elif kind in (Kind.B, Kind.I, Kind.W):
                standing, share = found.standings[stage][number], found.shares[rank, stage, batch]
                if kind is not Kind.W:
                    standing.at_backward = version
                    if share.at_backward is None:
                        share.at_backward = version
                if kind is not Kind.I:
                    standing.at_gradient = version
                    share.last = number
    return found
