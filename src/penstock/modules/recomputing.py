"""Whether the current forward will be recomputed, or is a recomputation.

A layer with side effects, such as a counter, asks here in order to have them once per micro-batch.
"""

from __future__ import annotations

import threading

import torch


class Passes(threading.local):
    """State of this thread. The code that runs layers sets it, and restores it afterwards."""

    checkpointing = False
    recomputing = False


PASSES = Passes()


def is_checkpointing() -> bool:
    """Return whether this forward saves no activations, since it will be recomputed."""
    return PASSES.checkpointing


def is_recomputing() -> bool:
    """Return whether this forward is a recomputation.

    A forward in a backward is one, such as that of a user's own checkpoint. Autograd runs it in the
    thread of its device, where nothing has been set: on several GPUs that is another thread than
    the one that has called the backward.
    """
    # -1 outside of a backward; torch has no public function for this.
    return PASSES.recomputing or torch._C._current_graph_task_id() != -1


class checkpointing:  # noqa: N801 - a context manager that is called like a function
    """Encloses a first forward that saves no activations.

    A class, because it is entered for every micro-batch, and a generator takes six times as long.
    """

    __slots__ = ("_outer",)

    def __enter__(self) -> None:
        self._outer, PASSES.checkpointing = PASSES.checkpointing, True

    def __exit__(self, *error: object) -> None:
        PASSES.checkpointing = self._outer


class recomputing:  # noqa: N801 - as above
    """Encloses a recomputation, and a backward, in which a layer may recompute by itself."""

    __slots__ = ("_outer",)

    def __enter__(self) -> None:
        self._outer, PASSES.recomputing = PASSES.recomputing, True

    def __exit__(self, *error: object) -> None:
        PASSES.recomputing = self._outer
