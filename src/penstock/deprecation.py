"""Renamed arguments: the old name works for one more version, with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from penstock.errors import SettingError

T = TypeVar("T")
P = ParamSpec("P")


def warn_renamed(old: str, new: str, stacklevel: int) -> None:
    """Warn that a name is deprecated.

    Args:
        old: the deprecated name.
        new: its replacement.
        stacklevel: as of `warnings.warn`, counted from the caller.
    """
    warnings.warn(
        f"{old} is deprecated and will be removed in the next version: use {new}",
        DeprecationWarning,
        stacklevel=stacklevel + 1,
    )


def current_names(
    values: Mapping[str, Any], renamed: Mapping[str, str], stacklevel: int
) -> dict[str, Any]:
    """Return values by their current names, with a warning for every old name.

    Args:
        values: by name.
        renamed: the new names by the old ones.
        stacklevel: as of `warn_renamed`.

    Raises:
        SettingError: an old name and its new one both have a value.
    """
    current = {name: value for name, value in values.items() if name not in renamed}
    for old, new in renamed.items():
        if old not in values:
            continue
        warn_renamed(old, new, stacklevel + 1)
        if current.get(new) is not None:
            raise SettingError(f"{old} is the old name of {new}, and both are given: drop {old}")
        current[new] = values[old]
    return current


def renamed_arguments(renamed: Mapping[str, str]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a function decorator that accepts the old names of renamed arguments, as keywords.

    Args:
        renamed: the new names by the old ones.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def with_old_names(*args: P.args, **kwargs: P.kwargs) -> T:
            if not renamed.keys().isdisjoint(kwargs):
                current = current_names(kwargs, renamed, stacklevel=2)
                return function(*args, **current)
            return function(*args, **kwargs)

        return with_old_names

    return decorate


def renamed_fields(renamed: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that accepts the old names of renamed fields of a dataclass.

    They are accepted as keyword arguments, also by `dataclasses.replace`, and as attributes.

    Args:
        renamed: the new names by the old ones.
    """

    def decorate(cls: type[T]) -> type[T]:
        init = cls.__init__

        @wraps(init)
        def with_old_names(self: T, *args: Any, **kwargs: Any) -> None:
            if not renamed.keys().isdisjoint(kwargs):
                kwargs = current_names(kwargs, renamed, stacklevel=2)
            init(self, *args, **kwargs)

        def attribute(self: T, name: str) -> Any:
            if name not in renamed:
                raise AttributeError(f"{cls.__name__} has no attribute {name!r}")
            warn_renamed(name, renamed[name], stacklevel=2)
            return getattr(self, renamed[name])

        cls.__init__ = with_old_names  # type: ignore[method-assign, assignment]
        cls.__getattr__ = attribute  # type: ignore[attr-defined]
        return cls

    return decorate
