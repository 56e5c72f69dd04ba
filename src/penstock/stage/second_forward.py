"""Consistency of a stage's recomputation: its second forward must repeat the first.

The second forward gets the buffers and plain attributes that the first one had, and the results of
both are compared by fingerprints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from penstock.errors import RunError
from penstock.grad.attributes import Attributes, Values
from penstock.grad.buffers import Buffers, Contents
from penstock.grad.fingerprint import Fingerprint, check_equal, fingerprint
from penstock.modules.recomputing import recomputing
from penstock.values.deferred_checks import DeferredChecks


@dataclass(slots=True)
class FirstForward:
    """The state before a first forward, and the fingerprint of its results.

    Attributes:
        buffers: contents of the modules' buffers.
        attributes: values of the modules' plain attributes.
        outcome: the fingerprint; None where second forwards are not compared.
    """

    buffers: Contents
    attributes: Values
    outcome: Fingerprint | None = None

    def note(self, results: Sequence[Any]) -> None:
        """Store the fingerprint of the forward's results: tensors and constants."""
        self.outcome = fingerprint(results)


class SecondForwards:
    """Runs and compares the second forwards of a stage.

    Args:
        layers: the layers of the stage, in order.
        others: further modules whose buffers forwards may change.
        name: the stage and its layers, for messages.
        checks: receives the results of comparisons that are read later; None to read all at once.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        others: Sequence[nn.Module],
        name: str,
        checks: DeferredChecks | None = None,
    ) -> None:
        parts = [part for layer in (*layers, *others) for part in layer.modules()]
        self._buffers = Buffers(list(dict.fromkeys(parts)))
        self._attributes = Attributes(layers)
        self._name = name
        self._checks = checks

    def first(self) -> FirstForward:
        """Record the state before a first forward."""
        return FirstForward(self._buffers.contents(), self._attributes.contents())

    def seeing(self, first: FirstForward) -> AbstractContextManager[None]:
        """Run a block as a recomputation, with the buffers and attributes of the first forward.

        Afterwards those from before the block are restored, and the buffers in `first` are dropped.
        """
        if not (first.buffers or first.attributes):
            return recomputing()  # the way of most layers, and faster
        return self._restoring(first)

    @contextmanager
    def _restoring(self, first: FirstForward) -> Iterator[None]:
        """Run a block with the state of the first forward, which is needed no more afterwards."""
        with (
            recomputing(),
            self._buffers.with_contents(first.buffers),
            self._attributes.with_contents(first.attributes),
        ):
            yield
        first.buffers = {}

    def check(self, first: FirstForward, results: Sequence[Any], micro_batch: int) -> None:
        """Compare the results of a second forward with those of the first.

        Args:
            first: the first forward.
            results: the results of the second.
            micro_batch: number of the micro-batch, for the message.

        Raises:
            RunError: the results differ. On an accelerator other values are mostly reported in a
                later batch, see `DeferredChecks`.
        """
        if first.outcome is not None:
            place = f"{self._name}, micro-batch {micro_batch}"
            check_equal(results, first.outcome, self._checks, partial(_mismatch, place))


def _mismatch(place: str, mismatch: str) -> RunError:
    """Return the error for a second forward that differs from the first.

    Args:
        place: stage, layers and micro-batch.
        mismatch: how its results differ.
    """
    return RunError(
        f"{place}: recomputed for the backward, the forward made {mismatch}: the gradients would "
        "be those of another network. A second forward has the inputs, buffers, plain attributes "
        "(numbers, strings, flags) and random numbers of torch, random and numpy.random that the "
        "first had. It does not have other state (global variables, lists, a generator of its "
        "own): keep that in a buffer or an attribute, draw from the global generators, or do not "
        "recompute (recompute='never', checkpoint='never')"
    )
