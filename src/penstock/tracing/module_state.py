"""What modules hold besides their weights, before and after a forward: buffers, attributes of
Python, variables of hooks.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

#: What every module has; the rest is what its class keeps.
_OF_EVERY_MODULE: Final = frozenset(vars(nn.Module())) | {"forward"}

#: Containers are compared to this depth, and so many of their items from either end.
_DEPTH, _ITEMS = 4, 500

#: A tensor of more bytes is compared by its memory and version, not by its contents.
_LARGE_BYTES: Final = 2**26

#: Something that equals another of its kind only if the values do.
Content = object


@dataclass(frozen=True)
class Place:
    """Where a value of Python stands: its name in words, and how to get and set it."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], None]


@dataclass(frozen=True)
class Kept:
    """A value of Python, to be put back: the object itself, and what it contained if that may
    change.
    """

    value: Any
    content: Any


class ModuleState:
    """The state of some modules.

    Args:
        named: modules with their names in the model; one that comes twice counts once.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Module]]) -> None:
        seen: dict[int, tuple[str, nn.Module]] = {}
        for name, module in named:
            seen.setdefault(id(module), (name, module))
        self.modules = list(seen.values())

    def buffers(self) -> dict[str, Tensor]:
        """All buffers, live, by name."""
        return {
            f"{name}.{key}" if name else key: buffer
            for name, module in self.modules
            for key, buffer in module._buffers.items()
            if buffer is not None
        }

    def weights(self) -> dict[str, Tensor]:
        """All parameters, live, by name."""
        return {
            f"{name}.{key}" if name else key: parameter
            for name, module in self.modules
            for key, parameter in module._parameters.items()
            if parameter is not None
        }

    def buffer_contents(self) -> dict[str, Content]:
        """What the buffers hold."""
        return {name: content(buffer) for name, buffer in self.buffers().items()}

    def weight_marks(self) -> dict[str, Content]:
        """What differs if a weight has been changed: versions, and sums for changes behind
        autograd's back.
        """
        return {name: _mark(weight) for name, weight in self.weights().items()}

    def versions(self) -> tuple[tuple[int, int], ...]:
        """What differs if a buffer was changed in place or replaced; cheap."""
        return tuple(
            (id(buffer), buffer._version)
            for _, module in self.modules
            for buffer in module._buffers.values()
            if buffer is not None
        )

    def places(self) -> dict[str, Place]:
        """Values of Python that modules and their hooks keep from call to call."""
        found: dict[str, Place] = {}
        for name, module in self.modules:
            for place in (*_attributes(name, module), *_hook_variables(name, module)):
                found.setdefault(place.name, place)
        return found

    def values(self) -> dict[str, Content]:
        """What these values are."""
        return {name: content(place.get()) for name, place in self.places().items()}

    def keep(self) -> dict[str, Kept]:
        """These values, to be put back."""
        return {
            name: Kept(value := place.get(), _copied(value))
            for name, place in self.places().items()
        }

    def put_back(self, kept: Mapping[str, Kept]) -> None:
        """Let them be the objects that they were, with what they contained."""
        for name, place in self.places().items():
            if name in kept:
                _refill(kept[name])
                if place.get() is not kept[name].value:
                    place.set(kept[name].value)


def made_tensors(modules: Iterable[nn.Module]) -> dict[int, object]:
    """For `copy.deepcopy`, by their ids: tensors that forwards have left in modules, without the
    graphs that torch does not copy.

    `nn.utils.weight_norm` keeps the weight that it makes in its module; a layer may keep what it
    returned last.
    """
    found: dict[int, object] = {}
    for module in modules:
        for part in module.modules():
            for value in vars(part).values():
                if isinstance(value, Tensor) and not value.is_leaf:
                    found[id(value)] = value.detach().clone()
    return found


def differing(before: Mapping[str, Content], after: Mapping[str, Content]) -> list[str]:
    """The names that are in only one of two states, or with another content."""
    names = dict.fromkeys([*before, *after])
    missing = object()
    return [name for name in names if before.get(name, missing) != after.get(name, missing)]


def content(value: Any, depth: int = _DEPTH) -> Content:
    """Something that tells values apart by what they are, not by which object they are; of what is
    unknown, by the object.
    """
    if isinstance(value, Tensor):
        return _digest(value)
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return type(value), repr(value)  # repr: not-a-number is equal to itself here
    if isinstance(value, np.ndarray):
        return "array", value.shape, str(value.dtype), _hash(value.tobytes())
    if isinstance(value, random.Random):
        return "random", _hash(repr(value.getstate()).encode())
    if isinstance(value, np.random.Generator):
        return "random", repr(value.bit_generator.state)
    if isinstance(value, torch.Generator):
        return "random", _digest(value.get_state())
    if depth == 0 or isinstance(value, (nn.Module, type, FunctionType, MethodType)):
        return "object", id(value)
    if isinstance(value, Mapping):
        items = _ends(list(value.items()))
        return (
            "mapping",
            len(value),
            tuple((repr(key), content(item, depth - 1)) for key, item in items),
        )
    if isinstance(value, (set, frozenset)):
        return "set", tuple(sorted(map(repr, value)))
    if isinstance(value, (list, tuple, deque)):
        return (
            "sequence",
            len(value),
            tuple(content(item, depth - 1) for item in _ends(list(value))),
        )
    if type(value).__module__.partition(".")[0] in ("torch", "builtins", "penstock"):
        return "object", id(value)
    own = getattr(value, "__dict__", None)
    return ("object", id(value)) if own is None else ("fields", content(own, depth - 1))


def _ends(items: list[Any]) -> list[Any]:
    return items if len(items) <= 2 * _ITEMS else items[:_ITEMS] + items[-_ITEMS:]


def _digest(tensor: Tensor) -> Content:
    facts = tuple(tensor.shape), str(tensor.dtype)
    try:
        if tensor.nbytes > _LARGE_BYTES:
            return *facts, tensor.untyped_storage().data_ptr(), tensor._version
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        return *facts, _hash(plain.view(torch.uint8).numpy().tobytes())
    except (RuntimeError, NotImplementedError, TypeError):
        return *facts, id(tensor), tensor._version


def _mark(tensor: Tensor) -> Content:
    try:
        return id(tensor), tensor._version, repr(float(tensor.detach().sum(dtype=torch.float64)))
    except (RuntimeError, NotImplementedError, TypeError):
        return id(tensor), tensor._version


def _hash(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


def _attributes(name: str, module: nn.Module) -> Iterator[Place]:
    """What a module's class keeps in the module; torch's own classes keep nothing that moves."""
    if type(module).__module__.partition(".")[0] in ("torch", "penstock"):
        return
    for key in list(vars(module)):
        if key not in _OF_EVERY_MODULE and not key.startswith("__"):
            yield Place(
                f"{name}.{key}" if name else key,
                partial(vars(module).get, key),
                partial(vars(module).__setitem__, key),
            )


def _hook_variables(name: str, module: nn.Module) -> Iterator[Place]:
    """The variables of functions that hook into a module's forward, and the attributes of objects
    that do.
    """
    for registered in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        hook: Any = registered
        while hasattr(hook, "func"):
            hook = hook.func
        label = f"the hook {getattr(hook, '__qualname__', type(hook).__name__)} of {name}"
        owner = getattr(hook, "__self__", None)
        if owner is None and not isinstance(hook, FunctionType):
            owner = hook
        if owner is not None and not isinstance(owner, nn.Module):
            for key in list(getattr(owner, "__dict__", {})):
                yield Place(
                    f"{label}: {key}",
                    partial(vars(owner).get, key),
                    partial(vars(owner).__setitem__, key),
                )
        code = getattr(hook, "__code__", None)
        cells = getattr(hook, "__closure__", None) or ()
        for key, cell in zip(code.co_freevars if code else (), cells, strict=False):
            yield Place(f"{label}: {key}", partial(_in_cell, cell), partial(_into_cell, cell))


def _in_cell(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing has been assigned yet
        return None


def _into_cell(cell: CellType, value: Any) -> None:
    cell.cell_contents = value


def _copied(value: Any) -> Any:
    """What `_refill` needs."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, (list, deque)):
        return list(value)
    if isinstance(value, (dict, set)):
        return value.copy()
    return None


def _refill(kept: Kept) -> None:
    value, before = kept.value, kept.content
    if isinstance(value, Tensor):
        value.data.copy_(before)  # .data: a graph that has saved it finds what it had
    elif isinstance(value, np.ndarray):
        value[...] = before
    elif isinstance(value, random.Random):
        value.setstate(before)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = before
    elif isinstance(value, torch.Generator):
        value.set_state(before)
    elif isinstance(value, (list, deque)):
        items = list(value)
        if len(items) != len(before) or any(a is not b for a, b in zip(items, before, strict=True)):
            value.clear()
            value.extend(before)
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(before)
