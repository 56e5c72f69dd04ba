"""Costs of a chain whose ranks hold several stages each, in the form that the searches read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypedDict

import numpy as np

from penstock.errors import PartitionError
from penstock.partition.bottleneck import ROUNDING
from penstock.partition.dp_loops import Placed
from penstock.partition.validation import (
    Costs,
    Floats,
    bytes_of,
    check_number,
    in_flight_of,
    limits_of,
    links_of,
    numbers_of,
    rows_of,
    sums_of,
)


class PlacedOptions(TypedDict, total=False):
    """Keyword arguments of `looped` and `folded`.

    transfer: shape (layers - 1,): seconds of the cut after a layer, if it is between two ranks;
        free by default. Cuts between the same two ranks share their link.
    fixed_bytes, saved_bytes: bytes of a layer (weights, gradients, optimizer state), and those it
        saves per micro-batch in flight, shape (layers,) or (ranks, layers); none by default.
    in_flight: per stage, the maximum number of micro-batches in flight, shape (stages,); 1 by
        default.
    limits: bytes of every rank, shape (ranks,); infinite by default.
    slack: relative amount by which the busiest rank may exceed the least bottleneck, to get a
        smaller largest stage; 0 by default. With 0, ranks are even but stages often are not, and
        uneven stages make a pipeline wait.
    """

    transfer: Sequence[float] | Floats | None
    fixed_bytes: Costs | None
    saved_bytes: Costs | None
    in_flight: Sequence[float] | None
    limits: Sequence[float] | None
    slack: float


@dataclass(frozen=True)
class Placement:
    """The costs of a chain and the rank of every stage.

    costs: `seconds` and `memory` have a row of prefix sums per stage, `links` the cut before every
        layer.
    ranks_of: per stage, its rank.
    link_of: per cut, the index of the pair of ranks that it connects, or -1 if both are the same
        rank.
    slack: see `PlacedOptions`.
    """

    costs: Placed
    ranks_of: tuple[int, ...]
    link_of: tuple[int, ...]
    slack: float = 0.0

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.ranks_of)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.costs.limits)

    @property
    def layers(self) -> int:
        """The number of layers."""
        return int(self.costs.seconds.shape[1]) - 1

    def of_stages(self, ends: Sequence[int], rows: Floats) -> Floats:
        """Return the seconds or bytes of every stage of the cut at these ends.

        Args:
            ends: per stage, the layer that it ends before.
            rows: `costs.seconds` or `costs.memory`.
        """
        stops = np.asarray(ends)
        starts = np.concatenate(([0], stops[:-1]))
        stage = np.arange(self.stages)
        per_stage: Floats = rows[stage, stops] - rows[stage, starts]
        return per_stage

    def of_ranks(self, ends: Sequence[int], rows: Floats) -> Floats:
        """Return the seconds or bytes of every rank of the cut; arguments as in `of_stages`."""
        per_rank = np.bincount(self.ranks_of, self.of_stages(ends, rows), self.ranks)
        return per_rank.astype(np.float64)

    def of_links(self, ends: Sequence[int]) -> Floats:
        """Return the seconds of every link between ranks."""
        links = np.asarray(self.link_of, dtype=np.int64)
        crossing = self.costs.links[np.asarray(ends[:-1], dtype=np.int64)]
        between_ranks = links >= 0
        count = max(int(links.max(initial=-1)) + 1, 1)
        per_link = np.bincount(links[between_ranks], crossing[between_ranks], count)
        return per_link.astype(np.float64)

    def bottleneck(self, ends: Sequence[int]) -> float:
        """Return the seconds of the busiest rank or link."""
        return float(max(self.of_ranks(ends, self.costs.seconds).max(), self.of_links(ends).max()))

    def fits(self, ends: Sequence[int]) -> bool:
        """Return whether every rank stays within its memory limit."""
        return bool((self.of_ranks(ends, self.costs.memory) <= self.costs.limits).all())

    def largest(self, ends: Sequence[int]) -> float:
        """Return the seconds of the largest stage."""
        return float(self.of_stages(ends, self.costs.seconds).max())

    def best(self, cuts: Sequence[Sequence[int]]) -> list[int] | None:
        """Return the cut with the smallest largest stage, of those within the slack's bottleneck.

        None if there are no cuts.
        """
        bottlenecks = [self.bottleneck(ends) for ends in cuts]
        # ROUNDING: the same sum in another order of terms must not exclude the best cut.
        cutoff = min(bottlenecks, default=0.0) * (1 + self.slack) * (1 + ROUNDING)
        candidates = [
            list(ends) for ends, value in zip(cuts, bottlenecks, strict=True) if value <= cutoff
        ]
        return min(candidates, key=self.largest, default=None)


def placement(seconds: Costs, ranks_of: Sequence[int], options: PlacedOptions) -> Placement:
    """Return the validated costs of a chain whose stage s is on rank `ranks_of[s]`.

    Raises:
        PartitionError: the shapes are inconsistent, or a cost is negative.
    """
    stages, ranks = len(ranks_of), max(ranks_of) + 1
    numbers = numbers_of(seconds, "seconds")
    layers = numbers.shape[-1]
    if stages > layers:
        raise PartitionError(
            f"cannot make {stages} stages from {layers} layers: every stage needs at least one"
        )
    links = links_of(options.get("transfer"), layers)
    times = sums_of(rows_of(numbers, "seconds", ranks, layers)[list(ranks_of)])
    memory = sums_of(_memory(ranks_of, layers, options))
    allowed = limits_of(options.get("limits"), "limits", ranks, "ranks")
    slack = check_number("slack", options.get("slack", 0.0), zero=True)
    costs = Placed(times, memory, links, allowed)
    return Placement(costs, tuple(ranks_of), _links_between(ranks_of), slack)


def _memory(ranks_of: Sequence[int], layers: int, options: PlacedOptions) -> Floats:
    """Return the bytes of every layer in every stage; shape (stages, layers)."""
    ranks = max(ranks_of) + 1
    in_flight = in_flight_of(options.get("in_flight"), len(ranks_of))
    fixed = bytes_of(options.get("fixed_bytes"), "fixed_bytes", ranks, layers)
    saved = bytes_of(options.get("saved_bytes"), "saved_bytes", ranks, layers)
    stages = list(ranks_of)
    memory: Floats = fixed[stages] + in_flight[:, None] * saved[stages]
    return memory


def _links_between(ranks_of: Sequence[int]) -> tuple[int, ...]:
    """Return for every cut the index of the pair of ranks it connects, -1 within one rank."""
    # Activations one way and gradients the other use the same link, so that a pair of ranks counts
    # once.
    pairs = [(min(pair), max(pair)) for pair in pairwise(ranks_of)]
    indices: dict[tuple[int, int], int] = {}
    for low, high in pairs:
        if low != high:
            indices.setdefault((low, high), len(indices))
    return tuple(indices.get(pair, -1) for pair in pairs)
