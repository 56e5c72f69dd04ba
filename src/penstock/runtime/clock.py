"""Clocks that time ops where they run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

Mark = Any


class Clock(Protocol):
    """Marks are taken between ops, and turned into seconds after the batch."""

    def begin(self) -> None:
        """Begin a batch: marks to come are near each other."""
        ...

    def mark(self) -> Mark:
        """Now, on the device."""
        ...

    def seconds(self, mark: Mark) -> float:
        """A mark in seconds, on a time base that ranks of one host share."""
        ...


class HostClock:
    """For devices that compute while the host waits. CLOCK_MONOTONIC is one clock for all processes
    of a host.
    """

    def begin(self) -> None:
        """See `Clock.begin`: doubles have room for years."""

    def mark(self) -> float:
        """See `Clock.mark`."""
        return time.monotonic()

    def seconds(self, mark: float) -> float:
        """See `Clock.seconds`."""
        return mark


class TimedEvent(Protocol):
    """What is used of `torch.cuda.Event`."""

    def synchronize(self) -> None:
        """Let the host wait until the event has happened."""
        ...

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to a later one, as a 32-bit float."""
        ...


@dataclass
class _Origin:
    """An event that others are timed from. `at_s` is its place on the host's clock, once known."""

    event: TimedEvent
    at_s: float | None = None


class EventClock:
    """For a device that computes while the host runs ahead: events in its stream.

    CUDA tells the time between two events in milliseconds as a 32-bit float: to 0.1 microseconds if
    they are 1 s apart, to 0.25 ms if they are an hour apart. So ops are timed from an origin of
    their own batch, and sums are made in double precision. The origin is found on the host's clock
    when times are first asked for, by an event at that moment: nothing waits before, and clocks
    that drift apart do so for one batch only.

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
        """See `Clock.seconds`; waits until the event has happened."""
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
    """The clock that times work on `device`."""
    return EventClock(partial(_record_on, device)) if device.type == "cuda" else HostClock()
