"""A stage's forward that runs a second time for its backward: what both are to see alike, and
whether they came to the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import RunError
from penstock.grad.attributes import Attributes, Values
from penstock.grad.buffers import Buffers, Contents
from penstock.grad.fingerprint import Fingerprint, difference, fingerprint


@dataclass(slots=True)
class FirstForward:
    """What a first forward has seen, and the fingerprint of what it made."""

    buffers: Contents
    attributes: Values
    outcome: Fingerprint | None = None

    def note(self, outcome: Any) -> None:
        """Keep the fingerprint of what it has made."""
        self.outcome = fingerprint(pytree.tree_leaves(outcome))


class SecondForwards:
    """The second forwards of a stage.

    Args:
        layers: modules, in order.
        others: further modules whose buffers forwards may change.
        name: the stage and its layers, for messages.
    """

    def __init__(self, layers: Sequence[nn.Module], others: Sequence[nn.Module], name: str) -> None:
        parts = [part for layer in (*layers, *others) for part in layer.modules()]
        self._buffers = Buffers(list(dict.fromkeys(parts)))
        self._attributes = Attributes(layers)
        self._name = name

    def first(self) -> FirstForward:
        """Before a first forward."""
        return FirstForward(self._buffers.contents(), self._attributes.contents())

    @contextmanager
    def seeing(self, first: FirstForward) -> Iterator[None]:
        """Let a forward see buffers and plain attributes as the first did, and leave them as they
        are. `first` gives its buffers up.
        """
        with (
            self._buffers.as_they_were(first.buffers),
            self._attributes.as_they_were(first.attributes),
        ):
            yield
        first.buffers = {}

    def check(self, first: FirstForward, outcome: Any, micro_batch: int) -> None:
        """Compare a second forward with the first.

        Raises:
            RunError: it has made something else.
        """
        if first.outcome is None:
            return
        found = difference(pytree.tree_leaves(outcome), first.outcome)
        if found is not None:
            raise unlike(f"{self._name}, micro-batch {micro_batch}", found)


def unlike(where: str, found: str) -> RunError:
    """The error for a second forward that made something else than the first."""
    return RunError(
        f"{where}: run again for the backward, the forward made {found}: the gradients would be those of another network. A second "
        "forward has the inputs, buffers, plain attributes (numbers, strings, flags) and random numbers of torch, random and "
        "numpy.random that the first had. State that is elsewhere (global variables, lists, a generator of its own) it has not: "
        "keep that in a buffer or an attribute, draw from the global generators, or run nothing again (recompute='never', "
        "checkpoint='never')"
    )


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """How often each tensor was changed in place; inference tensors do not count."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
