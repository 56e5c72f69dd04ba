"""Containers and records: how each kind is taken apart, and put together as it was, of the same
class, without running its code.

Objects of the user's own classes (dataclasses, named tuples, mappings, plain objects) are rebuilt
from their items and attributes: a new
object of the class is made, no `__init__` runs, and no method of it is called. That is sound for
classes that are written in Python and
whose instances hold nothing besides; objects of others are constants.
"""

from __future__ import annotations

import enum
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import RunError
from penstock.values.constants import FACTORIES, Whole

_HEAP_TYPE = (
    1 << 9
)  # Py_TPFLAGS_HEAPTYPE: made while the program runs, as all classes of Python code are
_POINTER_BYTES = object.__basicsize__ // 2

#: What a value is made of besides its parts; comparable.
Context = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of containers.

    Attributes:
        name: as messages have it.
        apart: from a value to its context and its parts.
        together: from a class, a context and parts to a value.
        label: where a part stands in the value, from the context and the part's place.
        named: whether messages have to say the class.
        loose: whether constants among the parts are attributes, not items.
    """

    name: str
    apart: Callable[[Any], tuple[Context, Sequence[Any]]]
    together: Callable[[type, Context, list[Any]], Any]
    label: Callable[[Context, int], str] = lambda _, place: f"[{place}]"
    named: bool = False
    loose: bool = False


class _Opaque:
    """A context that only its kind's own functions understand; compared by what it holds."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Opaque) and bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))

    def __repr__(self) -> str:
        return repr(self.value)


def context_values(kind: str, context: Context) -> Context:
    """A context as plain values."""
    return tuple(entry.value for entry in context) if kind == "registered" else context


def context_of(kind: str, values: Sequence[Any]) -> Context:
    """A context from its plain values."""
    return tuple(map(_Opaque, values)) if kind == "registered" else tuple(values)


# Attributes.


@lru_cache(maxsize=4096)
def _slots(cls: type) -> tuple[tuple[str, Any], ...]:
    """The slots of a class written in Python: names and descriptors."""
    return tuple(
        (f"{owner.__qualname__}.{name}", member)
        for owner in cls.__mro__
        if owner.__flags__ & _HEAP_TYPE
        for name, member in vars(owner).items()
        if isinstance(member, types.MemberDescriptorType)
    )


def _class_of(value: Any) -> type:
    cls: type = type(value)
    return cls


def _state(value: Any) -> tuple[tuple[str, ...], tuple[str, ...], list[Any]]:
    """Names of attributes, names of slots that are set, and what both hold."""
    attributes: dict[str, Any] = getattr(value, "__dict__", {})
    held = [
        (name, slot.__get__(value))
        for name, slot in _slots(_class_of(value))
        if _is_set(slot, value)
    ]
    parts = [*attributes.values(), *(item for _, item in held)]
    return tuple(attributes), tuple(name for name, _ in held), parts


def _is_set(slot: Any, value: Any) -> bool:
    try:
        slot.__get__(value)
    except AttributeError:
        return False
    return True


def _set_state(
    target: Any, names: Sequence[str], slots: Sequence[str], parts: Sequence[Any]
) -> None:
    if names:
        target.__dict__.update(zip(names, parts, strict=False))
    if slots:
        members = dict(_slots(_class_of(target)))
        for name, part in zip(slots, parts[len(names) :], strict=True):
            members[name].__set__(target, part)


def _attribute_label(names: Sequence[str], slots: Sequence[str], place: int) -> str:
    return f".{[*names, *slots][place].rpartition('.')[2]}"


# The kinds.


def _apart_dict(value: Any) -> tuple[Context, list[Any]]:
    keys = tuple(value)
    kinds = () if all(type(key) is str for key in keys) else tuple(map(type, keys))
    return (keys, kinds), list(value.values())


def _key_label(context: Context, place: int) -> str:
    return f"[{context[0][place]!r}]"


def _apart_default(value: Any) -> tuple[Context, list[Any]]:
    context, parts = _apart_dict(value)
    return (*context, value.default_factory), parts


def _default(_: type, context: Context, parts: list[Any]) -> Any:
    return defaultdict(context[2], zip(context[0], parts, strict=True))


def _apart_sequence(value: Any) -> tuple[Context, list[Any]]:
    base = tuple if isinstance(value, tuple) else list
    names, slots, attributes = _state(value)
    items = list(base.__iter__(value))
    return (len(items), names, slots), [*items, *attributes]


