"""Constants: leaves of nested values that are no tensors. Which of them can be sent to another
process, and how they are encoded.

Inside one process any object may pass unchanged if no tensor can be reached from it: a hidden
tensor would lose its gradient. Between processes only plain constants are sent, as JSON that names
their kind. Decoding creates constants of these kinds and nothing else.
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

#: Types that JSON represents directly.
PLAIN = frozenset({type(None), bool, int, float, str})

#: Further types whose objects hold no tensor.
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

#: Default factories of a defaultdict that may be sent to another rank.
FACTORIES = (list, dict, set, frozenset, tuple, int, float, complex, str, bytes, bool, OrderedDict)

#: Objects that the search for a hidden tensor examines at most.
_MAX_OBJECTS = 20_000


class Whole:
    """Base class of Penstock's own objects in nested values that are never flattened: nothing in
    them is trained.
    """

    __slots__ = ()


def describe(value: Any) -> tuple[str, str]:
    """Return kind and content of a constant, the same in every process; of other objects, the kind
    alone.
    """
    return name_of(type(value)), repr(value) if _is_sealed(value) else ""


def _is_sealed(value: Any) -> bool:
    """Whether a value holds no tensor, and its `repr` tells all of it."""
    return type(value) in PLAIN or isinstance(value, _SEALED)


def same_constant(first: Any, second: Any) -> bool:
    """Whether two constants are equal: NaN equals NaN, and -0.0, 0 and False are three different
    ones.
    """
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if _is_sealed(first):
        return repr(first) == repr(second)
    try:
        return bool(first == second)
    except Exception:  # noqa: BLE001 - the user's own class may raise anything
        return False


def key_of(value: Any) -> tuple[Any, ...]:
    """Return a hashable key that equal constants share, for comparisons inside this process."""
    return type(value), repr(value) if _is_sealed(value) else id(value)


def holds_tensor(value: Any) -> bool:
    """Whether a tensor can be reached from an object through the garbage collector's references.
    True also if there are too many objects to examine.
    """
    visited: dict[int, Any] = {}
    pending = [value]
    while pending:
        candidate = pending.pop()
        if isinstance(candidate, Tensor):
            return True
        is_searched = not _is_sealed(candidate) and not isinstance(candidate, Whole)
        if is_searched and id(candidate) not in visited:
            visited[id(candidate)] = candidate
            if len(visited) > _MAX_OBJECTS:
                return True
            pending += _reachable(candidate)
    return False


def _reachable(value: Any) -> list[Any]:
    """Return the objects that a value refers to directly, without modules' globals."""
    if isinstance(value, types.FunctionType):  # its globals belong to the module, not to it
        parts = (value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__)
        return [referent for referent in parts if referent]
    if isinstance(value, np.ndarray):
        # As a list: elements with fields would be scalars, whose objects are not searched.
        return [value.tolist()] if value.dtype.hasobject else []
    return gc.get_referents(value)


def encode(value: Any) -> Any:
    """Encode a constant as JSON.

    Raises:
        RunError: its kind cannot be sent.
    """
    cls = type(value)
    if cls in PLAIN:
        return value
    writer = _WRITERS.get(cls)
    if writer is not None:
        return writer(value)
    # A combination of flags is no member of its class.
    if isinstance(value, enum.Enum) and value.name in cls.__members__:
        remember(cls)
        return {"enum": [name_of(cls), value.name]}
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return {"numpy": [value.dtype.str, value.tobytes().hex()]}
    if isinstance(value, type):
        remember(value)
        return {"class": name_of(value)}
    raise RunError(
        f"{_with_article(cls)} cannot cross a stage boundary between processes: layers there may "
        "return tensors and plain constants (numbers, texts, bytes, dtypes, enums, None) in nested "
        f"tuples, lists, dicts and records{_advice(value)}"
    )


def _with_article(cls: type) -> str:
    """Return the name of a class with its indefinite article."""
    return f"{'an' if cls.__name__[:1].lower() in 'aeiou' else 'a'} {cls.__name__}"


def _advice(value: Any) -> str:
    """Return what to send instead of a value, for an error message."""
    if isinstance(value, np.ndarray):
        return ". Convert it to a tensor: torch.from_numpy(…)"
    if callable(value):
        return ". Send the arguments it is made from, and make it where it is used"
    return ""


def decode(text: Any) -> Any:
    """Decode what `encode` returned.

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
        f"a message from another rank contains {text!r}, which is no constant of a known kind"
    )


def _decode_enum(content: Any) -> enum.Enum:
    """Look up a member of an enum by the names of its class and itself."""
    name, member = content
    cls = find(name)
    if not issubclass(cls, enum.Enum) or member not in cls.__members__:
        raise RunError(
            f"a message from another rank contains the member {member!r} of {name}, which this "
            "rank does not have"
        )
    return cls.__members__[member]


def _torch_attribute(kind: type, content: Any) -> Any:
    """Look up an attribute of torch that must be of a type."""
    attribute = getattr(torch, str(content), None)
    if not isinstance(attribute, kind):
        raise RunError(
            f"a message from another rank contains torch.{content}, which is no {kind.__name__}"
        )
    return attribute


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as plans, checkpoints and messages have it.

    >>> dtype_name(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name such as `float32`.

    Raises:
        RunError: torch has no dtype of that name.
    """
    dtype: torch.dtype = _torch_attribute(torch.dtype, name)
    return dtype


def _encode_list(values: Any) -> list[Any]:
    return [encode(value) for value in values]


def _decode_list(content: Any) -> list[Any]:
    return [decode(entry) for entry in content]


_WRITERS: dict[type, Any] = {
    complex: lambda value: {"complex": [value.real, value.imag]},
    bytes: lambda value: {"bytes": value.hex()},
    slice: lambda value: {"slice": _encode_list((value.start, value.stop, value.step))},
    range: lambda value: {"range": [value.start, value.stop, value.step]},
    type(Ellipsis): lambda _: {"ellipsis": None},
    torch.dtype: lambda value: {"dtype": dtype_name(value)},
    torch.layout: lambda value: {"layout": str(value).removeprefix("torch.")},
    torch.memory_format: lambda value: {"memory_format": str(value).removeprefix("torch.")},
    torch.device: lambda value: {"device": str(value)},
    torch.Size: lambda value: {"size": list(value)},
    tuple: lambda value: {"tuple": _encode_list(value)},
    list: lambda value: {"list": _encode_list(value)},
    dict: lambda value: {"dict": [_encode_list(pair) for pair in value.items()]},
    set: lambda value: {"set": _encode_list(value)},
    frozenset: lambda value: {"frozenset": _encode_list(value)},
}

_READERS: dict[str, Any] = {
    "complex": lambda content: complex(*content),
    "bytes": bytes.fromhex,
    "slice": lambda content: slice(*_decode_list(content)),
    "range": lambda content: range(*content),
    "ellipsis": lambda _: ...,
    "dtype": dtype_of,
    "layout": lambda content: _torch_attribute(torch.layout, content),
    "memory_format": lambda content: _torch_attribute(torch.memory_format, content),
    "device": torch.device,
    "size": torch.Size,
    "tuple": lambda content: tuple(_decode_list(content)),
    "list": _decode_list,
    "dict": lambda content: {decode(key): decode(entry) for key, entry in content},
    "set": lambda content: set(_decode_list(content)),
    "frozenset": lambda content: frozenset(_decode_list(content)),
    "enum": _decode_enum,
    "numpy": lambda content: np.frombuffer(bytes.fromhex(content[1]), np.dtype(content[0]))[0],
    "class": find,
}
