"""A link from times of messages: latency and bandwidth that are off by the least part of every
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.device import Link
from penstock.errors import SettingError

_Array = NDArray[np.float64]

#: The latency is sought from a millionth of the shortest message's time to a million times the
#: longest's (as powers of e), in rounds
#: that look at so many values each and go on around the best.
_REACH: Final = 14.0
_TRIED: Final = 101
_ROUNDS: Final = 6


@dataclass(frozen=True)
class Fit:
    """A latency and a bandwidth, and how far `latency + bytes / bandwidth` is from each time that
    it was made of.

    Attributes:
        latency_s, bandwidth_bytes_per_s: the two.
        errors: by size, (fitted - measured) / measured.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    errors: tuple[float, ...]

    @property
    def mean_error(self) -> float:
        """Mean of the errors' absolute values, as a part of the times."""
        return float(np.mean(np.abs(self.errors)))

    @property
    def worst_error(self) -> float:
        """Largest of the errors' absolute values, as a part of the times."""
        return float(np.max(np.abs(self.errors)))

    def link(self, shared: bool = False) -> Link:
        """The link that it describes; its source says how well."""
        source = (
            f"measured: off by {self.mean_error:.0%} on average, {self.worst_error:.0%} at most"
        )
        return Link(self.latency_s, self.bandwidth_bytes_per_s, source, shared)


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> Fit:
    """Latency and bandwidth by least squares of the logarithms: the relative error of a short
    message counts as much as that of a long one, and twice as long is as wrong as half as long.

    Squares of (fitted - measured) / measured would take a time that is half as long for a quarter
    as wrong: noisy times would pull everything down. Both numbers come out above 0.

    Args:
        sizes: bytes of the messages, at least two different numbers.
        seconds: how long each took, one way; above 0.

    Raises:
        SettingError: there are too few sizes, or a size or a time is not above 0.
    """
    if len(set(sizes)) < 2 or len(sizes) != len(seconds):
        raise SettingError(
            f"{len(set(sizes))} sizes of messages and {len(seconds)} times; a fit needs two sizes, and a time of each"
        )
    if min(sizes) < 1:
        raise SettingError(
            f"a message of {min(sizes)} bytes tells nothing of a link; sizes are 1 byte or more"
        )
    if not all(0 < time < float("inf") for time in seconds):
        raise SettingError(f"messages took {list(seconds)} s; a fit needs times above 0")
    times, counts = np.asarray(seconds, float), np.asarray(sizes, float)
    # Of all links whose latency is worth so many bytes, the best has the geometric mean of what
    # each time tells: so one number is left
    # to search, and its least is found wherever it is.
    logarithms = np.log(times)

    def spread(log_worth: _Array) -> _Array:
        left = logarithms - np.log(np.exp(log_worth)[:, None] + counts)
        return np.asarray(left.var(axis=1), float)

    low, high = float(np.log(counts.min())) - _REACH, float(np.log(counts.max())) + _REACH
    for _ in range(_ROUNDS):
        tried = np.linspace(low, high, _TRIED)
        best = float(tried[spread(tried).argmin()])
        step = (high - low) / (_TRIED - 1)
        low, high = best - step, best + step
    per_byte = float(np.exp((logarithms - np.log(np.exp(best) + counts)).mean()))
    latency = float(np.exp(best)) * per_byte
    errors = (latency + counts * per_byte) / times - 1
    return Fit(latency, 1 / per_byte, tuple(map(float, errors)))
