"""The lock of this process's random generators, which autograd's device threads may pass.

Autograd runs the backward of tensors on an accelerator in one thread per device, for all threads
that call it. A thread that holds the lock during its backward waits for that thread:

    rank 0   holds the lock ── backward ── waits for the device thread ────────┐
    rank 1   backward ── waits for the device thread                           │
    device   node of rank 1, which recomputes a layer that draws: must not wait for rank 0

So the owner opens the lock while it waits. A device thread then passes: its nodes run one after
another, those of the owner's backward included, and each restores the states of the generators.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class GeneratorLock:
    """A re-entrant lock that its owner can open to device threads."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._owner: int | None = None
        self._depth = 0
        # How often the owner has opened it, and how many threads are passing.
        self._open = self._passing = 0

    @contextmanager
    def held(self, *, passes: bool = False) -> Iterator[None]:
        """Hold the lock.

        Args:
            passes: do not wait for an owner that has opened the lock; for device threads.
        """
        this_thread = threading.get_ident()
        with self._condition:
            while not (self._owner in (None, this_thread) or (passes and self._open)):
                self._condition.wait()
            passing = self._owner not in (None, this_thread)
            if passing:
                self._passing += 1
            else:
                self._owner = this_thread
                self._depth += 1
        try:
            yield
        finally:
            with self._condition:
                if passing:
                    self._passing -= 1
                else:
                    self._depth -= 1
                if not self._depth:
                    self._owner = None
                self._condition.notify_all()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let device threads pass while the owner, which calls this, waits for them."""
        with self._condition:
            self._open += 1
            self._condition.notify_all()
        try:
            yield
        finally:
            with self._condition:
                self._open -= 1
                # Until a passing thread ends, the generators have the states of its layer.
                while self._passing:
                    self._condition.wait()
