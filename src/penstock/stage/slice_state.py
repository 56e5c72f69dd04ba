"""State that slices of the same sequences pass on within a stage.

It is what a layer needs of the earlier tokens: keys and values, recurrent states, the number of
tokens. In the forward a layer returns it for the next slice, which gets it as leaves of its own
graph. In the backward the gradients of these leaves are those of the tensors that were passed on:
further roots, beside the output, of the backward of the slice before.

Source: Li et al. 2021, TeraPipe, section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import RunError

_CONSTANTS = (type(None), bool, int, float, str)


@dataclass
class SliceState:
    """The state that one slice gets from the slices before and passes on to the next.

    Attributes:
        incoming: the state from the slices before, by layer.
        keeps: whether there is a next slice.
        outgoing: the state for the next slice, by layer.
    """

    incoming: dict[int, Any] = field(default_factory=dict)
    keeps: bool = True
    outgoing: dict[int, Any] = field(default_factory=dict)
    _versions: list[tuple[str, Tensor, int]] = field(default_factory=list)

    def run(self, index: int, name: str, module: nn.Module, value: Any) -> Any:
        """Run a layer's `forward_slice` and return its output.

        Args:
            index: number of the layer.
            name: its name, for messages.
            module: the layer.
            value: its input.

        Raises:
            RunError: it did not return an output and a state.
        """
        incoming = self.incoming.get(index)
        self._watch(name, incoming)
        # tracing.slices.has_past has checked that the layer has a forward_slice.
        result = module.forward_slice(value, incoming)  # type: ignore[operator]
        if not isinstance(result, tuple) or len(result) != 2:
            raise RunError(
                f"forward_slice of layer {name} ({type(module).__name__}) returned "
                f"{type(result).__name__}: it must return its output, and the state that the next "
                "slice needs of this one and those before"
            )
        output, outgoing = result
        if self.keeps:
            for leaf in pytree.tree_leaves(outgoing):
                if not isinstance(leaf, (Tensor, *_CONSTANTS)):
                    raise RunError(
                        f"the past of layer {name} ({type(module).__name__}) has a "
                        f"{type(leaf).__name__} in it: make it of tensors and plain constants in "
                        "nested tuples, lists and dicts"
                    )
            self._watch(name, outgoing)
            self.outgoing[index] = outgoing
        return output

    def check_unchanged(self) -> None:
        """Check that no layer has changed shared state in place.

        Another slice would read the change, and autograd would not notice it.

        Raises:
            RunError: a layer has.
        """
        for name, tensor, version in self._versions:
            if tensor._version != version:
                raise RunError(
                    f"the past of layer {name} was changed in place: its forward_slice must make "
                    "new tensors (torch.cat), and layers after it must not work in place on what "
                    "it keeps"
                )

    def _watch(self, name: str, value: Any) -> None:
        """Record the versions of all tensors in a layer's state for `check_unchanged`."""
        self._versions += [
            (name, leaf, leaf._version)
            for leaf in pytree.tree_leaves(value)
            if isinstance(leaf, Tensor)
        ]


def tensors_of(state: dict[int, Any]) -> list[Tensor]:
    """Return all tensors of a state, in an order that depends on its structure alone."""
    return [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor)]


@dataclass
class SliceStates:
    """The states that slices of a stage have passed on, and their gradients.

    Attributes:
        waiting: by slice, the state that waits for its forward.
    """

    waiting: dict[int, dict[int, Any]] = field(default_factory=dict)
    _grads: dict[int, list[Tensor | None]] = field(default_factory=dict)

    def store(self, after: int, state: dict[int, Any], wants_grad: Sequence[bool]) -> None:
        """Store a state for slice `after`, as leaves of that slice's graph.

        Args:
            after: the next slice.
            state: the state.
            wants_grad: for each of its tensors, whether it gets a gradient.
        """
        # tree_map visits leaves in the order of `tensors_of`, by which the flags are sorted.
        flags = iter(wants_grad)
        self.waiting[after] = pytree.tree_map_only(
            Tensor, lambda leaf: leaf.detach().requires_grad_(next(flags)), state
        )

    def store_grads(self, number: int, grads: list[Tensor | None]) -> None:
        """Store the gradients of the state that slice `number` got from the slice before.

        Args:
            number: the slice.
            grads: one for each tensor that gets a gradient.
        """
        if grads:
            self._grads[number] = grads

    def pop_grads(self, after: int | None) -> list[Tensor | None]:
        """Return and drop the gradients that slice `after` has stored; empty if it is None."""
        return [] if after is None else self._grads.pop(after, [])

    def clear(self) -> None:
        """Drop all states and gradients."""
        self.waiting.clear()
        self._grads.clear()
