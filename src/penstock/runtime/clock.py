"""Clocks that time ops where they run."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

Mark = Any


class Clock(Protocol):
    """Marks are taken between ops, and turned into seconds after the batch."""

    def mark(self) -> Mark:
        """Now, on the device."""
        ...

    def seconds(self, mark: Mark) -> float:
        """A mark in seconds, on a time base that ranks of one host share."""
        ...


class HostClock:
    """For devices that compute while the host waits. CLOCK_MONOTONIC is one clock for all processes of a host."""

    def mark(self) -> float:
        """See `Clock.mark`."""
        return time.monotonic()

    def seconds(self, mark: float) -> float:
        """See `Clock.seconds`."""
        return mark


class CudaClock:
    """For a GPU, which computes while the host runs ahead: events in its stream. Not yet run on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._origin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        self._origin.record(torch.cuda.current_stream(device))
        torch.cuda.synchronize(device)
        self._origin_s = time.monotonic()

    def mark(self) -> torch.cuda.Event:
        """See `Clock.mark`."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, mark: torch.cuda.Event) -> float:
        """See `Clock.seconds`; waits until the event has happened."""
        mark.synchronize()
        return self._origin_s + float(self._origin.elapsed_time(mark)) / 1e3


def clock_for(device: torch.device) -> Clock:
    """The clock that times work on `device`."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
