"""What stands in nested values beside tensors: which of it can travel to another process, and how
it is written down.

Inside one process any object may pass as it is, if no tensor can be reached from it: a tensor that
nobody sees would lose its gradient.
Between processes only plain constants travel, as JSON that says their kind. Reading it makes
constants of these kinds and nothing else.
"""

from __future__ import annotations

import enum
import gc
import types
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.values.classes import find, name_of, remember

#: Kinds that JSON has itself.
PLAIN = frozenset({type(None), bool, int, float, str})

#: Kinds beside these that are known to hold no tensor.
_SEALED = (
    complex,
    bytes,
    slice,
    range,
    type(Ellipsis),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    enum.Enum,
    np.generic,
    type,
    types.BuiltinFunctionType,
    types.ModuleType,
)

#: What a defaultdict may make for a missing key, on another rank as well.
FACTORIES = (list, dict, set, frozenset, tuple, int, float, complex, str, bytes, bool, OrderedDict)

#: Objects that are looked at from one constant, at most.
_MOST_OBJECTS = 20_000


class Whole:
    """A base for Penstock's own objects that stand in nested values and are never taken apart:
    nothing in them is trained.
    """

    __slots__ = ()


def describe(value: Any) -> tuple[str, str]:
    """Kind and content of a constant, the same in every process; of an object that is no plain
    constant, its kind alone.
    """
    cls = type(value)
    sealed = cls in PLAIN or isinstance(value, _SEALED)
    return name_of(cls), repr(value) if sealed else ""


def same_constant(one: Any, other: Any) -> bool:
    """Whether two constants are alike: NaN is like NaN, and -0.0, 0 and False are three."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if type(one) in PLAIN or isinstance(one, _SEALED):
        return repr(one) == repr(other)
    try:
        return bool(one == other)
    except Exception:  # noqa: BLE001 - objects of the user's, of which only this is asked
        return False


def key_of(value: Any) -> tuple[Any, ...]:
    """What constants that are alike have in common, to be compared inside this process."""
    cls = type(value)
    if cls in PLAIN or isinstance(value, _SEALED):
        return cls, repr(value)
    return cls, id(value)


def holds_tensor(value: Any) -> bool:
    """Whether a tensor can be reached from an object, as far as the garbage collector knows; also
    if there is too much to look at.
    """
    if type(value) in PLAIN or isinstance(value, (Whole, *_SEALED)):
        return False
    visited: dict[int, Any] = {}
    waiting = _reachable(value)
    while waiting:
        item = waiting.pop()
        if isinstance(item, Tensor):
            return True
        if type(item) in PLAIN or isinstance(item, (Whole, *_SEALED)) or id(item) in visited:
            continue
        visited[id(item)] = item
        if len(visited) > _MOST_OBJECTS:
            return True
        waiting += _reachable(item)
    return False


def _reachable(item: Any) -> list[Any]:
    if isinstance(item, types.FunctionType):  # its globals are everybody's
        parts = (item.__closure__, item.__defaults__, item.__kwdefaults__, item.__dict__)
        return [referent for referent in parts if referent]
    if isinstance(item, np.ndarray):
        return list(item.flat) if item.dtype.hasobject else []
    return [referent for referent in gc.get_referents(item) if not isinstance(referent, type)]


def encode(value: Any) -> Any:
    """A constant as JSON.

    Raises:
        RunError: it is of a kind that does not travel.
    """
    cls = type(value)
    if cls in PLAIN:
        return value
    writer = _WRITERS.get(cls)
    if writer is not None:
        return writer(value)
    if isinstance(value, enum.Enum) and value.name in cls.__members__:
        remember(cls)
        return {"enum": [name_of(cls), value.name]}
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return {"numpy": [value.dtype.str, value.tobytes().hex()]}
    if isinstance(value, type):
        remember(value)
        return {"class": name_of(value)}
    raise RunError(
        f"{_article(cls)} cannot cross a stage boundary between processes: layers there may return "
        "tensors and plain constants "
        "(numbers, texts, bytes, dtypes, enums, None) in nested tuples, lists, dicts and records"
        f"{_advice(value)}"
    )


def _article(cls: type) -> str:
    return f"{'an' if cls.__name__[:1].lower() in 'aeiou' else 'a'} {cls.__name__}"


def _advice(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return ". Make a tensor of it: torch.from_numpy(…)"
    if callable(value):
        return ". Give what it is made of, and make it where it is used"
    return ""


def decode(text: Any) -> Any:
    """What `encode` was given.

    Raises:
        RunError: it is of no known kind.
    """
    if type(text) in PLAIN:
        return text
    if isinstance(text, dict) and len(text) == 1:
        kind, content = next(iter(text.items()))
        reader = _READERS.get(kind)
        if reader is not None:
            return reader(content)
    raise RunError(
        f"a message from another rank has {text!r} in it, which is no constant of a known kind"
    )


def _enum(content: Any) -> enum.Enum:
    name, member = content
    cls = find(name)
    if not issubclass(cls, enum.Enum) or member not in cls.__members__:
        raise RunError(
            f"a message from another rank has the member {member!r} of {name} in it, and this rank "
            "has none"
        )
    return cls.__members__[member]


def _attribute(kind: type, content: Any) -> Any:
    attribute = getattr(torch, str(content), None)
    if not isinstance(attribute, kind):
        raise RunError(
            f"a message from another rank has torch.{content} in it, which is no {kind.__name__}"
        )
    return attribute


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name such as `float32`.

    Raises:
        RunError: torch has none of that name.
    """
    dtype: torch.dtype = _attribute(torch.dtype, name)
    return dtype


