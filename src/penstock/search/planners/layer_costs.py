"""What layers cost for one micro-batch, as plain numbers that planners sum over ranges of layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
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
        output_bytes: what crosses to the next layer, if that is on another device. The last layer's
        crosses to nobody. activation_bytes: what is kept for backward. parameter_bytes: weights,
        which are also as many bytes of gradients.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    output_bytes: tuple[float, ...]
    activation_bytes: tuple[float, ...]
    parameter_bytes: tuple[float, ...]

    @classmethod
    def of(cls, profile: Profile, micro_batch: float) -> LayerCosts:
        """The costs for `micro_batch` samples, which need not be whole."""
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
        """Forward and backward together."""
        return tuple(f + b for f, b in zip(self.forward_s, self.backward_s, strict=True))


def before(numbers: tuple[float, ...] | Numbers) -> Numbers:
    """Sums of all numbers before each place: of n numbers, n + 1 sums.

    >>> before((1.0, 2.0, 4.0)).tolist()
    [0.0, 1.0, 3.0, 7.0]
    """
    return np.concatenate(([0.0], np.cumsum(np.asarray(numbers, float))))


def over_ranges(numbers: tuple[float, ...]) -> Numbers:
    """Sums over all ranges: entry [i, j] is of the layers i .. j, infinite where there are none (j
    < i).
    """
    sums = before(numbers)
    found = sums[None, 1:] - sums[:-1, None]
    found[np.tril_indices(len(numbers), -1)] = np.inf
    return found
