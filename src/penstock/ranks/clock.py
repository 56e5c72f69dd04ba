"""Clocks that timestamp ops on the device that runs them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from penstock.errors import RunError
from penstock.values.capture import is_capturing

Mark = Any


def host_time() -> float:
    """Return the seconds of CLOCK_MONOTONIC, which all processes of a host share."""
    return time.monotonic()


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

    def elapsed(self, start: Mark, end: Mark) -> float | None:
        """Return the seconds between two marks of a batch, without waiting for the device.

        None if the device has not reached the later one yet, or they have no times.
        """
        ...


class HostClock:
    """The host's clock, see `host_time`, for devices that compute while the host waits."""

    def begin(self) -> None:
        """See `Clock.begin`. Needs no origin: double precision suffices for years."""

    def mark(self) -> float:
        """See `Clock.mark`. Called twice per op, hence not through `host_time`."""
        return time.monotonic()

    def seconds(self, mark: float) -> float:
        """See `Clock.seconds`."""
        return mark

    def elapsed(self, start: float, end: float) -> float:
        """See `Clock.elapsed`."""
        return end - start


class TimedEvent(Protocol):
    """The methods of `torch.cuda.Event` that are used."""

    def query(self) -> bool:
        """Return whether the device has reached the event."""
        ...

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

    While ops are captured as a graph no event is recorded: such events belong to the graph, have no
    times, and a query of one would end the capture.

    Args:
        record: records an event in the device's stream.
        host_s: the host's clock, in seconds.
        captures: whether ops are being captured.
    """

    def __init__(
        self,
        record: Callable[[], TimedEvent],
        host_s: Callable[[], float] = host_time,
        captures: Callable[[], bool] = lambda: False,
    ) -> None:
        self._record, self._host_s, self._captures = record, host_s, captures
        self._origin: _Origin | None = None
        self.begin()

    def begin(self) -> None:
        """See `Clock.begin`."""
        self._origin = None if self._captures() else _Origin(self._record())

    def mark(self) -> tuple[_Origin, TimedEvent] | None:
        """See `Clock.mark`; None while ops are captured."""
        if self._origin is None or self._captures():
            return None
        return self._origin, self._record()

    def seconds(self, mark: tuple[_Origin, TimedEvent] | None) -> float:
        """See `Clock.seconds`; waits until the device has reached the event.

        Raises:
            RunError: the op was captured.
        """
        if mark is None:
            raise RunError(
                "the last batch was captured as a graph, which has no times: train a batch "
                "without a capture for a timeline"
            )
        origin, event = mark
        event.synchronize()
        if origin.at_s is None:
            now = self._record()
            now.synchronize()
            origin.at_s = self._host_s() - float(origin.event.elapsed_time(now)) / 1e3
        return origin.at_s + float(origin.event.elapsed_time(event)) / 1e3

    def elapsed(
        self,
        start: tuple[_Origin, TimedEvent] | None,
        end: tuple[_Origin, TimedEvent] | None,
    ) -> float | None:
        """See `Clock.elapsed`."""
        # A query would end a capture, whichever event it is for.
        if start is None or end is None or self._captures() or not end[1].query():
            return None
        return float(start[1].elapsed_time(end[1])) / 1e3


def _record_on(device: torch.device) -> TimedEvent:
    """Record an event in the current stream of a GPU. Not yet run on a GPU."""
    event: TimedEvent = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))  # type: ignore[attr-defined]
    return event


def clock_for(device: torch.device) -> Clock:
    """Return the clock for ops on `device`."""
    if device.type != "cuda":
        return HostClock()
    return EventClock(partial(_record_on, device), captures=partial(is_capturing, device))
