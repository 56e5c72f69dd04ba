"""What crosses a boundary: nested tuples, lists and dicts of tensors and plain constants.

Only tensors travel. The structure, shapes and which tensors want a gradient go ahead once, as JSON, and are remembered.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import RunError

_CONSTANTS = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class TensorForm:
    """Shape and dtype of a tensor, and whether it wants a gradient."""

    shape: tuple[int, ...]
    dtype: str
    wants_grad: bool

    def empty(self) -> Tensor:
        """A CPU tensor of this form."""
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype))


@dataclass(frozen=True)
class Payload:
    """A flattened value: `leaves` are tensors and constants, `structure` is how they nest: empty for a bare tensor, `*` for a
    flat list, else torch's tree specification as JSON.

    `wants_grad` says for every tensor whether a gradient is to come back for it.
    """

    structure: str
    leaves: tuple[Any, ...]
    wants_grad: tuple[bool, ...]

    @classmethod
    def of(cls, value: Any, wants_grad: tuple[bool, ...] | None = None) -> Payload:
        """Flatten `value`; by default a tensor wants a gradient when it requires one.

        Raises:
            RunError: a leaf is neither a tensor nor a plain constant, or the nesting is of an unknown kind.
        """
        if isinstance(value, Tensor):
            return cls("", (value,), (value.requires_grad,) if wants_grad is None else wants_grad)
        leaves, spec = pytree.tree_flatten(value)
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *_CONSTANTS)):
                raise RunError(f"a {type(leaf).__name__} cannot cross a stage boundary: layers there may return tensors and "
                               "plain constants in nested tuples, lists and dicts")  # fmt: skip
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        wants = (
            tuple(tensor.requires_grad for tensor in tensors) if wants_grad is None else wants_grad
        )
        return cls(_structure(value, spec), tuple(leaves), wants)

    @classmethod
    def flat(cls, gradients: list[Tensor | None]) -> Payload:
        """A list of gradients, with None where there is none; a single one as itself, which is the shortest to say."""
        if len(gradients) == 1 and gradients[0] is not None:
            return cls("", (gradients[0],), (False,))
        return cls(
            "*", tuple(gradients), tuple(False for gradient in gradients if gradient is not None)
        )

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the leaves, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def with_tensors(self, tensors: list[Tensor]) -> Payload:
        """The same with other tensors in the tensors' places."""
        replacements = iter(tensors)
        leaves = tuple(
            next(replacements) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves
        )
        return Payload(self.structure, leaves, self.wants_grad)

    def value(self) -> Any:
        """The nested value."""
        if self.structure == "":
            return self.leaves[0]
        if self.structure == "*":
            return list(self.leaves)
        return pytree.tree_unflatten(list(self.leaves), _spec(self.structure))

    def form(self) -> tuple[object, ...]:
        """All but the tensors' contents, cheap to make and to compare."""
        leaves = tuple(
            (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves
        )
        return self.structure, leaves, self.wants_grad

    def header(self) -> str:
        """All but the tensors' contents, as JSON."""
        forms = iter(self.wants_grad)
        described = [
            {
                "shape": list(leaf.shape),
                "dtype": str(leaf.dtype).removeprefix("torch."),
                "wants_grad": next(forms),
            }
            if isinstance(leaf, Tensor)
            else {"constant": leaf}
            for leaf in self.leaves
        ]
        return json.dumps({"structure": self.structure, "leaves": described})


@dataclass(frozen=True)
class Header:
    """What is known of a payload before its tensors arrive."""

    structure: str
    leaves: tuple[Any, ...]

    @classmethod
    def parse(cls, text: str) -> Header:
        """Read what `Payload.header` wrote."""
        found = json.loads(text)
        leaves = [
            leaf["constant"]
            if "constant" in leaf
            else TensorForm(tuple(leaf["shape"]), leaf["dtype"], leaf["wants_grad"])
            for leaf in found["leaves"]
        ]
        return cls(found["structure"], tuple(leaves))

    @property
    def forms(self) -> list[TensorForm]:
        """The tensors' forms, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorForm)]

    def filled(self, tensors: list[Tensor]) -> Payload:
        """The payload whose tensors have arrived."""
        arrived = iter(tensors)
        leaves = tuple(
            next(arrived) if isinstance(leaf, TensorForm) else leaf for leaf in self.leaves
        )
        return Payload(self.structure, leaves, tuple(form.wants_grad for form in self.forms))


def _structure(value: Any, spec: pytree.TreeSpec) -> str:
    """The nesting as JSON, once it is certain to read back as it was."""
    try:
        text = str(pytree.treespec_dumps(spec))
        same = _spec(text) == spec
    except (NotImplementedError, ValueError, TypeError, AttributeError) as error:
        raise RunError(f"a {type(value).__name__} cannot cross a stage boundary ({error}): return tensors in nested tuples, "
                       "lists and dicts") from error  # fmt: skip
    if not same:
        raise RunError(f"a {type(value).__name__} cannot cross a stage boundary, because a key of a dict in it would change on the "
                       "way: keys there may be strings and numbers")  # fmt: skip
    return text


@lru_cache(maxsize=256)
def _spec(structure: str) -> pytree.TreeSpec:
    """Read the nesting back."""
    if "collections.defaultdict" in _kinds(
        json.loads(structure)[1]
    ):  # torch would import whatever module its factory names
        raise ValueError("a defaultdict has a function inside, which does not travel")
    return pytree.treespec_loads(structure)


def _kinds(tree: dict[str, Any]) -> Iterator[str | None]:
    yield tree["type"]
    for child in tree["children_spec"]:
        yield from _kinds(child)
