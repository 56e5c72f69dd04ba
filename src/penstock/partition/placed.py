"""Costs of a chain of which every rank has several stages, as the searches for its cut read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypedDict

import numpy as np

from penstock.errors import PartitionError
from penstock.partition.bottleneck import ROUNDING
from penstock.partition.checks import (
    Costs,
    Floats,
    check_costs,
    check_number,
    numbers_of,
    rows_of,
    sums_of,
)
from penstock.partition.loops import Placed


class PlacedOptions(TypedDict, total=False):
    """What the searches take besides seconds and placement.

    transfer: shape (layers - 1,): seconds of the cut after a layer, where it is between two ranks;
    none if not given. Cuts
        between the same two ranks share their link.
    holds, kept: bytes that a layer takes, and that it keeps for a micro-batch in flight, shape
    (layers,) or (ranks, layers). in_flight: micro-batches that each stage has in flight at most,
    shape (stages,); 1 if not given. limits: bytes of every rank, shape (ranks,); infinite if not
    given. slack: by how much, relatively, the busiest rank may be above the least that was found,
    for the largest stage's sake; 0 if not
        given. Without any, ranks are even and stages often are not, and uneven stages make a
        pipeline wait.
    """

    transfer: Sequence[float] | Floats | None
    holds: Costs | None
    kept: Costs | None
    in_flight: Sequence[float] | None
    limits: Sequence[float] | None
    slack: float


@dataclass(frozen=True)
class Placement:
    """A chain and the ranks of its stages.

    `costs.seconds` and `costs.memory` have a row of prefix sums per stage, `costs.links` the cut
    before every layer. `link_of`: of every cut, the number of the pair of ranks that it is between,
    or -1 if that is one rank.
    """

    costs: Placed
    ranks_of: tuple[int, ...]
    link_of: tuple[int, ...]
    slack: float = 0.0

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.ranks_of)

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.costs.limits)

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return int(self.costs.seconds.shape[1]) - 1

    def of_stages(self, ends: Sequence[int], rows: Floats) -> Floats:
        """What every stage of the cut at these ends takes, of seconds or bytes."""
        stops, number = np.asarray(ends), np.arange(self.stages)
        found: Floats = rows[number, stops] - rows[number, np.concatenate(([0], stops[:-1]))]
        return found

    def of_ranks(self, ends: Sequence[int], rows: Floats) -> Floats:
        """The same for every rank."""
        found: Floats = np.bincount(self.ranks_of, self.of_stages(ends, rows), self.ranks).astype(
            np.float64
        )
        return found

    def of_links(self, ends: Sequence[int]) -> Floats:
        """Seconds of every link."""
        used = np.asarray(self.link_of, dtype=np.int64)
        crossing = self.costs.links[np.asarray(ends[:-1], dtype=np.int64)]
        found: Floats = np.bincount(
            used[used >= 0], crossing[used >= 0], max(int(used.max(initial=-1)) + 1, 1)
        ).astype(np.float64)
        return found

    def bottleneck(self, ends: Sequence[int]) -> float:
        """Seconds of the busiest rank or link."""
        return float(max(self.of_ranks(ends, self.costs.seconds).max(), self.of_links(ends).max()))

    def fits(self, ends: Sequence[int]) -> bool:
        """Whether every rank keeps within its bytes."""
        return bool((self.of_ranks(ends, self.costs.memory) <= self.costs.limits).all())

    def largest(self, ends: Sequence[int]) -> float:
        """Seconds of the largest stage."""
        return float(self.of_stages(ends, self.costs.seconds).max())

    def best(self, cuts: Sequence[Sequence[int]]) -> list[int] | None:
        """Of these cuts the one with the smallest largest stage among those whose busiest rank or
        link is within the slack.
        """
        busiest = [self.bottleneck(ends) for ends in cuts]
        most = min(busiest, default=0.0) * (1 + self.slack) * (1 + ROUNDING)
        return min(
            (list(ends) for ends, value in zip(cuts, busiest, strict=True) if value <= most),
            key=self.largest,
            default=None,
        )


def placement(seconds: Costs, ranks_of: Sequence[int], options: PlacedOptions) -> Placement:
    """The chain of these costs, stage s standing on rank `ranks_of[s]`.

    Raises:
        PartitionError: the numbers do not fit each other, or a cost is below 0.
    """
    stages, ranks = len(ranks_of), max(ranks_of) + 1
    numbers = numbers_of(seconds, "seconds")
    layers = numbers.shape[-1]
    if stages > layers:
        raise PartitionError(
            f"cannot make {stages} stages from {layers} layers: every stage needs at least one"
        )
    transfer, flying, limits = (
        options.get("transfer"),
        options.get("in_flight"),
        options.get("limits"),
    )
    links = np.zeros(layers + 1)
    if transfer is not None:
        links[1:-1] = check_costs(transfer, "transfer", layers - 1)
    nothing = np.zeros(layers)
    holds, kept = (
        nothing if costs is None else costs for costs in (options.get("holds"), options.get("kept"))
    )
    in_flight = np.ones(stages) if flying is None else check_costs(flying, "in_flight", stages)
    allowed = np.full(ranks, np.inf) if limits is None else np.asarray(limits, dtype=np.float64)
    if allowed.shape != (ranks,) or np.isnan(allowed).any():
        raise PartitionError(
            f"limits: {limits!r} must be one number of bytes for each of {ranks} ranks"
        )
    chosen = list(ranks_of)
    held, each = (
        rows_of(numbers_of(costs, what), what, ranks, layers)[chosen]
        for what, costs in (("holds", holds), ("kept", kept))
    )
    times = sums_of(rows_of(numbers, "seconds", ranks, layers)[chosen])
    pairs = [(min(pair), max(pair)) for pair in pairwise(ranks_of)]
    names = {
        pair: number
        for number, pair in enumerate(dict.fromkeys(pair for pair in pairs if pair[0] != pair[1]))
    }
    costs = Placed(times, sums_of(held + in_flight[:, None] * each), links, allowed)
    slack = check_number("slack", options.get("slack", 0.0), zero=True)
    return Placement(costs, tuple(ranks_of), tuple(names.get(pair, -1) for pair in pairs), slack)
