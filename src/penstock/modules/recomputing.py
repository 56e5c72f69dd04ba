"""Whether the current forward will be recomputed, or is a recomputation.

A layer with side effects, such as a counter, asks here in order to have them once per micro-batch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Passes(threading.local):
    """State of this thread. The code that runs layers sets it, and restores it afterwards."""

    checkpointing = False
    recomputing = False


PASSES = Passes()


def is_checkpointing() -> bool:
    """Return whether this forward saves no activations, since it will be recomputed."""
    return PASSES.checkpointing


def is_recomputing() -> bool:
    """Return whether this forward is a recomputation."""
    return PASSES.recomputing


@contextmanager
def checkpointing() -> Iterator[None]:
    """Enclose a first forward that saves no activations."""
    outer, PASSES.checkpointing = PASSES.checkpointing, True
    try:
        yield
    finally:
        PASSES.checkpointing = outer


@contextmanager
def recomputing() -> Iterator[None]:
    """Enclose a recomputation."""
    outer, PASSES.recomputing = PASSES.recomputing, True
    try:
        yield
    finally:
        PASSES.recomputing = outer
