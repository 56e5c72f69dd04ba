"""Signals that ask a run to save: SIGTERM to save and end, SIGUSR1 to save and go on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

#: A handler, as `signal.signal` takes and returns it.
_Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


class StopSignals:
    """Notes signals instead of ending the process, within a `with` block.

    Outside of the main thread, where Python installs no handlers, nothing is noted. A handler that
    was not installed from Python stays, since Python could not restore it.

    Attributes:
        end: whether SIGTERM has arrived.
        save: whether SIGUSR1 has arrived since the flag was cleared.
    """

    def __init__(self) -> None:
        self.end = False
        self.save = False
        self._previous: dict[int, _Handler] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGUSR1):
                if signal.getsignal(number) is not None:
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *details: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        del frame
        if number == signal.SIGTERM:
            self.end = True
        else:
            self.save = True
