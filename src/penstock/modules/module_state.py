"""State of modules besides their weights, before and after a forward.

It consists of buffers, Python attributes, and variables of hooks.
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

from penstock.modules.state_names import full_name

#: Attributes that every module has; others belong to its class.
_OF_EVERY_MODULE: Final = frozenset(vars(nn.Module())) | {"forward"}

#: Containers are compared to this depth, and by this number of items from either end.
_DEPTH, _ITEMS = 4, 500

#: Larger tensors are compared by memory address and version, not by their contents.
_LARGE_BYTES: Final = 2**26

#: A comparable digest of a value: equal if and only if the values are.
Content = object


@dataclass(frozen=True)
class Place:
    """A variable.

    Attributes:
        name: its name in messages.
        get: returns its value.
        set: assigns a value.
    """

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], None]


@dataclass(frozen=True)
class Snapshot:
    """A value that can be restored.

    Attributes:
        value: the object.
        content: a copy of its contents, if it is mutable.
        items: of a container, the items that can be restored themselves.
    """

    value: Any
    content: Any
    items: tuple[Snapshot, ...] = ()


class ModuleState:
    """The state of some modules.

    Args:
        named: modules with their names in the model; duplicates count once.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Module]]) -> None:
        unique: dict[int, tuple[str, nn.Module]] = {}
        for name, module in named:
            unique.setdefault(id(module), (name, module))
        self.modules = list(unique.values())

    def buffers(self) -> dict[str, Tensor]:
        """Return all buffers by name, not copied."""
        return {
            full_name(name, key): buffer
            for name, module in self.modules
            for key, buffer in module._buffers.items()
            if buffer is not None
        }

    def weights(self) -> dict[str, Tensor]:
        """Return all parameters by name, not copied."""
        return {
            full_name(name, key): parameter
            for name, module in self.modules
            for key, parameter in module._parameters.items()
            if parameter is not None
        }

    def buffer_contents(self) -> dict[str, Content]:
        """Return a digest of each buffer."""
        return {name: content(buffer) for name, buffer in self.buffers().items()}

    def weight_marks(self) -> dict[str, Content]:
        """Return a value for each weight that differs if the weight has been changed.

        It contains the version, and the sum for changes that autograd does not see.
        """
        return {name: _mark(weight) for name, weight in self.weights().items()}

    def versions(self) -> tuple[tuple[int, int], ...]:
        """Return a value that differs if a buffer was changed in place or replaced; fast."""
        return tuple(
            (id(buffer), buffer._version)
            for _, module in self.modules
            for buffer in module._buffers.values()
            if buffer is not None
        )

    def places(self) -> dict[str, Place]:
        """Return the Python variables that modules and their hooks keep from call to call."""
        places: dict[str, Place] = {}
        for name, module in self.modules:
            for place in (*_attributes(name, module), *_hook_variables(name, module)):
                places.setdefault(place.name, place)
        return places

    def values(self) -> dict[str, Content]:
        """Return a digest of each of these variables."""
        return {name: content(place.get()) for name, place in self.places().items()}

    def keep(self) -> dict[str, Snapshot]:
        """Return snapshots of these variables, for `put_back`."""
        return {name: _snapshot(place.get()) for name, place in self.places().items()}

    def put_back(self, snapshots: Mapping[str, Snapshot]) -> None:
        """Restore these variables: the same objects with the same contents."""
        for name, place in self.places().items():
            if name in snapshots:
                snapshot = snapshots[name]
                _restore_content(snapshot)
                if place.get() is not snapshot.value:
                    place.set(snapshot.value)


def computed_tensors(modules: Iterable[nn.Module]) -> dict[int, object]:
    """Return a memo for `copy.deepcopy` with detached copies of tensors computed by forwards.

    Without it torch refuses to copy tensors that have a graph. `nn.utils.weight_norm` stores the
    weight that it computes in its module; a layer may store its last output.
    """
    memo: dict[int, object] = {}
    for module in modules:
        for submodule in module.modules():
            for value in vars(submodule).values():
                if isinstance(value, Tensor) and not value.is_leaf:
                    memo[id(value)] = value.detach().clone()
    return memo


def differing_names(before: Mapping[str, Content], after: Mapping[str, Content]) -> list[str]:
    """Return the names that occur in only one of two states, or with different contents."""
    names = dict.fromkeys([*before, *after])
    missing = object()
    return [name for name in names if before.get(name, missing) != after.get(name, missing)]


def content(value: Any, depth: int = _DEPTH) -> Content:
    """Return a digest that compares values by contents, and unknown objects by identity."""
    if isinstance(value, Tensor):
        return _digest(value)
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return type(value), repr(value)  # by repr, not-a-number equals itself
    if isinstance(value, np.ndarray):
        return "array", value.shape, str(value.dtype), _hash(value.tobytes())
    generator = _generator_content(value)
    if generator is not None:
        return generator
    if depth == 0 or isinstance(value, (nn.Module, type, FunctionType, MethodType)):
        return "object", id(value)
    container = _container_content(value, depth)
    if container is not None:
        return container
    is_library_object = type(value).__module__.partition(".")[0] in (
        "torch",
        "builtins",
        "penstock",
    )
    fields = None if is_library_object else getattr(value, "__dict__", None)
    return ("object", id(value)) if fields is None else ("fields", content(fields, depth - 1))


