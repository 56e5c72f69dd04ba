"""Device and Link, of which a cluster consists."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, final, get_args

from penstock.errors import ClusterError
from penstock.files.text import quote
from penstock.units import format_bytes, format_seconds

Kind = Literal["cpu", "gpu", "fpga"]

#: Where a process of this host measures or trains; auto: on CUDA if a card is visible.
DeviceRequest = Literal["auto", "cpu", "cuda"]

#: Number formats that a peak may be stated for, by torch's names; `tf32` is the format in which
#: NVIDIA's tensor cores multiply float32.
DTYPES: Final = ("float64", "float32", "tf32", "bfloat16", "float16", "float8", "int8")


@final
@dataclass(frozen=True)
class Device:
    """The device of one rank. Unknown figures are left out: a plan from a measured profile needs
    only the memory.

    Attributes:
        name: a preset's, or the user's own.
        memory_bytes: memory that the rank may use.
        kind: "cpu", "gpu" or "fpga".
        flops: peak FLOP/s (a multiply and an add are two) by dtype, one of `DTYPES`; dense, no
            sparsity.
        memory_bytes_per_s: peak memory bandwidth.
        launch_s: overhead of an op before it computes: a kernel's launch, and the framework's own
            work.
        on_chip_bytes: an FPGA's memory on the chip; weights that fit there use no memory bandwidth.
        together: slowdown while all devices of the node are busy: seconds then over seconds alone;
            above 1 where they share a host's cores or memory.
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
        if self.kind not in get_args(Kind):
            raise ClusterError(
                f"device {self.name} is of kind {quote(self.kind)}; a device is a 'cpu', a 'gpu' "
                "or an 'fpga'"
            )
        self._check_memory()
        self._check_speed()

    def _check_memory(self) -> None:
        """Refuse sizes and bandwidths of memory that are out of range."""
        if not self.memory_bytes > 0:
            raise ClusterError(
                f"device {self.name} has {self.memory_bytes} bytes of memory; it needs more than 0"
            )
        bandwidth = self.memory_bytes_per_s
        if bandwidth is not None and not 0 < bandwidth < math.inf:
            raise ClusterError(
                f"device {self.name} reads {bandwidth!r} bytes/s of its memory; it needs more than "
                "0"
            )
        if self.on_chip_bytes < 0:
            raise ClusterError(
                f"device {self.name} has {self.on_chip_bytes} bytes on the chip; that is 0 or more"
            )

    def _check_speed(self) -> None:
        """Refuse peaks, a launch time or a slowdown that are out of range."""
        for dtype, peak in self.flops:
            if dtype not in DTYPES:
                raise ClusterError(
                    f"device {self.name} has a peak for {dtype!r}; peaks are for "
                    f"{', '.join(DTYPES)}"
                )
            if not 0 < peak < math.inf:
                raise ClusterError(
                    f"device {self.name} makes {peak!r} FLOP/s of {dtype}; it needs more than 0"
                )
        if len(dict(self.flops)) < len(self.flops):
            dtypes = ", ".join(dtype for dtype, _ in self.flops)
            raise ClusterError(f"device {self.name} has two peaks for one dtype: {dtypes}")
        if not 0 <= self.launch_s < math.inf:
            raise ClusterError(
                f"device {self.name} launches an op in {self.launch_s!r} s; that is 0 s or more"
            )
        if not 1 <= self.together < math.inf:
            raise ClusterError(
                f"device {self.name} takes {self.together!r} times as long while all are busy; "
                "that is 1 or more, 1 if they share nothing"
            )

    def __str__(self) -> str:
        parts = [format_bytes(self.memory_bytes)]
        if self.flops:
            peaks = ", ".join(f"{dtype} {peak / 1e12:.4g}" for dtype, peak in self.flops)
            parts.append(f"{peaks} TFLOP/s")
        if self.memory_bytes_per_s is not None:
            parts.append(f"{self.memory_bytes_per_s / 1e9:.4g} GB/s")
        if self.on_chip_bytes:
            parts.append(f"{format_bytes(self.on_chip_bytes)} on the chip")
        if self.launch_s:
            parts.append(f"{format_seconds(self.launch_s)} an op")
        if self.together > 1:
            parts.append(f"{self.together:.3g} times as long while all are busy")
        source = f" ({self.source})" if self.source else ""
        return f"{self.name} ({self.kind}): {'; '.join(parts)}{source}"

    def peak(self, dtype: str) -> float | None:
        """Return the peak FLOP/s of a dtype; None if it is not known."""
        return dict(self.flops).get(dtype)


@final
@dataclass(frozen=True)
class Link:
    """One direction between two ranks: a message of n bytes takes `latency_s + n /
    bandwidth_bytes_per_s`.

    Attributes:
        latency_s: seconds of a message of no bytes.
        bandwidth_bytes_per_s: of one message alone, in one direction.
        source: how reliable the figures are: "assumed", "measured", or "datasheet …".
        shared: whether all ranks that it joins share one medium, which carries one message at a
            time.
        cpu_s_per_byte: CPU seconds per byte that each of the two ranks spends on a message between
            hosts; None if that was not measured.
        cpu_s_per_message: seconds for which the sender of a message of no bytes is busy; None if
            that was not measured.
        busy_s_per_byte: seconds that each of the two ranks loses if it computes meanwhile; None if
            that was not measured.

    Raises:
        ClusterError: the latency or a CPU time is below 0, or the bandwidth not above it.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    source: str = "assumed"
    shared: bool = False
    cpu_s_per_byte: float | None = None
    cpu_s_per_message: float | None = None
    busy_s_per_byte: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s < float("inf"):
            raise ClusterError(f"a link's latency is 0 s or more, not {self.latency_s!r}")
        for seconds in (self.cpu_s_per_byte, self.cpu_s_per_message, self.busy_s_per_byte):
            if seconds is not None and not 0 <= seconds < math.inf:
                raise ClusterError(f"a link's CPU time is 0 s or more, not {seconds!r}")
        if not self.bandwidth_bytes_per_s > 0:
            raise ClusterError(
                f"a link's bandwidth is above 0 bytes/s, not {self.bandwidth_bytes_per_s!r}"
            )

    def __str__(self) -> str:
        shared = ", shared" if self.shared else ""
        bandwidth = f"{self.bandwidth_bytes_per_s / 1e9:.4g} GB/s"
        cpu = ""
        if self.cpu_s_per_byte is not None:
            cpu = f", {self.cpu_s_per_byte * 1e9:.3g} ns of CPU per byte"
        if self.busy_s_per_byte is not None:
            cpu += f" ({self.busy_s_per_byte * 1e9:.3g} ns while it computes)"
        return f"{format_seconds(self.latency_s)} + {bandwidth}{shared}{cpu} ({self.source})"

    def transfer_seconds(self, count: float) -> float:
        """Return the seconds of one message of `count` bytes."""
        return self.latency_s + count / self.bandwidth_bytes_per_s
