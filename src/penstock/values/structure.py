"""A nested value as leaves and a structure, and back.

    leaves, structure = flatten({"hidden": h, "again": h, "depth": 3})       leaves: [h, 3]
    unflatten(structure, leaves)                                             h stands in both
    places, as one tensor

Leaves are tensors and constants, in order; one tensor that stands in several places is one leaf. So
are containers that stand in
several places one container afterwards. Tensors are dense: a sparse one is taken apart into its
indices and values.
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
    """How a value nests. The kinds of `penstock.values.kinds`, and three more: `leaf` is the next
    leaf, `same` is a leaf that stood
    somewhere before, and `again` a container that did; the context of these two says which.
    """

    kind: str
    cls: type | None = None
    context: Context = ()
    children: tuple[Structure, ...] = ()

    def describe(self) -> str:
        """In words that are the same in every process."""
        if self.kind == "leaf":
            return "*"
        name = self.kind if self.cls is None else f"{self.kind} {name_of(self.cls)}"
        context = [
            describe(entry) if not isinstance(entry, tuple) else [describe(one) for one in entry]
            for entry in self.context
        ]
        return f"{name}{context}({','.join(child.describe() for child in self.children)})"

    def has(self, kind: str) -> bool:
        """Whether there is a container of that kind in it."""
        return self.kind == kind or any(child.has(kind) for child in self.children)

    def labels(self) -> list[str]:
        """Where the leaves stand, such as `[0].mask`."""
        labels: list[str] = []
        self._label("", labels)
        return labels

    def _label(self, path: str, labels: list[str]) -> None:
        if self.kind == "leaf":
            labels.append(path)
        label = KINDS[self.kind].label if self.children else None
        for place, child in enumerate(self.children):
            assert label is not None
            child._label(path + label(self.context, place), labels)

    def items(self) -> list[bool]:
        """By leaf, whether it is an item of a list, tuple or dict (or the value itself), and no
        attribute of an object.
        """
        flags: list[bool] = []
        self._items(flags, loose=False)
        return flags

    def _items(self, flags: list[bool], *, loose: bool) -> None:
        if self.kind == "leaf":
            flags.append(not loose)
        inner = loose or (self.kind in KINDS and KINDS[self.kind].loose)
        for child in self.children:
            child._items(flags, loose=inner)


LEAF = Structure("leaf")


class Unflattenable(RunError):
    """A value that cannot be taken apart; `what` is in its way, `path` leads there."""

    def __init__(self, what: str, path: str = "") -> None:
        self.what, self.path = what, path
        super().__init__(f"{what}{f' (at {path})' if path else ''}")


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """Leaves and structure of a value.

    Raises:
        Unflattenable: there is a tensor in it that cannot cross, or an object in which a tensor may
        be hidden.
    """
    if type(value) is Tensor and value.layout is torch.strided:
        check_tensor(value)
        return [value], LEAF
    flattening = _Flattening()
    return flattening.leaves, flattening.visit(value)


def check_tensor(tensor: Tensor) -> None:
    """Refuse tensors that are no plain memory.

    Raises:
        Unflattenable: it is nested, quantized, compressed, or of another class than Tensor.
    """
    cls = type(tensor)
    if cls not in _DENSE:
        raise Unflattenable(
            f"a {cls.__name__} cannot cross a stage boundary, because it is a subclass of Tensor "
            "whose contents only it "
            "knows: pass plain tensors, such as tensor.as_subclass(torch.Tensor) or, of a DTensor, "
            "its "
            "to_local()"
        )
    if tensor.is_nested:
        raise Unflattenable(
            "a nested tensor cannot cross a stage boundary: pass a padded tensor and its mask, as "
            "to_padded_tensor(0.0) "
            "makes it, or its values and offsets"
        )
    if tensor.is_quantized:
        raise Unflattenable(
            "a quantized tensor cannot cross a stage boundary: pass its int_repr() and its scale, "
            "or "
            "dequantize() it"
        )
    if tensor.layout is not torch.strided:
        advice = "to_dense()" if tensor.layout is torch._mkldnn else "to_sparse_coo()"  # type: ignore[attr-defined]
        raise Unflattenable(
            f"a tensor of layout {tensor.layout} cannot cross a stage boundary: pass its {advice}"
        )


class _Flattening:
    """One value on its way apart. `memo` has the containers by id, with their number, -1 while one
    is being taken apart.
    """

    def __init__(self) -> None:
        self.leaves: list[Any] = []
        self._places: dict[int, int] = {}
        self._memo: dict[int, tuple[int, Any]] = {}
        self._done = 0

    def visit(self, value: Any) -> Structure:
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
            raise Unflattenable(_hidden(cls))
        self.leaves.append(value)
        return LEAF

    def _tensor(self, tensor: Tensor) -> Structure:
        place = self._places.get(id(tensor))
        if place is not None:
            return Structure("same", None, (place,))
        check_tensor(tensor)
        self._places[id(tensor)] = len(self.leaves)
        self.leaves.append(tensor)
        return LEAF

    def _container(self, value: Any, kind: Kind, cls: type | None) -> Structure:
        earlier = self._memo.get(id(value))
        if earlier is not None:
            if earlier[0] < 0:
                raise Unflattenable(
                    f"a {type(value).__name__} cannot cross a stage boundary, because it has "
                    "itself among its parts: cut "
                    "that reference"
                )
            return Structure("again", None, (earlier[0],))
        self._memo[id(value)] = -1, value
        if cls is not None:
            remember(cls)
        context, parts = kind.apart(value)
        children = []
        for place, part in enumerate(parts):
            try:
                children.append(self.visit(part))
            except Unflattenable as error:
                path = kind.label(context, place) + error.path
                raise Unflattenable(error.what, path) from error.__cause__
        # The parts as well: what has been made for this alone must not leave its id to another.
        self._memo[id(value)] = self._done, (value, parts)
        self._done += 1
        return Structure(kind.name, cls, context, tuple(children))


def _hidden(cls: type) -> str:
    return (
        f"a {cls.__name__} cannot cross a stage boundary, because there may be tensors in it, "
        "whose gradients would be lost: pass the "
        "tensors themselves, in tuples, lists, dicts, dataclasses or objects of a class written in "
        "Python"
    )


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Any:
    """The value of some leaves."""
    if structure is LEAF or structure.kind == "leaf":
        return leaves[0]
    built: list[Any] = []
    place = 0

    def build(node: Structure) -> Any:
        nonlocal place
        if node.kind == "leaf":
            place += 1
            return leaves[place - 1]
        if node.kind == "same":
            return leaves[node.context[0]]
        if node.kind == "again":
            return built[node.context[0]]
        parts = [build(child) for child in node.children]
        container = KINDS[node.kind].together(node.cls or object, node.context, parts)
        built.append(container)
        return container

    return build(structure)


def leaves_of(value: Any) -> list[Any]:
    """Tensors and constants in a value."""
    return [value] if type(value) is Tensor else flatten(value)[0]


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in a value, each once."""
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The value with every tensor replaced; one that stands in several places is replaced once."""
    if type(value) is Tensor and value.layout is torch.strided:
        return function(value)
    leaves, structure = flatten(value)
    results = [function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return unflatten(structure, results)


def labelled(value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a value, and where they stand."""
    leaves, structure = flatten(value)
    return zip(structure.labels(), leaves, strict=True)
