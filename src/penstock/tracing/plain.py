"""Plain Python values: what is in them, as something that can be compared later, and in words."""

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

_NUMBERS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
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

#: Objects in one value after which the rest count as themselves.
_MOST = 100_000

#: Bytes of a NumPy array up to which it is compared as a whole.
_LARGE = 1 << 20


def contents(value: Any) -> bool:
    """Whether a value has parts that can change while it stays the same object."""
    return not isinstance(value, (*_NUMBERS, *_OPAQUE)) and not _is_frozen(value)


def _is_frozen(value: Any) -> bool:
    return isinstance(value, (tuple, frozenset)) and not any(map(contents, value))


def summary(value: Any, shared: Collection[int] = (), seen: set[int] | None = None) -> Any:
    """What is in a value: two summaries are equal if a forward that reads it would do the same.

    Args:
        value: anything. Functions, classes, modules and the like count as themselves.
        shared: ids of tensors that count as themselves: parameters and buffers, whose content a
        graph takes from where it is. seen: ids of what has been summed up on the way to here.
    """
    if isinstance(value, _NUMBERS):
        return type(value).__name__, value
    if isinstance(value, Tensor):
        known = id(value) in shared or isinstance(value, nn.Parameter)
        return "tensor", id(value), 0 if known else version_of(value)
    if is_array(value):
        return "array", value.shape, str(value.dtype), array_bytes(value)
    seen = set() if seen is None else seen
    inner = _inner(value)
    if inner is None or id(value) in seen or len(seen) > _MOST:
        return "object", id(value)
    seen.add(id(value))
    kind = type(value).__name__
    if isinstance(inner, dict):
        return kind, tuple(
            (summary(key, shared, seen), summary(item, shared, seen)) for key, item in inner.items()
        )
    items = (summary(item, shared, seen) for item in inner)
    return kind, frozenset(items) if isinstance(inner, (set, frozenset)) else tuple(items)


def containers(value: Any, seen: set[int]) -> Iterator[Any]:
    """What can change in a value in place, and is not in `seen`: lists, dicts, sets, arrays,
    tensors, and objects' dicts.
    """
    if id(value) in seen or isinstance(value, _NUMBERS):
        return
    seen.add(id(value))
    if isinstance(value, Tensor) or is_array(value):
        yield value
        return
    inner = _inner(value)
    if inner is None or len(seen) > _MOST:
        return
    if not isinstance(inner, (tuple, frozenset)):
        yield inner
    for item in inner.values() if isinstance(inner, dict) else inner:
        yield from containers(item, seen)


def saved(container: Any) -> Any:
    """A copy that is equal to a container from `containers` as long as it holds the same."""
    if isinstance(container, dict):
        return dict(container)
    return list(container) if isinstance(container, list) else container.copy()


def _inner(value: Any) -> Any:
    """The container that a value is, or has its attributes in; None of what counts as itself."""
    if isinstance(value, _OPAQUE):
        return None
    if isinstance(value, (dict, list, tuple, set, frozenset, deque)):
        return value
    return fields_of(value)


def fields_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object that holds data: of a user's class, or a namespace."""
    kind = type(value)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    if not issubclass(kind, _NAMESPACES) and (
        kind.__module__ == "builtins" or is_standard(file) or is_torchs(file)
    ):
        return None
    names = getattr(value, "__dict__", None)
    return names if isinstance(names, dict) else None


def is_array(value: Any) -> bool:
    """Whether a value is a NumPy array."""
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def array_bytes(value: Any) -> bytes:
    """The content of a NumPy array; of a large one, of evenly spaced elements."""
    if value.dtype.hasobject:
        return repr(value).encode()
    if value.nbytes <= _LARGE:
        return bytes(value.tobytes())
    step = value.nbytes // _LARGE + 1
    return bytes(value.reshape(-1)[::step].tobytes())


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place; 0 where that is not counted."""
    return 0 if tensor.is_inference() else tensor._version


def described(value: Any) -> str:
    """A value in a message."""
    if isinstance(value, Tensor):
        return f"a tensor of {tuple(value.shape)}"
    if isinstance(value, nn.Module):
        return f"a {type(value).__name__}"
    if inspect.isroutine(value) or isinstance(value, type):
        return f"{getattr(value, '__qualname__', type(value).__name__)}"
    if type(value) is object:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
