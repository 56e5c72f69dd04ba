"""Time work on a device: by the host's clock on a CPU, by events on a CUDA card.

A synchronisation around every layer would add the launch latency, the drain of the queue and the
wake-up of the host to every time. Events are recorded on the stream between the layers instead, and
read after a single synchronisation. The time between two events is that of the kernels between them
where the host launches ahead of the card, and that of the host where kernels are shorter than their
launches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch


class Stopwatch(Protocol):
    """Marks points in the work of a device, and returns the seconds between them."""

    def mark(self) -> Any:
        """Mark the current point of the work."""

    def seconds(self, spans: Sequence[tuple[Any, Any]]) -> list[float]:
        """Return the seconds between the marks of every (start, end), once all are reached."""

    def host_seconds(self, spans: Sequence[tuple[Any, Any]]) -> list[float]:
        """Return the seconds in which the host passed from start to end; empty where those are
        `seconds`.
        """


@final
class HostStopwatch:
    """For devices whose work is complete when the call returns."""

    def mark(self) -> float:
        """See `Stopwatch.mark`."""
        return time.perf_counter()

    def seconds(self, spans: Sequence[tuple[float, float]]) -> list[float]:
        """See `Stopwatch.seconds`."""
        return [end - start for start, end in spans]

    def host_seconds(self, spans: Sequence[tuple[float, float]]) -> list[float]:
        """See `Stopwatch.host_seconds`: the host does the work itself."""
        del spans
        return []


@final
@dataclass(frozen=True)
class EventStopwatch:
    """For devices that process a queue.

    Attributes:
        record: records a new event at the end of the queue.
        synchronize: waits until the queue is empty.
    """

    record: Callable[[], Any]
    synchronize: Callable[[], None]

    def mark(self) -> tuple[Any, float]:
        """See `Stopwatch.mark`. The host does not wait."""
        return self.record(), time.perf_counter()

    def seconds(self, spans: Sequence[tuple[Any, Any]]) -> list[float]:
        """See `Stopwatch.seconds`. The host synchronises once for all marks."""
        self.synchronize()
        return [start[0].elapsed_time(end[0]) / 1e3 for start, end in spans]

    def host_seconds(self, spans: Sequence[tuple[Any, Any]]) -> list[float]:
        """See `Stopwatch.host_seconds`: the time of launches, with the recording of one event."""
        return [end[1] - start[1] for start, end in spans]


def stopwatch_for(device: torch.device) -> Stopwatch:
    """Return the stopwatch of a device."""
    if device.type != "cuda":
        return HostStopwatch()

    def record() -> torch.cuda.Event:
        """Record an event on the device's current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    def synchronize() -> None:
        """Wait until the device's queue is empty."""
        torch.cuda.synchronize(device)

    return EventStopwatch(record, synchronize)
