"""Containers and records: how each kind is split into parts, and rebuilt as an object of the same
class without running its code.

Objects of the user's own classes (dataclasses, named tuples, mappings, plain objects) are rebuilt
from their items and attributes: a new object of the class is allocated, without `__init__` or any
other method of it. That is sound for classes that are written in Python and whose instances hold
nothing else; objects of other classes are constants.
"""

from __future__ import annotations

import enum
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import RunError
from penstock.values.constants import FACTORIES, Whole

# Py_TPFLAGS_HEAPTYPE: the class was allocated at run time, as all classes of Python code are.
_HEAP_TYPE = 1 << 9
#: An instance of `object` is a reference count and a pointer to its type: two words.
_POINTER_BYTES = object.__basicsize__ // 2

#: What a container needs besides its parts to be rebuilt, such as keys; comparable.
Context = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of container.

    Attributes:
        name: as in messages.
        split: splits a value into its context and its parts.
        build: rebuilds a value from its class, context and parts.
        label: returns the path of a part in the value, from the context and the part's index.
        named: whether messages must name the class.
        has_attributes: whether constants among the parts are attributes, not items.
    """

    name: str
    split: Callable[[Any], tuple[Context, Sequence[Any]]]
    build: Callable[[type, Context, list[Any]], Any]
    label: Callable[[Context, int], str] = lambda _, index: f"[{index}]"
    named: bool = False
    has_attributes: bool = False


class _Opaque:
    """A context that only its kind's own functions understand; compared by its value."""

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
    """Return a context as plain values."""
    return tuple(entry.value for entry in context) if kind == "registered" else context


def context_of(kind: str, values: Sequence[Any]) -> Context:
    """Return a context from its plain values."""
    return tuple(map(_Opaque, values)) if kind == "registered" else tuple(values)


# Attributes and slots of objects.


@lru_cache(maxsize=4096)
def _slots(cls: type) -> tuple[tuple[str, Any], ...]:
    """Return names and descriptors of the slots of a class written in Python."""
    return tuple(
        (f"{owner.__qualname__}.{name}", member)
        for owner in cls.__mro__
        if owner.__flags__ & _HEAP_TYPE
        for name, member in vars(owner).items()
        if isinstance(member, types.MemberDescriptorType)
    )


def _class_of(value: Any) -> type:
    """Return the type of a value, typed for mypy."""
    cls: type = type(value)
    return cls


def _state(value: Any) -> tuple[tuple[str, ...], tuple[str, ...], list[Any]]:
    """Return names of attributes, names of slots that are set, and the values of both."""
    attributes: dict[str, Any] = getattr(value, "__dict__", {})
    set_slots = [(name, slot) for name, slot in _slots(_class_of(value)) if _is_set(slot, value)]
    slot_values = [slot.__get__(value) for _, slot in set_slots]
    parts = [*attributes.values(), *slot_values]
    return tuple(attributes), tuple(name for name, _ in set_slots), parts


def _is_set(slot: Any, value: Any) -> bool:
    """Whether a slot of a value has been assigned."""
    try:
        slot.__get__(value)
    except AttributeError:
        return False
    return True


def _set_state(
    target: Any, names: Sequence[str], slots: Sequence[str], parts: Sequence[Any]
) -> None:
    """Assign attributes and slots of an object, without calling its methods."""
    if names:
        target.__dict__.update(zip(names, parts, strict=False))
    if slots:
        members = dict(_slots(_class_of(target)))
        for name, part in zip(slots, parts[len(names) :], strict=True):
            members[name].__set__(target, part)


def _attribute_label(names: Sequence[str], slots: Sequence[str], index: int) -> str:
    """Return the path of an attribute or slot, such as `.mask`."""
    return f".{[*names, *slots][index].rpartition('.')[2]}"


# Functions of the kinds: `_split_*` returns context and parts, `_build_*` inverts it, `_*_label`
# returns the path of a part.


def _split_dict(value: Any) -> tuple[Context, list[Any]]:
    """Split a dict into keys (with their types, unless all are strings) and values."""
    keys = tuple(value)
    # Equal keys may differ in type, such as 1 and True.
    kinds = () if all(type(key) is str for key in keys) else tuple(map(type, keys))
    return (keys, kinds), list(value.values())


def _key_label(context: Context, index: int) -> str:
    """Return the path of a dict's value, such as `['mask']`."""
    return f"[{context[0][index]!r}]"


def _split_defaultdict(value: Any) -> tuple[Context, list[Any]]:
    """Split a defaultdict; its factory is part of the context."""
    context, parts = _split_dict(value)
    return (*context, value.default_factory), parts


def _build_defaultdict(_: type, context: Context, parts: list[Any]) -> Any:
    return defaultdict(context[2], zip(context[0], parts, strict=True))


