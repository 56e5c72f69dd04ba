"""Whether the forward that this thread is in runs for the first of two times, or for the second.

A layer that has effects besides its output, such as a counter, asks here so as to have them once
per micro-batch.
"""

from __future__ import annotations

import threading


class Passes(threading.local):
    """What this thread is doing; whoever runs layers says so here, and puts back what it found."""

    checkpointing = False
    recomputing = False


PASSES = Passes()


def is_checkpointing() -> bool:
    """Whether this forward keeps nothing for its backward, because it will be run again before
    that.
    """
    return PASSES.checkpointing


def is_recomputing() -> bool:
    """Whether this forward is that second run."""
    return PASSES.recomputing
