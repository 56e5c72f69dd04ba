"""A link from times of messages: latency and bandwidth that are off by the least part of every time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.device import Link
from penstock.errors import SettingError

_Array = NDArray[np.float64]

#: Rounds of weighing anew; three digits stand after ten.
_ROUNDS: Final = 30

#: No link carries more, so that noise never makes an endless one: 100 TB/s.
_LEAST_S_PER_BYTE: Final = 1e-14


@dataclass(frozen=True)
class Fit:
    """A latency and a bandwidth, and how far `latency + bytes / bandwidth` is from each time that it was made of.

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
        source = f"measured: off by {self.mean_error:.0%} on average, {self.worst_error:.0%} at most"
        return Link(self.latency_s, self.bandwidth_bytes_per_s, source, shared)


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> Fit:
    """Latency and bandwidth by least squares of the logarithms: the relative error of a short message counts as much as that of a long
    one, and twice as long is as wrong as half as long.

    Squares of (fitted - measured) / measured would count the half as a quarter: noisy times would then pull everything down. Neither
    number comes out below 0.

    Args:
        sizes: bytes of the messages, at least two different numbers.
        seconds: how long each took, one way; above 0.

    Raises:
        SettingError: there are too few sizes, or a time is not above 0.
    """
    if len(set(sizes)) < 2 or len(sizes) != len(seconds):
        raise SettingError(
            f"{len(set(sizes))} sizes of messages and {len(seconds)} times; a fit needs two sizes, and a time of each"
        )
    if not all(0 < time < float("inf") for time in seconds):
        raise SettingError(f"messages took {list(seconds)} s; a fit needs times above 0")
    times, counts = np.asarray(seconds, float), np.asarray(sizes, float)
    latency, per_byte = _least_squares(counts, times, times)
    for _ in range(_ROUNDS):
        fitted = latency + counts * per_byte
        over = times / fitted - 1
        # Weights with which (fitted - time)^2 has the slope of log(fitted / time)^2.
        bent = np.divide(np.log1p(over), over, out=np.ones_like(over), where=np.abs(over) > 1e-6)
        latency, per_byte = _least_squares(counts, times, fitted / np.sqrt(bent))
    errors = (latency + counts * per_byte) / times - 1
    return Fit(latency, 1 / per_byte, tuple(map(float, errors)))


def _least_squares(counts: _Array, times: _Array, relative_to: _Array) -> tuple[float, float]:
    """The latency and seconds per byte with the least squares of (fitted - time) / relative_to."""
    rows = np.stack([1 / relative_to, counts / relative_to], axis=1)
    aim = times / relative_to
    # Columns of like length, or the small one is lost in rounding.
    scale = np.linalg.norm(rows, axis=0)
    found, *_ = np.linalg.lstsq(rows / scale, aim, rcond=None)
    latency, per_byte = float(found[0] / scale[0]), float(found[1] / scale[1])
    # Where one would be below 0, the best is at 0: then the other alone.
    if latency < 0:
        return 0.0, float(rows[:, 1] @ aim / scale[1] ** 2)
    if per_byte < _LEAST_S_PER_BYTE:
        return float(rows[:, 0] @ aim / scale[0] ** 2), _LEAST_S_PER_BYTE
    return latency, per_byte
