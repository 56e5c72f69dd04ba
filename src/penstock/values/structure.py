"""Flatten a nested value into leaves and a structure, and rebuild it.

    leaves, structure = flatten({"hidden": h, "again": h, "depth": 3})    # leaves: [h, 3]
    unflatten(structure, leaves)                    # both "hidden" and "again" are the same tensor

Leaves are tensors and constants, in order; a tensor that occurs several times is one leaf.
Likewise a container that occurs several times is rebuilt as one container. Leaves are dense
tensors: a sparse one is split into its indices and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import RunError
from penstock.values.classes import name_of, remember
from penstock.values.constants import PLAIN, describe, holds_tensor
from penstock.values.kinds import KINDS, SPARSE, Context, Kind, kind_of

_DENSE = (Tensor, nn.Parameter)


@dataclass(frozen=True, slots=True)
class Structure:
    """How a value nests.

    `kind` is one of `penstock.values.kinds`, or one of three more: `leaf` is the next leaf, `same`
    a leaf that occurred before, and `again` a container that occurred before; the context of these
    two is its number.
    """

    kind: str
    cls: type | None = None
    context: Context = ()
    children: tuple[Structure, ...] = ()

    def describe(self) -> str:
        """Return a text that is the same in every process."""
        if self.kind == "leaf":
            return "*"
        name = self.kind if self.cls is None else f"{self.kind} {name_of(self.cls)}"
        context: list[Any] = []
        for entry in self.context:
            if isinstance(entry, tuple):
                context.append([describe(value) for value in entry])
            else:
                context.append(describe(entry))
        return f"{name}{context}({','.join(child.describe() for child in self.children)})"

    def has(self, kind: str) -> bool:
        """Whether the value contains a container of that kind."""
        return self.kind == kind or any(child.has(kind) for child in self.children)

    def labels(self) -> list[str]:
        """Return the paths of the leaves, such as `[0].mask`."""
        labels: list[str] = []
        self._label("", labels)
        return labels

    def _label(self, path: str, labels: list[str]) -> None:
        """Append the paths of the leaves below `path`."""
        if self.kind == "leaf":
            labels.append(path)
        label = KINDS[self.kind].label if self.children else None
        for index, child in enumerate(self.children):
            assert label is not None
            child._label(path + label(self.context, index), labels)

    def items(self) -> list[bool]:
        """Return by leaf whether it is an item of a list, tuple or dict (or the value itself), and
        not an attribute of an object.
        """
        flags: list[bool] = []
        self._items(flags, in_attribute=False)
        return flags

    def _items(self, flags: list[bool], *, in_attribute: bool) -> None:
        """Append the flags of the leaves; `in_attribute` if they are in an object's attribute."""
        if self.kind == "leaf":
            flags.append(not in_attribute)
        below_attribute = in_attribute or (self.kind in KINDS and KINDS[self.kind].has_attributes)
        for child in self.children:
            child._items(flags, in_attribute=below_attribute)


LEAF = Structure("leaf")


class Unflattenable(RunError):
    """A value that cannot be flattened; `what` is the reason, `path` the place in the value."""

    def __init__(self, what: str, path: str = "") -> None:
        self.what, self.path = what, path
        super().__init__(f"{what}{f' (at {path})' if path else ''}")


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """Return leaves and structure of a value.

    Raises:
        Unflattenable: the value contains a tensor that cannot be sent, or an object that may hide a
            tensor.
    """
    if type(value) is Tensor and value.layout is torch.strided:
        check_tensor(value)
        return [value], LEAF
    flattening = _Flattening()
    return flattening.leaves, flattening.visit(value)


def check_tensor(tensor: Tensor) -> None:
    """Refuse tensors that are not plain strided memory.

    Raises:
        Unflattenable: the tensor is nested, quantized, compressed, or of a subclass of Tensor.
    """
    cls = type(tensor)
    if cls not in _DENSE:
        raise Unflattenable(
            f"a {cls.__name__} cannot cross a stage boundary, because it is a subclass of Tensor "
            "whose contents only it knows: pass plain tensors, such as "
            "tensor.as_subclass(torch.Tensor) or, of a DTensor, its to_local()"
        )
    if tensor.is_nested:
        raise Unflattenable(
            "a nested tensor cannot cross a stage boundary: pass a padded tensor and its mask, as "
            "to_padded_tensor(0.0) makes it, or its values and offsets"
        )
    if tensor.is_quantized:
        raise Unflattenable(
            "a quantized tensor cannot cross a stage boundary: pass its int_repr() and its scale, "
            "or dequantize() it"
        )
    if tensor.layout is not torch.strided:
        mkldnn = torch._mkldnn  # type: ignore[attr-defined]
        advice = "to_dense()" if tensor.layout is mkldnn else "to_sparse_coo()"
        raise Unflattenable(
            f"a tensor of layout {tensor.layout} cannot cross a stage boundary: pass its {advice}"
        )


