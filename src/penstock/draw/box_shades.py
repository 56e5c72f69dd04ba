"""What the two shades of a kind's boxes tell apart: a rank's stages where it holds several, else
the batches of a stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.draw.pairs import by_rank
from penstock.draw.stage_order import Ways
from penstock.event import Timeline
from penstock.schedule.op import Kind, Op

#: More ops than this are not drawn one by one anywhere, so nobody needs their batches.
_MOST_OPS = 300_000


@dataclass(frozen=True)
class Shades:
    """Which boxes have the second shade.

    Attributes:
        meaning: for a legend; empty where there is one shade only.
        ways: the stages of every rank.
        batch: by rank, stage and micro-batch the version that its U makes, where that is what
            shades tell.
    """

    meaning: str
    ways: Ways
    batch: Mapping[tuple[int, int, int], int] = field(default_factory=dict)

    @classmethod
    def of(cls, panel: Timeline, ways: Ways | None = None) -> Shades:
        """Those of a timeline."""
        ways = Ways.of(panel) if ways is None else ways
        if ways.several:
            return cls(
                "shades: the ways down and up the ranks"
                if ways.arrows
                else "shades: a rank's stages in turn",
                ways,
            )
        batch = _batches(panel) if len(panel.log.start) <= _MOST_OPS else {}
        # With one micro-batch each, numbers tell batches apart, and every other box shaded would
        # only be restless.
        several = len(set(batch.values())) > 1 and len(
            {(rank, stage, made) for (rank, stage, _), made in batch.items()}
        ) < len(batch)
        return cls("shades: batches in turn", ways, batch) if several else cls("", ways)

    def odd(self, rank: int, op: Op) -> bool:
        """Whether the op's box has the second shade."""
        if not self.batch or op.kind is Kind.U:
            return self.ways.odd(rank, op.stage)
        return self.batch.get((rank, op.stage, op.micro_batch), 1) % 2 == 0


def _batches(panel: Timeline) -> dict[tuple[int, int, int], int]:
    """By rank, stage and micro-batch, the version made by the first U of the stage after the
    gradient there.
    """
    found: dict[tuple[int, int, int], int] = {}
    for rank, row in enumerate(by_rank(panel)):
        made: dict[int, int] = {}
        for event in reversed(row):
            kind, stage, number = event.op
            if kind is Kind.U:
                made[stage] = number
            elif kind in (Kind.B, Kind.W) and stage in made:
                found[rank, stage, number] = made[stage]
    return found
