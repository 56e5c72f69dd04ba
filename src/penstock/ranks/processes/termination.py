"""SIGTERM to a process that has launched ranks: it is passed on, so that ranks can save and end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Protocol


class _Process(Protocol):
    """A process that receives signals."""

    def send_signal(self, sig: int) -> None:
        """Send a signal."""


@contextmanager
def passing_sigterm_on(processes: Sequence[_Process]) -> Iterator[None]:
    """Pass SIGTERM on to ranks, and end this process when they have ended, in a `with` block.

    Ranks that save at SIGTERM (`ps.Checkpoints`) do so; others end at once. A second SIGTERM ends
    this process without waiting. Nothing changes if the program handles SIGTERM by itself, or
    outside of the main thread, where Python has no handlers.

    Args:
        processes: the ranks; may grow within the block.

    Raises:
        SystemExit: SIGTERM has arrived; with status 143, as of a process that it has ended.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    ended = False

    def handle(number: int, frame: FrameType | None) -> None:
        """Pass the signal on."""
        del frame
        nonlocal ended
        if ended:
            # The status that shells give to a process that a signal has ended.
            raise SystemExit(128 + number)
        ended = True
        for process in processes:
            process.send_signal(number)

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    except Exception as error:
        if ended:  # a rank that SIGTERM has ended is no failure
            raise SystemExit(128 + signal.SIGTERM) from error
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if ended:
        raise SystemExit(128 + signal.SIGTERM)
