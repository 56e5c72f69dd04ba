"""What slices of the same sequences hand on to each other within a stage: keys and values, states,
how many tokens there were.

Going forward, a layer leaves it for the next slice, which finds it as leaves of a graph of its own.
Going backward, the gradients that gather in these leaves are those of what had been left: roots,
beside the output, of the backward of the slice before.

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
class Past:
    """What one slice finds of the slices before, and leaves for the next, by layer. `keeps` is
    false where there is no next.
    """

    found: dict[int, Any] = field(default_factory=dict)
    keeps: bool = True
    left: dict[int, Any] = field(default_factory=dict)
    _versions: list[tuple[str, Tensor, int]] = field(default_factory=list)

    def run(self, index: int, name: str, module: nn.Module, value: Any) -> Any:
        """A layer's output for this slice.

        Raises:
            RunError: it did not return a value and a past.
        """
        found = self.found.get(index)
        self._watch(name, found)
        made = module.forward_slice(value, found)  # type: ignore[operator]  # tracing.slices.has_past has seen it
        if not isinstance(made, tuple) or len(made) != 2:
            raise RunError(
                f"forward_slice of layer {name} ({type(module).__name__}) returned {type(made).__name__}: it returns two "
                "things, its output and what the next slice needs of this one and those before"
            )
        value, left = made
        if self.keeps:
            for leaf in pytree.tree_leaves(left):
                if not isinstance(leaf, (Tensor, *_CONSTANTS)):
                    raise RunError(
                        f"the past of layer {name} ({type(module).__name__}) has a {type(leaf).__name__} in it: make it of "
                        "tensors and plain constants in nested tuples, lists and dicts"
                    )
            self._watch(name, left)
            self.left[index] = left
        return value

    def check_unchanged(self) -> None:
        """Nobody may write into what slices share: another one would read it, and no gradient would
        tell.

        Raises:
            RunError: a layer has.
        """
        for name, tensor, version in self._versions:
            if tensor._version != version:
                raise RunError(
                    f"the past of layer {name} was changed in place: its forward_slice must make new tensors (torch.cat), and "
                    "layers after it must not work in place on what it keeps"
                )

    def _watch(self, name: str, value: Any) -> None:
        self._versions += [
            (name, leaf, leaf._version)
            for leaf in pytree.tree_leaves(value)
            if isinstance(leaf, Tensor)
        ]


def tensors_of(past: dict[int, Any]) -> list[Tensor]:
    """All tensors in it, in an order that is always the same."""
    return [leaf for leaf in pytree.tree_leaves(past) if isinstance(leaf, Tensor)]


@dataclass
class Pasts:
    """On a stage, by slice: what waits for its forward, and the gradients of it that its backward
    has found.
    """

    waiting: dict[int, dict[int, Any]] = field(default_factory=dict)
    _grads: dict[int, list[Tensor | None]] = field(default_factory=dict)

    def leave(self, after: int, left: dict[int, Any], wants_grad: Sequence[bool]) -> None:
        """Let slice `after` find `left`, as leaves of its own graph; `wants_grad` by tensor."""
        wanted = iter(wants_grad)
        self.waiting[after] = pytree.tree_map(
            lambda leaf: (
                leaf.detach().requires_grad_(next(wanted)) if isinstance(leaf, Tensor) else leaf
            ),
            left,
        )

    def give_back(self, number: int, grads: list[Tensor | None]) -> None:
        """The gradients of what slice `number` found, for those of its tensors that want one."""
        if grads:
            self._grads[number] = grads

    def take_back(self, after: int | None) -> list[Tensor | None]:
        """What slice `after` gave back, if there is one."""
        return [] if after is None else self._grads.pop(after, [])

    def clear(self) -> None:
        """Drop everything."""
        self.waiting.clear()
        self._grads.clear()
