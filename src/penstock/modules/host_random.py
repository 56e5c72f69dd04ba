"""Python's and NumPy's global random generators, as used by `random.random()` in a forward.

Saving and restoring both takes about 50 µs, so it is done only for layers whose code mentions them,
and for layers that were observed to draw.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import suppress
from inspect import isclass, isfunction, ismodule
from types import CodeType, FunctionType
from typing import Any

from torch import nn

State = tuple[Any, Any]

#: Packages whose code is not analysed: it draws from torch's generators, if at all.
_LIBRARIES = ("torch", "penstock", "numpy", "random", "builtins", "typing", "collections", "math")


def host_state() -> State:
    """Return the state of both generators; NumPy's is None if NumPy has not been imported."""
    numpy = sys.modules.get("numpy.random")
    return random.getstate(), None if numpy is None else numpy.get_state(legacy=False)


def restore_host(state: State) -> None:
    """Set the state of both generators."""
    random.setstate(state[0])
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and state[1] is not None:
        numpy.set_state(state[1])


def seed_host(seed: int) -> None:
    """Seed both generators."""
    random.seed(seed)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        try:
            # NumPy's global generator takes 32 bits.
            numpy.seed(seed & 0xFFFFFFFF)
        except (TypeError, ValueError, AttributeError):
            return  # the user has installed a bit generator that takes no seed


def equal_states(first: State, second: State) -> bool:
    """Return whether no number was drawn between two states."""
    return bool(first[0] == second[0] and _comparable(first[1]) == _comparable(second[1]))


def _comparable(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _comparable(value) for key, value in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state


def mentions_host_generators(module: nn.Module) -> bool:
    """Return whether code that a module may run names Python's `random` or `numpy.random`.

    It may do so and never draw.
    """
    reader = _Reader()
    return any(reader.read(function) for part in module.modules() for function in _functions(part))


def _functions(part: nn.Module) -> Iterator[Any]:
    """Yield the functions that a module's call runs, and the classes that define them."""
    yield vars(part).get("forward")
    for hooks in (part._forward_hooks, part._forward_pre_hooks):
        yield from hooks.values()
    for kind in type(part).__mro__:
        if not _is_library(kind.__module__):
            yield kind


def _is_library(name: str | None) -> bool:
    return name is None or name.partition(".")[0] in _LIBRARIES


class _Reader:
    """Searches functions, and the functions that they name, each once."""

    def __init__(self) -> None:
        self._visited: set[int] = set()

    def read(self, value: Any) -> bool:
        """Return whether code that is reached through `value` names one of the generators."""
        value = getattr(value, "__func__", value)
        if id(value) in self._visited:
            return False
        self._visited.add(id(value))
        # A wrapper may draw by itself, or not be a function: that of functools.cache is none.
        wrapped = getattr(value, "__wrapped__", None)
        if wrapped is not None and self.read(wrapped):
            return True
        if isfunction(value):
            return self._function(value)
        if isclass(value) and not _is_library(value.__module__):
            return any(self.read(member) for member in list(vars(value).values()))
        if isinstance(value, property):
            return self.read(value.fget)
        return _draws(value)

    def _function(self, function: FunctionType) -> bool:
        """Return whether a user's function may draw, itself or by what it refers to."""
        if _is_library(function.__module__):
            return False
        names = set(names_of_code(function.__code__))
        # Both `import random` and the attribute of `np.random` mention this name.
        if "random" in names:
            return True
        values = [*_globals(function, names), *(value for _, value in closure_of(function))]
        return any(_draws(value) or self.read(value) for value in values)


def _globals(function: FunctionType, names: set[str]) -> Iterator[Any]:
    """Yield the globals that a function names, and the attributes of modules among these."""
    modules = []
    for name in names:
        if name in function.__globals__:
            value = function.__globals__[name]
            yield value
            if ismodule(value) and not _is_library(value.__name__):
                modules.append(value)
    for module in modules:
        yield from [vars(module)[name] for name in names if name in vars(module)]


def closure_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield names and values of the variables of enclosing functions that a function reads."""
    for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with suppress(ValueError):  # not assigned yet
            yield key, cell.cell_contents


def _draws(value: Any) -> bool:
    """Return whether a value is a module or a method of one of the generators."""
    if ismodule(value):
        return value.__name__ in ("random", "numpy.random")
    holder = getattr(value, "__self__", None)
    return isinstance(holder, random.Random) or type(holder).__name__ == "RandomState"


def names_of_code(code: CodeType) -> Iterator[str]:
    """Yield the global names and attributes that code mentions, also in functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_of_code(constant)