class _Flattening:
    """Flattens one value.

    `_containers` has visited containers by id, with their number (-1 while they are being
    flattened) and a reference that keeps the id in use.
    """

    def __init__(self) -> None:
        self.leaves: list[Any] = []
        self._leaf_numbers: dict[int, int] = {}  # of tensors, by id
        self._containers: dict[int, tuple[int, Any]] = {}
        self._container_count = 0

    def visit(self, value: Any) -> Structure:
        """Append the leaves of a value, and return its structure."""
        cls = type(value)
        if cls in PLAIN:
            self.leaves.append(value)
            return LEAF
        if isinstance(value, Tensor):
            if value.layout is torch.sparse_coo and cls in _DENSE:
                return self._container(value, SPARSE, None)
            return self._tensor(value)
        kind = kind_of(cls)
        if kind is not None:
            return self._container(value, kind, cls if kind.named else None)
        if holds_tensor(value):
            raise Unflattenable(_hidden_tensor_message(cls))
        self.leaves.append(value)
        return LEAF

    def _tensor(self, tensor: Tensor) -> Structure:
        """Append a tensor unless it is a leaf already."""
        number = self._leaf_numbers.get(id(tensor))
        if number is not None:
            return Structure("same", None, (number,))
        check_tensor(tensor)
        self._leaf_numbers[id(tensor)] = len(self.leaves)
        self.leaves.append(tensor)
        return LEAF

    def _container(self, value: Any, kind: Kind, cls: type | None) -> Structure:
        """Flatten a container unless it was visited before."""
        visited = self._containers.get(id(value))
        if visited is not None:
            number, _ = visited
            if number < 0:
                raise Unflattenable(
                    f"a {type(value).__name__} cannot cross a stage boundary, because it contains "
                    "itself: remove that reference"
                )
            return Structure("again", None, (number,))
        self._containers[id(value)] = -1, value
        if cls is not None:
            remember(cls)
        context, parts = kind.split(value)
        children = []
        for index, part in enumerate(parts):
            try:
                children.append(self.visit(part))
            except Unflattenable as error:
                path = kind.label(context, index) + error.path
                # One error with the whole path, not a chain with one error per level.
                raise Unflattenable(error.what, path) from error.__cause__
        # Numbered after its children, as `unflatten` builds them.
        self._containers[id(value)] = self._container_count, value
        self._container_count += 1
        return Structure(kind.name, cls, context, tuple(children))


def _hidden_tensor_message(cls: type) -> str:
    """Return the error message for an object that may hide a tensor."""
    return (
        f"a {cls.__name__} cannot cross a stage boundary, because there may be tensors in it, "
        "whose gradients would be lost: pass the tensors themselves, in tuples, lists, dicts, "
        "dataclasses or objects of a class written in Python"
    )


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Any:
    """Rebuild a value from its structure and leaves."""
    if structure is LEAF or structure.kind == "leaf":
        return leaves[0]
    built: list[Any] = []
    next_leaf = 0

    def build(node: Structure) -> Any:
        """Rebuild a part of the value."""
        nonlocal next_leaf
        if node.kind == "leaf":
            next_leaf += 1
            return leaves[next_leaf - 1]
        if node.kind == "same":
            return leaves[node.context[0]]
        if node.kind == "again":
            return built[node.context[0]]
        parts = [build(child) for child in node.children]
        container = KINDS[node.kind].build(node.cls or object, node.context, parts)
        built.append(container)
        return container

    return build(structure)


def leaves_of(value: Any) -> list[Any]:
    """Return the tensors and constants in a value."""
    return [value] if type(value) is Tensor else flatten(value)[0]


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in a value, each once."""
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return the value with a function applied to every tensor; once to a tensor that occurs
    several times.
    """
    if type(value) is Tensor and value.layout is torch.strided:
        return function(value)
    leaves, structure = flatten(value)
    results = [function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return unflatten(structure, results)


def labelled_leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a value with their paths."""
    leaves, structure = flatten(value)
    return zip(structure.labels(), leaves, strict=True)
