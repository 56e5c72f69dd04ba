"""Seconds of stages from those of their layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from penstock.profile.profile import PHASES, Phase, Profile
from penstock.schedule.arrays import Array
from penstock.schedule.op import Kind, Schedule

#: The measured phase of every kind of op that computes.
PHASE_OF_KIND: dict[Kind, Phase] = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input_grad",
    Kind.W: "weight_grad",
}


def parts_of(lengths: Sequence[int]) -> list[slice]:
    """Return the slice of layers of every stage."""
    ends = list(accumulate(lengths))
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def largest_part(micro_batch: float, micro_batches: int) -> float:
    """Return the samples of the largest micro-batch when a batch is divided nearly equally.

    Args:
        micro_batch: samples of the mean micro-batch.
        micro_batches: number of micro-batches.
    """
    return max(micro_batch, -(-round(micro_batch * micro_batches) // micro_batches))


def micro_batch_sizes(
    batch: float, schedule: Schedule, micro_batches: int | None = None
) -> list[float]:
    """Return the samples of every micro-batch of a batch, as the runtime splits it: sizes differ by
    at most one, and the larger ones come first.

    They count as equal where micro-batches are slices along samples, and in a stream, whose period
    is sought for costs that do not differ by micro-batch.

    Args:
        batch: samples in a batch.
        schedule: whose micro-batches they are.
        micro_batches: their number, if the schedule is that of one of several pipelines.

    >>> from penstock.schedule.catalogue import schedule
    >>> micro_batch_sizes(10, schedule("1f1b", 2, 4))
    [3.0, 3.0, 2.0, 2.0]
    """
    count = micro_batches or schedule.micro_batches
    along_samples = schedule.slicing is not None and schedule.slicing.along == "samples"
    if along_samples or schedule.stream is not None or batch != int(batch) or batch < count:
        return [batch / count] * count
    smaller, rest = divmod(int(batch), count)
    return [float(smaller + (number < rest)) for number in range(count)]


def stage_seconds(
    profile: Profile, lengths: Sequence[int], samples: float
) -> dict[Phase, list[float]]:
    """Return by phase the seconds of every stage's op for a micro-batch of this many samples.

    The first stage's input is data, which needs no gradient: its I does nothing, and its W does all
    that a B does. (On two ranks, ResNet-18, `zb-h1`: I 0.3 ms instead of the 33 ms that its layers
    take for theirs, W 63 ms instead of 36.)
    """
    seconds: dict[Phase, list[float]] = {}
    for phase in PHASES:
        layer_seconds = profile.seconds(phase, samples)
        seconds[phase] = [sum(layer_seconds[part]) for part in parts_of(lengths)]
    if lengths:
        seconds["input_grad"][0], seconds["weight_grad"][0] = 0.0, seconds["backward"][0]
    return seconds


def prefix_seconds(profile: Profile, samples: float) -> Array:
    """Return the seconds of the layers before every layer, and of all, shape (phases, layers + 1);
    cached by the profile.
    """
    cache: dict[float, Array] = profile.__dict__.setdefault("_prefix_seconds", {})
    if samples not in cache:
        rows = np.zeros((len(PHASES), len(profile) + 1))
        seconds = [profile.seconds(phase, samples) for phase in PHASES]
        rows[:, 1:] = np.cumsum(seconds, axis=1)
        cache[samples] = rows
    return cache[samples]


def update_seconds(profile: Profile, lengths: Sequence[int]) -> list[float]:
    """Return the seconds of U of every stage: a fixed cost per call, and a cost per byte.

    0 for a stage without weights.
    """
    seconds = []
    for part in parts_of(lengths):
        weight_bytes = sum(layer.parameter_bytes for layer in profile.layers[part])
        seconds.append(profile.update_seconds(weight_bytes))
    return seconds