def _split_sequence(value: Any) -> tuple[Context, list[Any]]:
    """Split an object of a subclass of tuple or list into items and attributes."""
    base = tuple if isinstance(value, tuple) else list
    names, slots, attributes = _state(value)
    # By the base's methods, since the user's class may iterate over something else.
    items = list(base.__iter__(value))
    return (len(items), names, slots), [*items, *attributes]


def _build_sequence(cls: type, context: Context, parts: list[Any]) -> Any:
    """Rebuild an object of a subclass of tuple or list."""
    count, names, slots = context
    if issubclass(cls, tuple):
        # Without the constructor of the class, which may take other arguments.
        sequence: Any = tuple.__new__(cls, parts[:count])
    else:
        sequence = list.__new__(cls)
        list.extend(sequence, parts[:count])
    _set_state(sequence, names, slots, parts[count:])
    return sequence


def _sequence_label(context: Context, index: int) -> str:
    """Return the path of an item or attribute of a sequence."""
    count, names, slots = context
    return f"[{index}]" if index < count else _attribute_label(names, slots, index - count)


def _dict_base(cls: type) -> type[dict[Any, Any]]:
    """Return the class of Python's own that a mapping class is derived from."""
    return next(base for base in (OrderedDict, defaultdict, dict) if issubclass(cls, base))


def _split_mapping(value: Any) -> tuple[Context, list[Any]]:
    """Split an object of a subclass of dict into items and attributes."""
    base = _dict_base(type(value))
    names, slots, attributes = _state(value)
    keys = tuple(base.__iter__(value))
    factory = value.default_factory if base is defaultdict else None
    items = [dict.__getitem__(value, key) for key in keys]
    return (keys, tuple(map(type, keys)), names, slots, factory), [*items, *attributes]


def _build_mapping(cls: type, context: Context, parts: list[Any]) -> Any:
    """Rebuild an object of a subclass of dict."""
    keys, _, names, slots, factory = context
    base = _dict_base(cls)
    mapping: Any = base.__new__(cls)
    for key, part in zip(keys, parts, strict=False):
        base.__setitem__(mapping, key, part)
    if base is defaultdict:
        mapping.default_factory = factory
    _set_state(mapping, names, slots, parts[len(keys) :])
    return mapping


def _mapping_label(context: Context, index: int) -> str:
    """Return the path of an item or attribute of a mapping."""
    keys, _, names, slots, _ = context
    if index < len(keys):
        return f"[{keys[index]!r}]"
    return _attribute_label(names, slots, index - len(keys))


def _split_object(value: Any) -> tuple[Context, list[Any]]:
    """Split an object into its attributes and slots."""
    names, slots, parts = _state(value)
    return (names, slots), parts


def _build_object(cls: type, context: Context, parts: list[Any]) -> Any:
    """Rebuild an object from its attributes and slots."""
    instance: Any = object.__new__(cls)
    names, slots = context
    _set_state(instance, names, slots, parts)
    return instance


def _split_registered(value: Any) -> tuple[Context, list[Any]]:
    """Split an object by the function that its class has registered with torch's pytree."""
    parts, context = pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)
    return (_Opaque(context),), list(parts)


def _build_registered(cls: type, context: Context, parts: list[Any]) -> Any:
    """Rebuild an object by the function that its class has registered with torch's pytree."""
    if cls not in pytree.SUPPORTED_NODES:
        raise RunError(
            f"a {cls.__qualname__} crosses a stage boundary, and this rank has not registered that "
            "class with torch.utils._pytree: register it where it is defined"
        )
    return pytree.SUPPORTED_NODES[cls].unflatten_fn(parts, context[0].value)


def _split_sparse(value: Tensor) -> tuple[Context, list[Any]]:
    """Split a sparse tensor into indices and values.

    A tensor that requires a gradient is coalesced first: values of duplicate indices have no
    gradients of their own.
    """
    if value.requires_grad and not value.is_coalesced():
        value = value.coalesce()
    values = value.values() if value.requires_grad else value._values()
    return (tuple(value.shape), value.is_coalesced()), [value._indices(), values]


def _build_sparse(_: type, context: Context, parts: list[Any]) -> Tensor:
    """Rebuild a sparse tensor from its indices and values."""
    size, coalesced = context
    return torch.sparse_coo_tensor(
        parts[0], parts[1], size, is_coalesced=coalesced, check_invariants=False
    )


