"""Device and Link: what a cluster is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, final, get_args

from penstock.errors import ClusterError
from penstock.units import format_bytes, format_seconds

Kind = Literal["cpu", "gpu", "fpga"]

#: Number formats that a peak may be given for, by torch's names; `tf32` is what NVIDIA's tensor
#: cores make of float32.
DTYPES: Final = ("float64", "float32", "tf32", "bfloat16", "float16", "float8", "int8")


@final
@dataclass(frozen=True)
class Device:
    """What one rank runs on. What is not known is left out: a plan from a measured profile needs
    the memory alone.

    Attributes:
        name: a preset's, or one's own.
        memory_bytes: what the rank may hold.
        kind: "cpu", "gpu" or "fpga".
        flops: peak FLOP/s (a multiply and an add are two) by dtype, one of `DTYPES`; dense, no
        sparsity. memory_bytes_per_s: peak bandwidth of the memory. launch_s: what every op costs
        before it computes anything: a kernel's launch, and the framework's own work. on_chip_bytes:
        an FPGA's memory on the chip; weights that fit there cost no bandwidth. together: seconds of
        work while all devices of the node are busy over seconds alone; above 1 where they share a
        host's
            cores or memory.
        source: where the figures are from.

    Raises:
        ClusterError: a number is out of its range, a dtype or the kind is not known.
    """

    name: str
    memory_bytes: int
    kind: Kind = "gpu"
    flops: tuple[tuple[str, float], ...] = ()
    memory_bytes_per_s: float | None = None
    launch_s: float = 0.0
    on_chip_bytes: int = 0
    together: float = 1.0
    source: str = ""

    def __post_init__(self) -> None:
        if not self.memory_bytes > 0:
            raise ClusterError(
                f"device {self.name} has {self.memory_bytes} bytes of memory; it needs more than 0"
            )
        if self.kind not in get_args(Kind):
            raise ClusterError(
                f"device {self.name} is of kind {self.kind!r}; a device is a 'cpu', a 'gpu' or an 'fpga'"
            )
        for dtype, peak in self.flops:
            if dtype not in DTYPES:
                raise ClusterError(
                    f"device {self.name} has a peak for {dtype!r}; peaks are known for {', '.join(DTYPES)}"
                )
            if not 0 < peak < math.inf:
                raise ClusterError(
                    f"device {self.name} makes {peak!r} FLOP/s of {dtype}; it needs more than 0"
                )
        if len(dict(self.flops)) < len(self.flops):
            raise ClusterError(
                f"device {self.name} has two peaks for one dtype: {', '.join(name for name, _ in self.flops)}"
            )
        if self.memory_bytes_per_s is not None and not 0 < self.memory_bytes_per_s < math.inf:
            raise ClusterError(
                f"device {self.name} reads {self.memory_bytes_per_s!r} bytes/s of its memory; it needs more than 0"
            )
        if not 0 <= self.launch_s < math.inf:
            raise ClusterError(
                f"device {self.name} launches an op in {self.launch_s!r} s; that is 0 s or more"
            )
        if self.on_chip_bytes < 0:
            raise ClusterError(
                f"device {self.name} has {self.on_chip_bytes} bytes on the chip; that is 0 or more"
            )
        if not 1 <= self.together < math.inf:
            raise ClusterError(
                f"device {self.name} takes {self.together!r} times as long while all are busy; that is 1 or more, 1 if they share nothing"
            )

    def __str__(self) -> str:
        parts = [format_bytes(self.memory_bytes)]
        parts += (
            [", ".join(f"{dtype} {peak / 1e12:.4g}" for dtype, peak in self.flops) + " TFLOP/s"]
            if self.flops
            else []
        )
        parts += (
            [f"{self.memory_bytes_per_s / 1e9:.4g} GB/s"]
            if self.memory_bytes_per_s is not None
            else []
        )
        parts += [f"{format_bytes(self.on_chip_bytes)} on the chip"] if self.on_chip_bytes else []
        parts += [f"{format_seconds(self.launch_s)} an op"] if self.launch_s else []
        parts += (
            [f"{self.together:.3g} times as long while all are busy"] if self.together > 1 else []
        )
        return f"{self.name} ({self.kind}): {'; '.join(parts)}" + (
            f" ({self.source})" if self.source else ""
        )

    def peak(self, dtype: str) -> float | None:
        """FLOP/s of the dtype at most; None where it is not known."""
        return dict(self.flops).get(dtype)


@final
@dataclass(frozen=True)
class Link:
    """One direction between two ranks: a message of n bytes takes `latency_s + n /
    bandwidth_bytes_per_s`.

    Attributes:
        latency_s: seconds of a message of no bytes.
        bandwidth_bytes_per_s: of one message alone, in one direction.
        source: how far to trust it: "assumed", "measured", or "datasheet …".
        shared: all ranks that it joins use one medium, one message at a time, whoever sends it to
        whom.

    Raises:
        ClusterError: the latency is below 0 or the bandwidth not above it.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    source: str = "assumed"
    shared: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s < float("inf"):
            raise ClusterError(f"a link's latency is 0 s or more, not {self.latency_s!r}")
        if not self.bandwidth_bytes_per_s > 0:
            raise ClusterError(
                f"a link's bandwidth is above 0 bytes/s, not {self.bandwidth_bytes_per_s!r}"
            )

    def __str__(self) -> str:
        shared = ", shared" if self.shared else ""
        return f"{format_seconds(self.latency_s)} + {self.bandwidth_bytes_per_s / 1e9:.4g} GB/s{shared} ({self.source})"

    def transfer_seconds(self, count: float) -> float:
        """Seconds for one message of `count` bytes."""
        return self.latency_s + count / self.bandwidth_bytes_per_s