def _all(values: Any) -> list[Any]:
    return [encode(value) for value in values]


def _each(content: Any) -> list[Any]:
    return [decode(item) for item in content]


_WRITERS: dict[type, Any] = {
    complex: lambda value: {"complex": [value.real, value.imag]},
    bytes: lambda value: {"bytes": value.hex()},
    slice: lambda value: {"slice": _all((value.start, value.stop, value.step))},
    range: lambda value: {"range": [value.start, value.stop, value.step]},
    type(Ellipsis): lambda _: {"ellipsis": None},
    torch.dtype: lambda value: {"dtype": str(value).removeprefix("torch.")},
    torch.layout: lambda value: {"layout": str(value).removeprefix("torch.")},
    torch.memory_format: lambda value: {"memory_format": str(value).removeprefix("torch.")},
    torch.device: lambda value: {"device": str(value)},
    torch.Size: lambda value: {"size": list(value)},
    tuple: lambda value: {"tuple": _all(value)},
    list: lambda value: {"list": _all(value)},
    dict: lambda value: {"dict": [_all(pair) for pair in value.items()]},
    set: lambda value: {"set": _all(value)},
    frozenset: lambda value: {"frozenset": _all(value)},
}

_READERS: dict[str, Any] = {
    "complex": lambda content: complex(*content),
    "bytes": bytes.fromhex,
    "slice": lambda content: slice(*_each(content)),
    "range": lambda content: range(*content),
    "ellipsis": lambda _: ...,
    "dtype": dtype_of,
    "layout": lambda content: _attribute(torch.layout, content),
    "memory_format": lambda content: _attribute(torch.memory_format, content),
    "device": torch.device,
    "size": torch.Size,
    "tuple": lambda content: tuple(_each(content)),
    "list": _each,
    "dict": lambda content: {decode(key): decode(item) for key, item in content},
    "set": lambda content: set(_each(content)),
    "frozenset": lambda content: frozenset(_each(content)),
    "enum": _enum,
    "numpy": lambda content: np.frombuffer(bytes.fromhex(content[1]), np.dtype(content[0]))[0],
    "class": find,
}
