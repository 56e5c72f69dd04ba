"""Device and Link: what a cluster is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from penstock.errors import ClusterError
from penstock.units import format_seconds

Kind = Literal["cpu", "gpu"]


@final
@dataclass(frozen=True)
class Device:
    """What one rank runs on.

    Raises:
        ClusterError: the memory is not above 0, or the kind is neither "cpu" nor "gpu".
    """

    name: str
    memory_bytes: int
    kind: Kind = "gpu"

    def __post_init__(self) -> None:
        if not self.memory_bytes > 0:
            raise ClusterError(f"device {self.name} has {self.memory_bytes} bytes of memory; it needs more than 0")
        if self.kind not in ("cpu", "gpu"):
            raise ClusterError(f"device {self.name} is of kind {self.kind!r}; a device is a 'cpu' or a 'gpu'")


@final
@dataclass(frozen=True)
class Link:
    """One direction between two ranks: a message of n bytes takes `latency_s + n / bandwidth_bytes_per_s`.

    `source` says how far to trust it: `"assumed"`, `"measured"`, or `"datasheet …"`.

    Raises:
        ClusterError: the latency is below 0 or the bandwidth not above it.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    source: str = "assumed"

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s < float("inf"):
            raise ClusterError(f"a link's latency is 0 s or more, not {self.latency_s!r}")
        if not self.bandwidth_bytes_per_s > 0:
            raise ClusterError(f"a link's bandwidth is above 0 bytes/s, not {self.bandwidth_bytes_per_s!r}")

    def __str__(self) -> str:
        return f"{format_seconds(self.latency_s)} + {self.bandwidth_bytes_per_s / 1e9:.4g} GB/s ({self.source})"

    def transfer_seconds(self, count: float) -> float:
        """Seconds for one message of `count` bytes."""
        return self.latency_s + count / self.bandwidth_bytes_per_s