def _sequence(cls: type, context: Context, parts: list[Any]) -> Any:
    count, names, slots = context
    if issubclass(cls, tuple):
        sequence: Any = tuple.__new__(cls, parts[:count])
    else:
        sequence = list.__new__(cls)
        list.extend(sequence, parts[:count])
    _set_state(sequence, names, slots, parts[count:])
    return sequence


def _sequence_label(context: Context, place: int) -> str:
    count, names, slots = context
    return f"[{place}]" if place < count else _attribute_label(names, slots, place - count)


def _dict_base(cls: type) -> type[dict[Any, Any]]:
    return next(base for base in (OrderedDict, defaultdict, dict) if issubclass(cls, base))


def _apart_mapping(value: Any) -> tuple[Context, list[Any]]:
    base = _dict_base(type(value))
    names, slots, attributes = _state(value)
    keys = tuple(base.__iter__(value))
    factory = value.default_factory if base is defaultdict else None
    items = [dict.__getitem__(value, key) for key in keys]
    return (keys, tuple(map(type, keys)), names, slots, factory), [*items, *attributes]


def _mapping(cls: type, context: Context, parts: list[Any]) -> Any:
    keys, _, names, slots, factory = context
    base = _dict_base(cls)
    mapping: Any = base.__new__(cls)
    for key, part in zip(keys, parts, strict=False):
        base.__setitem__(mapping, key, part)
    if base is defaultdict:
        mapping.default_factory = factory
    _set_state(mapping, names, slots, parts[len(keys) :])
    return mapping


def _mapping_label(context: Context, place: int) -> str:
    keys, _, names, slots, _ = context
    if place < len(keys):
        return f"[{keys[place]!r}]"
    return _attribute_label(names, slots, place - len(keys))


def _apart_object(value: Any) -> tuple[Context, list[Any]]:
    names, slots, parts = _state(value)
    return (names, slots), parts


def _object(cls: type, context: Context, parts: list[Any]) -> Any:
    instance: Any = object.__new__(cls)
    names, slots = context
    _set_state(instance, names, slots, parts)
    return instance


def _apart_registered(value: Any) -> tuple[Context, list[Any]]:
    parts, context = pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)
    return (_Opaque(context),), list(parts)


def _registered(cls: type, context: Context, parts: list[Any]) -> Any:
    if cls not in pytree.SUPPORTED_NODES:
        raise RunError(
            f"a {cls.__qualname__} crosses a stage boundary, and this rank has not registered that "
            "class with "
            "torch.utils._pytree: register it where it is defined"
        )
    return pytree.SUPPORTED_NODES[cls].unflatten_fn(parts, context[0].value)


def _apart_sparse(value: Tensor) -> tuple[Context, list[Any]]:
    """Indices and values. Of one that wants a gradient, each place once: values of several entries
    have none of their own.
    """
    if value.requires_grad and not value.is_coalesced():
        value = value.coalesce()
    values = value.values() if value.requires_grad else value._values()
    return (tuple(value.shape), value.is_coalesced()), [value._indices(), values]


def _sparse(_: type, context: Context, parts: list[Any]) -> Tensor:
    size, coalesced = context
    return torch.sparse_coo_tensor(
        parts[0], parts[1], size, is_coalesced=coalesced, check_invariants=False
    )


