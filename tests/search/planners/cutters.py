"""Requests and brute force for the tests of planners."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product

from penstock.cluster.cluster import Cluster, cluster
from penstock.profile.profile import LayerProfile, Profile, Timing
from penstock.search.request import PlanRequest

#: docs/literature/vgg-19-profile.md: DAPPLE's profile of VGG-19 on a V100, milliseconds of forward and backward.
VGG19 = (
    (3.4, 6.8), (7.2, 14.4), (0.65, 1.3), (3.4, 6.8), (5.0, 10.0), (0.3, 0.6), (2.3, 4.6), (3.55, 7.1), (3.55, 7.1), (3.55, 7.1),
    (0.165, 0.33), (1.71, 3.42), (2.9, 5.8), (2.88, 5.76), (2.86, 5.72), (0.1, 0.2), (0.965, 1.93), (0.965, 1.93), (0.96, 1.92),
    (0.965, 1.93), (0.03, 0.06), (0.45, 0.9), (0.1, 0.2), (0.05, 0.1), (0.01, 0.2),
)  # fmt: skip


def profile(
    seconds: Sequence[tuple[float, float]],
    *,
    batch: int = 32,
    fixed: float = 0.0,
    **counts: Sequence[float],
) -> Profile:
    """A profile from seconds of forward and backward per sample; `counts`: parameters,
    parameter_bytes, activation, output.
    """

    def timing(per_sample: float) -> Timing:
        return Timing((1, batch), (fixed + per_sample, fixed + batch * per_sample))

    def count(name: str, layer: int, default: float) -> float:
        return counts[name][layer] if name in counts else default

    layers = tuple(
        LayerProfile(
            f"l{i}",
            "L",
            timing(f),
            timing(b),
            timing(b / 2),
            timing(b / 2),
            int(count("parameters", i, 1)),
            int(count("parameter_bytes", i, 4)),
            0,
            count("activation", i, 8.0),
            count("output", i, 8.0),
        )
        for i, (f, b) in enumerate(seconds)
    )
    return Profile(layers, "abc", 8.0, batch)


def ask(costs: Profile, where: str | Cluster, batch: int = 32, **asked: object) -> PlanRequest:
    """A request."""
    return PlanRequest(costs, cluster(where) if isinstance(where, str) else where, batch, **asked)  # type: ignore[arg-type]


def cuts(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """The lengths of all cuts."""
    for ends in combinations(range(1, layers), stages - 1):
        yield tuple(b - a for a, b in zip((0, *ends), (*ends, layers), strict=True))


def bounds(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """First layer and end of every stage."""
    return [(sum(lengths[:stage]), sum(lengths[: stage + 1])) for stage in range(len(lengths))]


def shared(layers: int, devices: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """All lengths with all numbers of devices for the stages that are `devices` together, or fewer."""
    for stages in range(1, min(layers, devices) + 1):
        copies = [
            count
            for count in product(range(1, devices + 1), repeat=stages)
            if sum(count) <= devices
        ]
        for lengths in cuts(layers, stages):
            for count in copies:
                yield lengths, count
