"""Fit a link's latency and bandwidth to times of messages, with the least relative error; round
what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.device import Link
from penstock.errors import SettingError
from penstock.units import parse_seconds

_Array = NDArray[np.float64]

#: The latency is searched from a millionth of the shortest message's time to a million times the
#: longest's (as a power of e), in rounds that try a number of values each and refine around the
#: best.
_LOG_RANGE: Final = 14.0
_VALUES_PER_ROUND: Final = 101
_ROUNDS: Final = 6


@dataclass(frozen=True)
class Fit:
    """A latency and a bandwidth, with the relative errors of `latency + bytes / bandwidth`.

    Attributes:
        latency_s, bandwidth_bytes_per_s: the fitted parameters.
        errors: by size, (fitted - measured) / measured.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    errors: tuple[float, ...]

    @property
    def mean_error(self) -> float:
        """Mean of the absolute relative errors."""
        return float(np.mean(np.abs(self.errors)))

    @property
    def worst_error(self) -> float:
        """Largest of the absolute relative errors."""
        return float(np.max(np.abs(self.errors)))

    def link(self, shared: bool = False) -> Link:
        """Return the link with these parameters; its source contains the errors."""
        source = (
            f"measured: off by {self.mean_error:.0%} on average, {self.worst_error:.0%} at most"
        )
        return Link(self.latency_s, self.bandwidth_bytes_per_s, source, shared)


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> Fit:
    """Fit latency and bandwidth by least squares of the logarithms.

    The relative error of a short message counts as much as that of a long one, and twice as long is
    as wrong as half as long. Squares of (fitted - measured) / measured would count a time that is
    half as long as a quarter as wrong: noisy times would bias the fit downwards. Both numbers come
    out above 0.

    Args:
        sizes: bytes of the messages, at least two different numbers.
        seconds: one-way time of each; above 0.

    Raises:
        SettingError: there are too few sizes, or a size or a time is not above 0.
    """
    if len(set(sizes)) < 2 or len(sizes) != len(seconds):
        raise SettingError(
            f"{len(set(sizes))} sizes of messages and {len(seconds)} times; "
            f"a fit needs two sizes, and one time for each"
        )
    if min(sizes) < 1:
        raise SettingError(
            f"a message of {min(sizes)} bytes does not measure a link; sizes are 1 byte or more"
        )
    if not all(0 < time < float("inf") for time in seconds):
        raise SettingError(f"messages took {list(seconds)} s; a fit needs times above 0")
    times, counts = np.asarray(seconds, float), np.asarray(sizes, float)
    # time = per_byte x (latency_bytes + bytes), where the latency is expressed as a number of
    # bytes. For given latency_bytes the best per_byte is the geometric mean of time /
    # (latency_bytes + bytes), and the error is the variance of its logarithm: so only one number
    # has to be searched.
    log_times = np.log(times)

    def variance(log_latency_bytes: _Array) -> _Array:
        """Return the error for every value of the latency."""
        log_per_byte = log_times - np.log(np.exp(log_latency_bytes)[:, None] + counts)
        return np.asarray(log_per_byte.var(axis=1), float)

    low = float(np.log(counts.min())) - _LOG_RANGE
    high = float(np.log(counts.max())) + _LOG_RANGE
    for _ in range(_ROUNDS):
        candidates = np.linspace(low, high, _VALUES_PER_ROUND)
        best = float(candidates[variance(candidates).argmin()])
        step = (high - low) / (_VALUES_PER_ROUND - 1)
        low, high = best - step, best + step
    per_byte = float(np.exp((log_times - np.log(np.exp(best) + counts)).mean()))
    latency = float(np.exp(best)) * per_byte
    errors = (latency + counts * per_byte) / times - 1
    return Fit(latency, 1 / per_byte, tuple(map(float, errors)))


def short_value(value: float) -> float:
    """Round to four digits: more are noise, and would make the file hard to read."""
    return float(f"{value:.4g}")


def short_seconds(value: float) -> float:
    """Round to four digits of microseconds, as they are written to a file."""
    return parse_seconds(f"{value * 1e6:.4g} us")


def rounded_link(link: Link) -> Link:
    """Return the link with rounded figures."""
    rounded = replace(
        link,
        latency_s=short_seconds(link.latency_s),
        bandwidth_bytes_per_s=short_value(link.bandwidth_bytes_per_s),
    )
    if link.busy_s_per_byte is not None:
        busy_s_per_byte = parse_seconds(f"{link.busy_s_per_byte * 1e9:.4g} ns")
        rounded = replace(rounded, busy_s_per_byte=busy_s_per_byte)
    if link.cpu_s_per_byte is not None:
        cpu_s_per_byte = parse_seconds(f"{link.cpu_s_per_byte * 1e9:.4g} ns")
        rounded = replace(rounded, cpu_s_per_byte=cpu_s_per_byte)
    if link.cpu_s_per_message is not None:
        cpu_s_per_message = short_seconds(link.cpu_s_per_message)
        rounded = replace(rounded, cpu_s_per_message=cpu_s_per_message)
    return rounded
