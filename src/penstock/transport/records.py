"""Dataclasses and named tuples among what crosses a boundary: as dicts on the way, as themselves on either side.

Their type travels by name and is looked up among the modules that the receiver has loaded, never imported and never called: fields
are set as they were, and no `__init__` runs.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import RunError

_TYPE, _FIELDS = "penstock.type", "fields"


def to_plain(value: Any) -> Any:
    """`value` with dicts for the dataclasses and named tuples in it. What torch's pytrees know by themselves stays as it is."""
    if isinstance(value, Tensor) or value is None:
        return value
    kind = type(value)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return _described(kind, {name: to_plain(getattr(value, name)) for name in kind._fields})
    if kind is dict:
        return {key: to_plain(item) for key, item in value.items()}
    if kind in (list, tuple):
        return kind(to_plain(item) for item in value)
    if (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and kind not in pytree.SUPPORTED_NODES
    ):
        return _described(
            kind,
            {
                field.name: to_plain(getattr(value, field.name))
                for field in dataclasses.fields(value)
            },
        )
    return value


def from_plain(value: Any) -> Any:
    """What `to_plain` was given.

    Raises:
        RunError: this process has not loaded the type.
    """
    kind = type(value)
    if kind is dict:
        if _TYPE not in value:
            return {key: from_plain(item) for key, item in value.items()}
        return _made(
            value[_TYPE], {name: from_plain(item) for name, item in value[_FIELDS].items()}
        )
    if kind in (list, tuple):
        return kind(from_plain(item) for item in value)
    return value


def _described(kind: type, fields: dict[str, Any]) -> dict[str, Any]:
    return {_TYPE: f"{kind.__module__}:{kind.__qualname__}", _FIELDS: fields}


def _made(name: str, fields: dict[str, Any]) -> Any:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_make"):
        return found._make(fields.values())
    if not isinstance(found, type) or not dataclasses.is_dataclass(found):
        raise RunError(f"a {path} of {module} crosses a stage boundary, and this rank does not find that class there: define it at the "
                       "top of a module that every rank imports")  # fmt: skip
    made = object.__new__(found)
    for field, item in fields.items():
        object.__setattr__(made, field, item)
    return made
