"""Comparison and description of Python values that a model's forward reads."""

from __future__ import annotations

import argparse
import functools
import inspect
import sys
import types
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from penstock.tracing.faults import is_standard, is_torchs

_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_OPAQUE = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
    nn.Module,
    torch.Generator,
)
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)

#: Maximum number of objects in one value whose contents are compared; others by identity.
_MAX_OBJECTS = 100_000

#: Maximum size in bytes of a NumPy array that is compared as a whole.
_LARGE = 1 << 20


def is_mutable(value: Any) -> bool:
    """Return whether a value's contents can change while it stays the same object."""
    if isinstance(value, (*_ATOMS, *_OPAQUE)):
        return False
    return not isinstance(value, (tuple, frozenset)) or any(map(is_mutable, value))


def summary(value: Any, shared: Collection[int] = (), visited: set[int] | None = None) -> Any:
    """Return a digest of a value.

    Two digests are equal if a forward that reads the value would do the same.

    Args:
        value: any value. Functions, classes, modules and the like are compared by identity.
        shared: ids of tensors that are compared by identity: parameters and buffers, whose current
            values a graph reads.
        visited: ids of the objects whose contents are part of the digest already.
    """
    if isinstance(value, _ATOMS):
        return type(value).__name__, value
    if isinstance(value, Tensor):
        # Any other tensor is a constant of the graph, so that its contents count.
        by_identity = id(value) in shared or isinstance(value, nn.Parameter)
        return "tensor", id(value), 0 if by_identity else version_of(value)
    if is_array(value):
        return "array", value.shape, str(value.dtype), array_bytes(value)
    visited = set() if visited is None else visited
    container = _container(value)
    if container is None or id(value) in visited or len(visited) > _MAX_OBJECTS:
        return "object", id(value)
    visited.add(id(value))
    return type(value).__name__, _items_summary(container, shared, visited)


def _items_summary(container: Any, shared: Collection[int], visited: set[int]) -> Any:
    """Return the summaries of a container's items."""
    if isinstance(container, dict):
        pairs = []
        for key, item in container.items():
            pairs.append((summary(key, shared, visited), summary(item, shared, visited)))
        return tuple(pairs)
    items = [summary(item, shared, visited) for item in container]
    return frozenset(items) if isinstance(container, (set, frozenset)) else tuple(items)


def containers(value: Any, visited: set[int]) -> Iterator[Any]:
    """Yield the mutable parts of a value that are not in `visited`.

    They are lists, dicts, sets, arrays, tensors, and the dicts of objects.
    """
    if id(value) in visited or isinstance(value, _ATOMS):
        return
    visited.add(id(value))
    if isinstance(value, Tensor) or is_array(value):
        yield value
        return
    container = _container(value)
    if container is None or len(visited) > _MAX_OBJECTS:
        return
    if not isinstance(container, (tuple, frozenset)):
        yield container
    for item in container.values() if isinstance(container, dict) else container:
        yield from containers(item, visited)


def copy_container(container: Any) -> Any:
    """Return a copy that equals a container from `containers` as long as that is unchanged."""
    if isinstance(container, dict):
        return dict(container)
    return list(container) if isinstance(container, list) else container.copy()


def _container(value: Any) -> Any:
    """Return the container that a value is, or the dict of its attributes; else None."""
    if isinstance(value, _OPAQUE):
        return None
    if isinstance(value, (dict, list, tuple, set, frozenset, deque)):
        return value
    return fields_of(value)


def fields_of(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object of a user's class or a namespace; else None."""
    kind = type(value)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    if not issubclass(kind, _NAMESPACES) and (
        kind.__module__ == "builtins" or is_standard(file) or is_torchs(file)
    ):
        return None
    names = getattr(value, "__dict__", None)
    return names if isinstance(names, dict) else None


def is_array(value: Any) -> bool:
    """Return whether a value is a NumPy array."""
    # By name, so that a program without NumPy does not import it.
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def array_bytes(value: Any) -> bytes:
    """Return the contents of a NumPy array; of a large one, evenly spaced elements."""
    if value.dtype.hasobject:
        # The bytes of an array of objects are pointers.
        return repr(value).encode()
    if value.nbytes <= _LARGE:
        return bytes(value.tobytes())
    step = value.nbytes // _LARGE + 1
    return bytes(value.reshape(-1)[::step].tobytes())


def version_of(tensor: Tensor) -> int:
    """Return the version counter of a tensor; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else tensor._version


def describe_value(value: Any) -> str:
    """Return a short text for a value, for messages."""
    if isinstance(value, Tensor):
        return f"a tensor of {tuple(value.shape)}"
    if isinstance(value, nn.Module):
        return f"a {type(value).__name__}"
    if inspect.isroutine(value) or isinstance(value, type):
        return f"{getattr(value, '__qualname__', type(value).__name__)}"
    # `MISSING` of `attribute_reads`, which stands for an attribute that does not exist.
    if type(value) is object:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