def _generator_content(value: Any) -> Content | None:
    """Return the state of a random generator; None for other values."""
    if isinstance(value, random.Random):
        return "random", _hash(repr(value.getstate()).encode())
    if isinstance(value, np.random.Generator):
        return "random", repr(value.bit_generator.state)
    if isinstance(value, torch.Generator):
        return "random", _digest(value.get_state())
    return None


def _container_content(value: Any, depth: int) -> Content | None:
    """Return a digest of a container: its length and up to `_ITEMS` items from either end."""
    if isinstance(value, Mapping):
        items = _ends(list(value.items()))
        pairs = tuple((repr(key), content(item, depth - 1)) for key, item in items)
        return "mapping", len(value), pairs
    if isinstance(value, (set, frozenset)):
        # Sorted, because two equal sets may iterate in different orders.
        return "set", tuple(sorted(map(repr, value)))
    if isinstance(value, (list, tuple, deque)):
        contents = tuple(content(item, depth - 1) for item in _ends(list(value)))
        return "sequence", len(value), contents
    return None


def _ends(items: list[Any]) -> list[Any]:
    return items if len(items) <= 2 * _ITEMS else items[:_ITEMS] + items[-_ITEMS:]


def _digest(tensor: Tensor) -> Content:
    """Return a digest of a tensor; of a large one, or one that cannot be read, its identity."""
    facts = tuple(tensor.shape), str(tensor.dtype)
    try:
        if tensor.nbytes > _LARGE_BYTES:
            return *facts, tensor.untyped_storage().data_ptr(), tensor._version
        # Compared as bytes, because NumPy has no bfloat16 and no 8-bit floats.
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        return *facts, _hash(plain.view(torch.uint8).numpy().tobytes())
    # Meta, sparse and quantised tensors have no bytes that could be read.
    except (RuntimeError, NotImplementedError, TypeError):
        return *facts, id(tensor), tensor._version


def _mark(tensor: Tensor) -> Content:
    """Return a value that differs after a tensor was replaced or changed."""
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    try:
        return id(tensor), tensor._version, repr(tensor.detach().sum(dtype=dtype).item())
    except (RuntimeError, NotImplementedError, TypeError):
        return id(tensor), tensor._version


def _hash(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


def _attributes(name: str, module: nn.Module) -> Iterator[Place]:
    """Yield the attributes of a module; torch's own classes keep none that change."""
    if type(module).__module__.partition(".")[0] in ("torch", "penstock"):
        return
    for key in list(vars(module)):
        if key not in _OF_EVERY_MODULE and not key.startswith("__"):
            # By the namespace: getattr and setattr may run a property of the user's.
            yield Place(
                full_name(name, key),
                partial(vars(module).get, key),
                partial(vars(module).__setitem__, key),
            )


def _hook_variables(name: str, module: nn.Module) -> Iterator[Place]:
    """Yield the variables of a module's forward hooks.

    They are variables of enclosing functions, and attributes of objects whose methods are hooks.
    """
    for registered in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        hook: Any = registered
        while hasattr(hook, "func"):
            hook = hook.func
        label = f"the hook {getattr(hook, '__qualname__', type(hook).__name__)} of {name}"
        owner = getattr(hook, "__self__", None)
        # A callable object keeps its state in its own attributes.
        if owner is None and not isinstance(hook, FunctionType):
            owner = hook
        if owner is not None and not isinstance(owner, nn.Module):
            yield from _object_variables(label, owner)
        code = getattr(hook, "__code__", None)
        cells = getattr(hook, "__closure__", None) or ()
        for key, cell in zip(code.co_freevars if code else (), cells, strict=False):
            yield Place(f"{label}: {key}", partial(cell_value, cell), partial(_set_cell, cell))


def _object_variables(label: str, owner: Any) -> Iterator[Place]:
    for key in list(getattr(owner, "__dict__", {})):
        get, set_value = partial(vars(owner).get, key), partial(vars(owner).__setitem__, key)
        yield Place(f"{label}: {key}", get, set_value)


def cell_value(cell: CellType) -> Any:
    """Return the value of a closure cell; None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:  # nothing has been assigned yet
        return None


def _set_cell(cell: CellType, value: Any) -> None:
    cell.cell_contents = value


def _snapshot(value: Any, depth: int = _DEPTH) -> Snapshot:
    """Return a snapshot of a value and of what it contains, as far as `content` compares it."""
    items: Iterable[Any] = ()
    if depth and isinstance(value, (list, tuple, deque)):
        items = _ends(list(value))
    elif depth and isinstance(value, dict):
        items = _ends(list(value.values()))
    snapshots = [_snapshot(item, depth - 1) for item in items]
    mutable = tuple(entry for entry in snapshots if entry.content is not None or entry.items)
    return Snapshot(value, _copy_contents(value), mutable)


def _copy_contents(value: Any) -> Any:
    """Return a copy of the contents of a mutable value, for `_restore_content`; else None."""
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


def _restore_content(snapshot: Snapshot) -> None:
    """Write the content of a snapshot back into its object, in place."""
    for item in snapshot.items:
        _restore_content(item)
    value, before = snapshot.value, snapshot.content
    if isinstance(value, Tensor):
        value.data.copy_(before)  # .data: does not count as a change where a graph saved it
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
