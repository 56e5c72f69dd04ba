"""Clocks that timestamp ops on the device that runs them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

Mark = Any


class Clock(Protocol):
    """Takes marks between ops, which are converted to seconds after the batch."""

    def begin(self) -> None:
        """Begin a batch; its marks are timed from one origin."""
        ...

    def mark(self) -> Mark:
        """Record the current time of the device, without waiting for it."""
        ...

    def seconds(self, mark: Mark) -> float:
        """Convert a mark to seconds, on a time base that all ranks of a host share."""
        ...


class HostClock:
    """The host's clock, for devices that compute while the host waits.

    It is CLOCK_MONOTONIC, which all processes of a host share.
    """

    def begin(self) -> None:
        """See `Clock.begin`. Needs no origin: double precision suffices for years."""

    def mark(self) -> float:
        """See `Clock.mark`."""
        return time.monotonic()

    def seconds(self, mark: float) -> float:
        """See `Clock.seconds`."""
        return mark


class TimedEvent(Protocol):
    """The methods of `torch.cuda.Event` that are used."""

    def synchronize(self) -> None:
        """Block the host until the device has reached the event."""
        ...

    def elapsed_time(self, end: Any) -> float:
        """Return the milliseconds from this event to a later one, with 32-bit precision."""
        ...


@dataclass
class _Origin:
    """The event from which the others of a batch are timed.

    Attributes:
        event: the event.
        at_s: its time on the host's clock in seconds; None until a time is asked for.
    """

    event: TimedEvent
    at_s: float | None = None


class EventClock:
    """Events in the stream of a device that computes while the host runs ahead.

    CUDA returns the time between two events in milliseconds as a 32-bit float: exact to 0.1
    microseconds if they are 1 s apart, but only to 0.25 ms if they are an hour apart. Ops are
    therefore timed from an origin in their own batch, and sums are formed in double precision. The
    origin is located on the host's clock when a time is first asked for, by an event recorded at
    that moment: the host does not wait earlier, and drift between the two clocks is limited to one
    batch.

    Args:
        record: records an event in the device's stream.
        host_s: the host's clock, in seconds.
    """

    def __init__(
        self, record: Callable[[], TimedEvent], host_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._record, self._host_s = record, host_s
        self.begin()

    def begin(self) -> None:
        """See `Clock.begin`."""
        self._origin = _Origin(self._record())

    def mark(self) -> tuple[_Origin, TimedEvent]:
        """See `Clock.mark`."""
        return self._origin, self._record()

    def seconds(self, mark: tuple[_Origin, TimedEvent]) -> float:
        """See `Clock.seconds`; waits until the device has reached the event."""
        origin, event = mark
        event.synchronize()
        if origin.at_s is None:
            now = self._record()
            now.synchronize()
            origin.at_s = self._host_s() - float(origin.event.elapsed_time(now)) / 1e3
        return origin.at_s + float(origin.event.elapsed_time(event)) / 1e3


def _record_on(device: torch.device) -> TimedEvent:
    """Record an event in the current stream of a GPU. Not yet run on a GPU."""
    event: TimedEvent = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))  # type: ignore[attr-defined]
    return event


def clock_for(device: torch.device) -> Clock:
    """Return the clock for ops on `device`."""
    return EventClock(partial(_record_on, device)) if device.type == "cuda" else HostClock()
