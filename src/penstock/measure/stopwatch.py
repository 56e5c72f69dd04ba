"""Seconds of work on a device: by the host's clock on a CPU, by events on a CUDA card.

A synchronisation around every layer would add the launch latency, the drain of the queue and the
wake-up of the host to every time. Events are recorded on the stream between the layers instead, and
read after one synchronisation. The seconds between two events are those of the kernels between them
where the host launches ahead of the card, and those of the host where kernels are shorter than
their launches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch


class Stopwatch(Protocol):
    """Marks points of the work on a device, and gives the seconds between them."""

    def mark(self) -> Any:
        """Mark the point that the work has come to."""

    def seconds(self, spans: Sequence[tuple[Any, Any]]) -> list[float]:
        """Return the seconds between the marks of every (start, end), when all of them are there."""


@final
class HostStopwatch:
    """For devices whose work is done when the call returns."""

    def mark(self) -> float:
        """See `Stopwatch.mark`."""
        return time.perf_counter()

    def seconds(self, spans: Sequence[tuple[float, float]]) -> list[float]:
        """See `Stopwatch.seconds`."""
        return [end - start for start, end in spans]


@final
@dataclass(frozen=True)
class EventStopwatch:
    """For devices that work through a queue.

    Attributes:
        record: records a new event at the end of the queue.
        synchronize: waits until the queue is empty.
    """

    record: Callable[[], Any]
    synchronize: Callable[[], None]

    def mark(self) -> Any:
        """See `Stopwatch.mark`. The host does not wait."""
        return self.record()

    def seconds(self, spans: Sequence[tuple[Any, Any]]) -> list[float]:
        """See `Stopwatch.seconds`. The host waits once, for all of them."""
        self.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in spans]


def stopwatch_for(device: torch.device) -> Stopwatch:
    """Return the stopwatch of a device."""
    if device.type != "cuda":
        return HostStopwatch()

    def record() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    def synchronize() -> None:
        torch.cuda.synchronize(device)

    return EventStopwatch(record, synchronize)