SPARSE = Kind("sparse", _split_sparse, _build_sparse)
LIST = Kind("list", lambda value: ((), value), lambda _, __, parts: parts)
TUPLE = Kind("tuple", lambda value: ((), value), lambda _, __, parts: tuple(parts))
DICT = Kind(
    "dict",
    _split_dict,
    lambda _, context, parts: dict(zip(context[0], parts, strict=True)),
    _key_label,
)
ORDERED = Kind(
    "ordered",
    _split_dict,
    lambda _, context, parts: OrderedDict(zip(context[0], parts, strict=True)),
    _key_label,
)
DEFAULT = Kind("default", _split_defaultdict, _build_defaultdict, _key_label)
DEQUE = Kind(
    "deque",
    lambda value: ((value.maxlen,), list(value)),
    lambda _, context, parts: deque(parts, context[0]),
)
VIEW = Kind(
    "mapping view",
    _split_dict,
    lambda _, context, parts: types.MappingProxyType(dict(zip(context[0], parts, strict=True))),
    _key_label,
)
NAMESPACE = Kind(
    "namespace",
    lambda value: ((tuple(vars(value)),), list(vars(value).values())),
    lambda _, context, parts: types.SimpleNamespace(**dict(zip(context[0], parts, strict=True))),
    lambda context, index: f".{context[0][index]}",
    has_attributes=True,
)
SEQUENCE = Kind("sequence", _split_sequence, _build_sequence, _sequence_label, named=True)
RESULT = Kind(
    "result", lambda value: ((), list(value)), lambda cls, _, parts: cls(parts), named=True
)
MAPPING = Kind(
    "mapping", _split_mapping, _build_mapping, _mapping_label, named=True, has_attributes=True
)
OBJECT = Kind(
    "object",
    _split_object,
    _build_object,
    lambda context, index: _attribute_label(context[0], context[1], index),
    named=True,
    has_attributes=True,
)
REGISTERED = Kind(
    "registered", _split_registered, _build_registered, named=True, has_attributes=True
)

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

#: Kinds of Python's own classes, by the exact class.
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
#: Kinds of classes derived from Python's containers, by the base; the first that fits counts.
_BASES: tuple[tuple[type, Kind], ...] = (
    (tuple, SEQUENCE),
    (list, SEQUENCE),
    (OrderedDict, MAPPING),
    (defaultdict, MAPPING),
    (dict, MAPPING),
)

#: Classes whose objects, and those of subclasses, are never split.
_NEVER = (Whole, enum.Enum, nn.Module, type, BaseException, torch.Size, Tensor)


def kind_of(cls: type) -> Kind | None:
    """Return the kind of a class; None if its objects are constants."""
    return _EXACT.get(cls) or _kind_of(cls)


@lru_cache(maxsize=4096)
def _kind_of(cls: type) -> Kind | None:
    """Return the kind of a class that is not one of `_EXACT`."""
    if issubclass(cls, _NEVER):
        return None
    if issubclass(cls, tuple) and hasattr(cls, "n_sequence_fields"):
        return RESULT
    for base, kind in _BASES:
        if issubclass(cls, base):
            return kind if _can_rebuild(cls, base) else None
    return _object_kind(cls)


def _object_kind(cls: type) -> Kind | None:
    """Return the kind of a class that is not derived from a container.

    Dataclasses and attrs classes are rebuilt field by field even if they are registered with
    torch's pytree.
    """
    can_rebuild = _can_rebuild(cls, object)
    declared = hasattr(cls, "__dataclass_fields__") or hasattr(cls, "__attrs_attrs__")
    if cls in pytree.SUPPORTED_NODES and not (can_rebuild and declared):
        return REGISTERED
    return OBJECT if can_rebuild else None


def _can_rebuild(cls: type, base: type) -> bool:
    """Whether instances of a class hold only what `base` holds, attributes and slots.

    Then they can be rebuilt from these. A class with `__del__` is excluded, since its code would
    run for a rebuilt object too.
    """
    if hasattr(cls, "__del__") or cls is base:
        return False
    if not all(_is_python(ancestor) or issubclass(base, ancestor) for ancestor in cls.__mro__):
        return False
    # Memory beyond the base's that attributes and slots do not account for holds hidden state.
    pointers = len(_slots(cls)) + (cls.__dictoffset__ != 0) + (cls.__weakrefoffset__ != 0)
    return cls.__basicsize__ <= base.__basicsize__ + pointers * _POINTER_BYTES


def _is_python(cls: type) -> bool:
    """Whether a class is written in Python, and its instances are allocated by Python alone."""
    # Classes in C, such as `functools.partial`, may be of a heap type too.
    is_compiled = isinstance(vars(cls).get("__new__"), types.BuiltinFunctionType)
    return bool(cls.__flags__ & _HEAP_TYPE) and not is_compiled


def check_context(kind: Kind, cls: type | None, context: Context) -> None:
    """Refuse a context in a message that no value of its class could have on this rank.

    Raises:
        RunError: the class is of another kind on this rank, or the factory of a defaultdict is not
            one of `FACTORIES`.
    """
    if cls is not None and kind_of(cls) is not kind:
        raise RunError(
            f"a {cls.__qualname__} crosses a stage boundary, and that class is of another kind on "
            "this rank"
        )
    factory = context[-1] if kind in (DEFAULT, MAPPING) else None
    if factory is not None and factory not in FACTORIES:
        raise RunError(
            "a defaultdict cannot cross a stage boundary between processes with the factory "
            f"{factory!r}, which would be called there: convert it to a dict"
        )
