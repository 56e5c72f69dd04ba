"""Seconds of the host per layer, where the device works through a queue."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from penstock.profile.profile import Timing

#: The phases of a layer whose launches are timed, with the fields of `LayerProfile`.
HOST_FIELDS = {"forward": "host_forward", "backward": "host_backward"}


def host_timings(
    sizes: tuple[int, ...], runs: Sequence[Mapping[str, Sequence[float]]]
) -> dict[str, Timing]:
    """Return the medians of the host's seconds as fields of `LayerProfile`.

    Args:
        sizes: micro-batch sizes.
        runs: per size, by phase, the seconds of all passes; empty on a CPU.
    """
    timings: dict[str, Timing] = {}
    for phase, field in HOST_FIELDS.items():
        if all(phase in run for run in runs):
            medians = tuple(statistics.median(run[phase]) for run in runs)
            timings[field] = Timing(sizes, medians)
    return timings
