"""What tells the stages of one rank apart: the ways that micro-batches take through the ranks.

    interleaved, one way past every rank twice       bidirectional, two ways past every rank once
        rank 0 | s0 s2                                   rank 0 | s0↓ s1↑
        rank 1 | s1 s3                                   rank 1 | s1↓ s0↑

A rank's stages are listed by way, then along it, so that in both pictures the second of every rank
goes together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.draw.facts import stages_of_rank
from penstock.event import Timeline
from penstock.schedule.arrays import Array
from penstock.schedule.op import Kind

DOWN, UP = "↓", "↑"


@dataclass(frozen=True)
class Ways:
    """Per rank, the stages whose ops it ran, by way and then along it; `arrows` has (rank, stage)
    where ways run both ways.
    """

    stages: tuple[tuple[int, ...], ...]
    arrows: dict[tuple[int, int], str]

    @classmethod
    def of(cls, panel: Timeline) -> Ways:
        """Those of a timeline."""
        order: dict[tuple[int, int], int] = {}
        heading: dict[tuple[int, int], str] = {}
        for number, way in enumerate(_ways(panel)):
            arrow = DOWN if way[0][1] < way[-1][1] else UP if way[0][1] > way[-1][1] else ""
            for stage, rank in way:
                order.setdefault((rank, stage), number)
                heading.setdefault((rank, stage), arrow)
        stages = tuple(
            tuple(sorted(row, key=lambda stage: (order.get((rank, stage), 0), stage)))
            for rank, row in enumerate(stages_of_rank(panel))
        )
        crossing = any(
            len({heading.get((rank, stage)) for stage in row}) > 1
            for rank, row in enumerate(stages)
        )
        return cls(stages, heading if crossing else {})

    @property
    def several(self) -> bool:
        """Whether any rank holds more than one stage."""
        return any(len(row) > 1 for row in self.stages)

    def odd(self, rank: int, stage: int) -> bool:
        """Whether boxes of this stage are shaded: it is the second, fourth … of its rank."""
        row = self.stages[rank]
        return stage in row and row.index(stage) % 2 == 1

    def named(self, rank: int, stage: int) -> bool:
        """Whether a box has to say its stage: its rank holds others, or not even this one."""
        return len(self.stages[rank]) != 1 or self.stages[rank][0] != stage

    def names(self) -> list[str]:
        """Per rank its stages, `s0 s4`; nothing where every rank holds the one stage of its own
        number.
        """
        if all(row in ((), (rank,)) for rank, row in enumerate(self.stages)):
            return [""] * len(self.stages)
        rows = (
            [f"s{stage}{self.arrows.get((rank, stage), '')}" for stage in row]
            for rank, row in enumerate(self.stages)
        )
        return [" ".join(row) if len(row) <= 4 else f"{row[0]} … {row[-1]}" for row in rows]


def _ways(panel: Timeline) -> list[list[tuple[int, int]]]:
    """Every way through the ranks that a micro-batch takes, as its stages with their ranks, the
    first micro-batch's first.
    """
    ops = panel.log.ops
    forward = ops.of_kind(Kind.F)
    if not forward.any():
        return []
    stages, stage = _counted(ops.stage[forward])
    numbers, number = _counted(ops.micro_batch[forward])
    ranks = np.full((len(numbers), len(stages)), -1, np.int64)
    ranks[number, stage] = ops.rank[forward]
    _, first = np.unique(ranks, axis=0, return_index=True)
    return [
        [
            (int(stages[place]), int(rank))
            for place, rank in enumerate(ranks[row].tolist())
            if rank >= 0
        ]
        for row in sorted(first)
    ]


def _counted(values: Array) -> tuple[Array, Array]:
    found, places = np.unique(values, return_inverse=True)
    return found, places.reshape(-1)
