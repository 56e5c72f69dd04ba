"""Costs of layers for one micro-batch, as numbers that planners sum over ranges of layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import final

import numpy as np
from numpy.typing import NDArray

from penstock.profile.profile import Profile

Numbers = NDArray[np.float64]


@final
@dataclass(frozen=True)
class LayerCosts:
    """One number per layer, all for one micro-batch.

    Attributes:
        forward_s, backward_s: seconds.
        output_bytes: bytes that the next layer receives, if it is on another device. Those of the
            last layer are not sent.
        activation_bytes: bytes that are saved for the backward.
        parameter_bytes: bytes of the weights; their gradients have the same size.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    output_bytes: tuple[float, ...]
    activation_bytes: tuple[float, ...]
    parameter_bytes: tuple[float, ...]

    @classmethod
    def of(cls, profile: Profile, micro_batch: float) -> LayerCosts:
        """Return the costs for `micro_batch` samples, which need not be a whole number."""
        return cls(
            tuple(profile.seconds("forward", micro_batch)),
            tuple(profile.seconds("backward", micro_batch)),
            tuple(micro_batch * layer.output_bytes_per_sample for layer in profile),
            tuple(micro_batch * layer.activation_bytes_per_sample for layer in profile),
            tuple(float(layer.parameter_bytes) for layer in profile),
        )

    def __len__(self) -> int:
        return len(self.forward_s)

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """Seconds of forward and backward together."""
        return tuple(f + b for f, b in zip(self.forward_s, self.backward_s, strict=True))


def before(numbers: tuple[float, ...] | Numbers) -> Numbers:
    """Return the sums of all numbers before each place: n + 1 sums for n numbers.

    >>> before((1.0, 2.0, 4.0)).tolist()
    [0.0, 1.0, 3.0, 7.0]
    """
    return np.concatenate(([0.0], np.cumsum(np.asarray(numbers, float))))


def over_ranges(numbers: tuple[float, ...]) -> Numbers:
    """Return the sums over all ranges: entry [i, j] is for layers i .. j, infinite for j < i."""
    sums = before(numbers)
    ranges = sums[None, 1:] - sums[:-1, None]
    ranges[np.tril_indices(len(numbers), -1)] = np.inf
    return ranges


def ranges_of(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first layer of every stage, and one past its last."""
    return pairwise(accumulate(lengths, initial=0))


def stage_totals(numbers: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """Return the sum of one number per layer over the layers of every stage.

    >>> stage_totals([1, 2, 4], [2, 1])
    [3, 4]
    """
    return [sum(numbers[start:stop]) for start, stop in ranges_of(lengths)]
