"""Order of the stages of each rank, by the routes of micro-batches through the ranks.

A route is the sequence of ranks that a micro-batch visits on its way through the stages:

    interleaved, one route that visits       bidirectional, two routes that visit
    every rank twice                         every rank once
        rank 0 | s0 s2                           rank 0 | s0↓ s1↑
        rank 1 | s1 s3                           rank 1 | s1↓ s0↑

The stages of a rank are listed by route, then by position on it. So in both pictures the second
stages of all ranks belong together and have the same shade.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.draw.facts import stages_of_rank
from penstock.event import Timeline
from penstock.schedule.arrays import Array
from penstock.schedule.op import Kind

DOWN, UP = "↓", "↑"

#: A route through the ranks, as (stage, rank) in the order of stages.
Route = list[tuple[int, int]]


@dataclass(frozen=True)
class StageOrder:
    """Order of the stages of each rank, and the direction of their routes.

    Attributes:
        stages: per rank, the stages whose ops it ran, by route and then by position on it.
        arrows: the direction at (rank, stage), if routes of both directions meet on a rank.
    """

    stages: tuple[tuple[int, ...], ...]
    arrows: dict[tuple[int, int], str]

    @classmethod
    def of(cls, panel: Timeline) -> StageOrder:
        """Return the order of a timeline's stages."""
        route_index: dict[tuple[int, int], int] = {}
        direction: dict[tuple[int, int], str] = {}
        for index, route in enumerate(_routes(panel)):
            arrow = _direction(route)
            for stage, rank in route:
                route_index.setdefault((rank, stage), index)
                direction.setdefault((rank, stage), arrow)
        stages = []
        bidirectional = False
        for rank, unordered in enumerate(stages_of_rank(panel)):
            order = [(route_index.get((rank, stage), 0), stage) for stage in unordered]
            stages.append(tuple(stage for _, stage in sorted(order)))
            bidirectional |= len({direction.get((rank, stage)) for stage in unordered}) > 1
        return cls(tuple(stages), direction if bidirectional else {})

    @property
    def has_shared_ranks(self) -> bool:
        """Whether any rank holds more than one stage."""
        return any(len(stages) > 1 for stages in self.stages)

    def is_second_shade(self, rank: int, stage: int) -> bool:
        """Return whether boxes of a stage have the second shade.

        They do if it is the second, fourth and so on of its rank.
        """
        stages = self.stages[rank]
        return stage in stages and stages.index(stage) % 2 == 1

    def needs_stage_label(self, rank: int, stage: int) -> bool:
        """Return whether a box has to name its stage, because it is not the only one of its rank.

        The activations that a rank stores for another belong to a stage that it does not run.
        """
        return len(self.stages[rank]) != 1 or self.stages[rank][0] != stage

    def rank_labels(self) -> list[str]:
        """Return the stages of each rank as text, `s0 s4`.

        The texts are empty if every rank holds at most the one stage with its own number.
        """
        if all(stages in ((), (rank,)) for rank, stages in enumerate(self.stages)):
            return [""] * len(self.stages)
        labels = []
        for rank, stages in enumerate(self.stages):
            names = [f"s{stage}{self.arrows.get((rank, stage), '')}" for stage in stages]
            labels.append(" ".join(names) if len(names) <= 4 else f"{names[0]} … {names[-1]}")
        return labels


def number_text(
    panels: Sequence[Timeline], *, has_versions: bool = False, has_stages: bool = True
) -> str:
    """Return the legend's text on the numbers in boxes.

    Args:
        panels: the timelines.
        has_versions: whether updates have numbers too.
        has_stages: whether boxes on ranks with several stages have the stage.
    """
    text = "numbers: micro-batch"
    if any(panel.slicing is not None for panel in panels):
        text += ".slice"
    if has_versions:
        text += ", of U the weight version"
    if has_stages and any(StageOrder.of(panel).has_shared_ranks for panel in panels):
        text += ", s: stage"
    return text


def has_timed_updates(panels: Sequence[Timeline]) -> bool:
    """Return whether an update takes time, so that its box may have a number."""
    events = (event for panel in panels for event in panel.compute)
    return any(event.op.kind is Kind.U and event.end > event.start for event in events)


def _direction(route: Route) -> str:
    """Return the arrow of a route, by its first and last rank; empty if they are the same."""
    first_rank, last_rank = route[0][1], route[-1][1]
    if first_rank < last_rank:
        return DOWN
    return UP if first_rank > last_rank else ""


def _routes(panel: Timeline) -> list[Route]:
    """Return all routes that micro-batches take, in the order of their first micro-batches."""
    ops = panel.log.ops
    forward = ops.of_kind(Kind.F)
    if not forward.any():
        return []
    stages, stage_index = _unique_with_index(ops.stage[forward])
    micro_batches, micro_batch_index = _unique_with_index(ops.micro_batch[forward])
    # Per micro-batch and stage the rank that ran its forward, -1 if none did.
    ranks = np.full((len(micro_batches), len(stages)), -1, np.int64)
    ranks[micro_batch_index, stage_index] = ops.rank[forward]
    # A route is a distinct row; its index is that of the first micro-batch that takes it.
    _, first_rows = np.unique(ranks, axis=0, return_index=True)
    routes = []
    for row in sorted(first_rows):
        visits = zip(stages.tolist(), ranks[row].tolist(), strict=True)
        routes.append([(int(stage), int(rank)) for stage, rank in visits if rank >= 0])
    return routes


def _unique_with_index(values: Array) -> tuple[Array, Array]:
    """Return the sorted unique values, and per value its index among them."""
    unique, index = np.unique(values, return_inverse=True)
    return unique, index.reshape(-1)
