"""Meaning of the two shades of a kind's boxes.

They distinguish the stages of a rank if ranks hold several, otherwise the batches of a stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.draw.pairs import events_by_rank
from penstock.draw.stage_order import StageOrder
from penstock.event import Timeline
from penstock.schedule.op import BACKWARD_ENDS, Kind, Op

#: No drawing has a box for each op above this number, so batches are not needed.
_MAX_OPS = 300_000

#: From rank, stage and micro-batch to the weight version that its gradient goes into.
Batches = Mapping[tuple[int, int, int], int]


@dataclass(frozen=True)
class BoxShades:
    """Which boxes have the second shade.

    Attributes:
        meaning: text for a legend; empty if there is only one shade.
        stage_order: the stages of each rank.
        batches: the batch of each micro-batch, if shades distinguish batches; otherwise empty.
    """

    meaning: str
    stage_order: StageOrder
    batches: Batches = field(default_factory=dict)

    @classmethod
    def of(cls, panel: Timeline, stage_order: StageOrder | None = None) -> BoxShades:
        """Return the shades of a timeline.

        Args:
            panel: the timeline.
            stage_order: its order of stages, if the caller has it already.
        """
        stage_order = StageOrder.of(panel) if stage_order is None else stage_order
        if stage_order.has_shared_ranks:
            if stage_order.arrows:
                return cls("shades: stages down and up the ranks", stage_order)
            return cls("shades: stages of a rank", stage_order)
        batches = _batches(panel) if len(panel.log.start) <= _MAX_OPS else {}
        several_batches = len(set(batches.values())) > 1
        # With one micro-batch per batch, numbers already distinguish batches, and shading every
        # second box would only make the figure restless.
        distinct = {(rank, stage, version) for (rank, stage, _), version in batches.items()}
        if several_batches and len(distinct) < len(batches):
            return cls("shades: alternating batches", stage_order, batches)
        return cls("", stage_order)

    def is_second(self, rank: int, op: Op) -> bool:
        """Return whether the box of an op has the second shade."""
        if not self.batches or op.kind is Kind.U:
            return self.stage_order.is_second_shade(rank, op.stage)
        return self.batches.get((rank, op.stage, op.micro_batch), 1) % 2 == 0


def _batches(panel: Timeline) -> dict[tuple[int, int, int], int]:
    """Return per rank, stage and micro-batch the version that its gradient goes into.

    It is the version that the first U of the stage after the gradient produces.
    """
    batches: dict[tuple[int, int, int], int] = {}
    for rank, row in enumerate(events_by_rank(panel)):
        next_version: dict[int, int] = {}
        # Backwards in time, so that the next update of a stage is known at each gradient.
        for event in reversed(row):
            kind, stage, number = event.op
            if kind is Kind.U:
                next_version[stage] = number
            elif kind in BACKWARD_ENDS and stage in next_version:
                batches[rank, stage, number] = next_version[stage]
    return batches