SPARSE = Kind("sparse", _apart_sparse, _sparse)
LIST = Kind("list", lambda value: ((), value), lambda _, __, parts: parts)
TUPLE = Kind("tuple", lambda value: ((), value), lambda _, __, parts: tuple(parts))
DICT = Kind(
    "dict",
    _apart_dict,
    lambda _, context, parts: dict(zip(context[0], parts, strict=True)),
    _key_label,
)
ORDERED = Kind(
    "ordered",
    _apart_dict,
    lambda _, context, parts: OrderedDict(zip(context[0], parts, strict=True)),
    _key_label,
)
DEFAULT = Kind("default", _apart_default, _default, _key_label)
DEQUE = Kind(
    "deque",
    lambda value: ((value.maxlen,), list(value)),
    lambda _, context, parts: deque(parts, context[0]),
)
VIEW = Kind(
    "mapping view",
    _apart_dict,
    lambda _, context, parts: types.MappingProxyType(dict(zip(context[0], parts, strict=True))),
    _key_label,
)
NAMESPACE = Kind(
    "namespace",
    lambda value: ((tuple(vars(value)),), list(vars(value).values())),
    lambda _, context, parts: types.SimpleNamespace(**dict(zip(context[0], parts, strict=True))),
    lambda context, place: f".{context[0][place]}",
    loose=True,
)
SEQUENCE = Kind("sequence", _apart_sequence, _sequence, _sequence_label, named=True)
RESULT = Kind(
    "result", lambda value: ((), list(value)), lambda cls, _, parts: cls(parts), named=True
)
MAPPING = Kind("mapping", _apart_mapping, _mapping, _mapping_label, named=True, loose=True)
OBJECT = Kind(
    "object",
    _apart_object,
    _object,
    lambda context, place: _attribute_label(context[0], context[1], place),
    named=True,
    loose=True,
)
REGISTERED = Kind("registered", _apart_registered, _registered, named=True, loose=True)

KINDS = {
    kind.name: kind
    for kind in (
        SPARSE,
        LIST,
        TUPLE,
        DICT,
        ORDERED,
        DEFAULT,
        DEQUE,
        VIEW,
        NAMESPACE,
        SEQUENCE,
        RESULT,
        MAPPING,
        OBJECT,
        REGISTERED,
    )
}

_EXACT: dict[type, Kind] = {
    list: LIST,
    tuple: TUPLE,
    dict: DICT,
    OrderedDict: ORDERED,
    defaultdict: DEFAULT,
    deque: DEQUE,
    types.MappingProxyType: VIEW,
    types.SimpleNamespace: NAMESPACE,
}
_NEVER = (Whole, enum.Enum, nn.Module, type, BaseException, torch.Size, Tensor)


def kind_of(cls: type) -> Kind | None:
    """The kind of a class; None for those whose objects are constants."""
    return _EXACT.get(cls) or _kind_of(cls)


@lru_cache(maxsize=4096)
def _kind_of(cls: type) -> Kind | None:
    if issubclass(cls, _NEVER):
        return None
    if issubclass(cls, tuple) and hasattr(cls, "n_sequence_fields"):
        return RESULT
    for base, kind in (
        (tuple, SEQUENCE),
        (list, SEQUENCE),
        (OrderedDict, MAPPING),
        (defaultdict, MAPPING),
        (dict, MAPPING),
    ):
        if issubclass(cls, base):
            return kind if _adds_nothing(cls, base) and not hasattr(cls, "__del__") else None
    plain = _adds_nothing(cls, object) and not hasattr(cls, "__del__")
    declared = hasattr(cls, "__dataclass_fields__") or hasattr(cls, "__attrs_attrs__")
    if cls in pytree.SUPPORTED_NODES and not (plain and declared):
        return REGISTERED
    return OBJECT if plain else None


def _adds_nothing(cls: type, base: type) -> bool:
    """Whether instances of a class hold nothing besides what `base` does but attributes and slots
    that Python shows.
    """
    if not all(
        ancestor.__flags__ & _HEAP_TYPE or issubclass(base, ancestor) for ancestor in cls.__mro__
    ):
        return False
    places = len(_slots(cls)) + (cls.__dictoffset__ != 0) + (cls.__weakrefoffset__ != 0)
    return cls is not base and cls.__basicsize__ <= base.__basicsize__ + places * _POINTER_BYTES


def check_context(kind: Kind, cls: type | None, context: Context) -> None:
    """Refuse what a message says a value is made of, if no value of that class here could have
    been.

    Raises:
        RunError: the class is of another kind here, or a default is made by something that is none
        of the known types.
    """
    if cls is not None and kind_of(cls) is not kind:
        raise RunError(
            f"a {cls.__qualname__} crosses a stage boundary, and that class is another kind of "
            "thing on this rank"
        )
    factory = context[-1] if kind in (DEFAULT, MAPPING) else None
    if factory is not None and factory not in FACTORIES:
        raise RunError(
            f"a defaultdict cannot cross a stage boundary between processes with {factory!r} in "
            "it, which would be called there: "
            "make a dict of it"
        )


def parts_of(value: Any) -> Iterator[Any]:
    """The parts of a container, for those who only look."""
    kind = kind_of(type(value))
    if kind is not None:
        yield from kind.apart(value)[1]
