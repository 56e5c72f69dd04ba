"""Python's and NumPy's global random generators: `random.random()`, `numpy.random.rand()` and their
like in a forward.

Saving and restoring both costs some 50 µs, so it is done for layers whose code mentions them, and
for those that were seen to draw.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from inspect import isclass, isfunction, ismodule
from types import CodeType, FunctionType
from typing import Any

from torch import nn

State = tuple[Any, Any]

#: Packages whose own code is not read: it draws from torch's generators, if at all.
_FOREIGN = ("torch", "penstock", "numpy", "random", "builtins", "typing", "collections", "math")


def host_state() -> State:
    """The state of both generators; NumPy's is None where NumPy has not been imported."""
    numpy = sys.modules.get("numpy.random")
    return random.getstate(), None if numpy is None else numpy.get_state(legacy=False)


def restore_host(state: State) -> None:
    """Let both generators go on from a state."""
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
            numpy.seed(seed & 0xFFFFFFFF)
        except (TypeError, ValueError, AttributeError):
            return  # the user has put a bit generator in its place that takes no seed


def equal_states(one: State, other: State) -> bool:
    """Whether nothing was drawn between two states."""
    return bool(one[0] == other[0] and _comparable(one[1]) == _comparable(other[1]))


def _comparable(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _comparable(value) for key, value in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state


def mentions_host_generators(module: nn.Module) -> bool:
    """Whether code that a module could run names Python's `random` or `numpy.random`. It may be
    true of code that never draws.
    """
    reader = _Reader()
    return any(reader.read(function) for part in module.modules() for function in _functions(part))


def _functions(part: nn.Module) -> Iterator[Any]:
    yield vars(part).get("forward")
    for hooks in (part._forward_hooks, part._forward_pre_hooks):
        yield from hooks.values()
    for kind in type(part).__mro__:
        if not _is_foreign(kind.__module__):
            yield kind


def _is_foreign(name: str | None) -> bool:
    return name is None or name.partition(".")[0] in _FOREIGN


class _Reader:
    """Reads functions, and those that they name, each once."""

    def __init__(self) -> None:
        self._read: set[int] = set()

    def read(self, value: Any) -> bool:
        """Whether code that is reached by `value` names one of the generators."""
        value = getattr(value, "__func__", value)
        value = getattr(value, "__wrapped__", value)
        if id(value) in self._read:
            return False
        self._read.add(id(value))
        if isfunction(value):
            return self._function(value)
        if isclass(value) and not _is_foreign(value.__module__):
            return any(self.read(member) for member in list(vars(value).values()))
        if isinstance(value, property):
            return self.read(value.fget)
        return _draws(value)

    def _function(self, function: Callable[..., Any]) -> bool:
        if not isinstance(function, FunctionType) or _is_foreign(function.__module__):
            return False
        names = set(_names(function.__code__))
        if "random" in names:
            return True
        reached = [function.__globals__[name] for name in names if name in function.__globals__]
        for module in [value for value in reached if ismodule(value)]:
            if not _is_foreign(module.__name__):
                reached += [vars(module)[name] for name in names if name in vars(module)]
        for cell in function.__closure__ or ():
            try:
                reached.append(cell.cell_contents)
            except ValueError:  # a cell that is still empty
                continue
        return any(_draws(value) or self.read(value) for value in reached)


def _draws(value: Any) -> bool:
    """Whether a value is one of the generators' modules or methods."""
    if ismodule(value):
        return value.__name__ in ("random", "numpy.random")
    holder = getattr(value, "__self__", None)
    return isinstance(holder, random.Random) or type(holder).__name__ == "RandomState"


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
