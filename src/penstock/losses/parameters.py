"""Trainable weights of a loss, which no stage's optimizer would update.

They are found before anything is run.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from penstock.errors import SettingError
from penstock.modules.host_random import closure_of
from penstock.optim.factory import check_factory
from penstock.tracing.traced_chain import TracedChain
from penstock.units import format_count

#: How far functions are followed that functions call, and containers that they refer to.
_DEEPEST = 4


def check_training(traced: TracedChain, loss: object, optimizer: object) -> None:
    """Refuse a loss or an optimizer with which some weights would not be trained.

    Raises:
        SettingError: see `check_loss` and `check_factory`.
    """
    check_factory(optimizer)
    check_loss(traced, loss)


def check_loss(traced: TracedChain, loss: object) -> None:
    """Refuse a loss that has trainable weights beside the model's.

    The check covers the loss if it is a module, the objects of bound methods and partials, and
    what a function refers to in its closure, its defaults, its globals and the functions that it
    calls. A module that shares weights with the model is accepted here; `stage.foreign_parameters`
    checks its use when it runs.

    Raises:
        SettingError: there is one; the message says where.
    """
    if not callable(loss):
        raise SettingError(
            f"loss= is a function from the model's output and the targets to a number, not {loss!r}"
        )
    model_parameters = {id(parameter) for _, parameter in traced.named_parameters()}
    for place, value in _referred_objects(loss):
        weights = _trainable(value, model_parameters)
        if weights:
            raise SettingError(
                f"{place} has {format_count(len(weights), 'trainable weight')} of its "
                f"own, the first ({weights[0][0]}) of shape {tuple(weights[0][1].shape)}: "
                "optimizer= is called with the model's, so no stage would train it. Make it part "
                "of the model, in its last layer, whose output is then what the loss without "
                "weights takes; or if it is not to be trained here, freeze it before: "
                "requires_grad_(False)"
            )


def _trainable(value: object, excluded: set[int]) -> list[tuple[str, Tensor]]:
    """Return the parameters of a module or tensor that require a gradient; none of a module that
    the pipeline trains.
    """
    if isinstance(value, nn.Module):
        named: list[tuple[str, Tensor]] = list(value.named_parameters())
        if any(id(parameter) in excluded for _, parameter in named):
            return []
    else:
        assert isinstance(value, Tensor)
        named = [("a tensor", value)] if value.is_leaf and id(value) not in excluded else []
    return [(name, tensor) for name, tensor in named if tensor.requires_grad]


def _referred_objects(loss: object) -> Iterator[tuple[str, object]]:
    """Yield the modules and tensors that a loss refers to, each once, with their place."""
    visited: set[int] = set()
    stack: list[tuple[str, object, int]] = [("loss=", loss, 0)]
    # Of an object with a `__call__`, the attributes.
    if not isinstance(loss, (nn.Module, FunctionType, MethodType, functools.partial)):
        stack += [(f"loss.{key}", value, 1) for key, value in getattr(loss, "__dict__", {}).items()]
    while stack:
        place, value, depth = stack.pop()
        if id(value) in visited or depth > _DEEPEST:
            continue
        visited.add(id(value))
        if isinstance(value, (nn.Module, Tensor)):
            yield place, value
        else:
            stack += [(where, part, depth + 1) for where, part in _parts(place, value)]


def _parts(place: str, value: object) -> Iterable[tuple[str, object]]:
    """Return what a value of Python refers to, each with its place for messages."""
    if isinstance(value, functools.partial):
        return [
            (place, value.func),
            *((f"an argument of {place}", part) for part in value.args),
            *((f"{key} of {place}", part) for key, part in value.keywords.items()),
        ]
    if isinstance(value, MethodType):
        return [(f"the object of {place}", value.__self__), (place, value.__func__)]
    if isinstance(value, FunctionType):
        return _parts_of_function(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(place, part) for part in value]
    if isinstance(value, Mapping):
        return [(place, part) for part in value.values()]
    return []


def _parts_of_function(function: Callable[..., Any]) -> Iterator[tuple[str, object]]:
    """Yield what a function refers to: its closure, defaults and globals.

    Functions of libraries are not searched: their globals are no parameters of the loss.
    """
    name = f"{function.__name__}, which is the loss or is called by it, refers to {{}}, which"
    assert isinstance(function, FunctionType)
    if hasattr(function, "__wrapped__"):
        yield name.format("what it wraps"), function.__wrapped__
    if (function.__module__ or "").partition(".")[0] in ("torch", "penstock", "numpy"):
        return
    for key, value in closure_of(function):
        yield name.format(key), value
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield name.format("a default"), value
    for key in _globals_of(function.__code__):
        if key in function.__globals__:
            yield name.format(key), function.__globals__[key]


def _globals_of(code: CodeType) -> Iterator[str]:
    """Yield the globals that a function reads, also in nested functions and comprehensions."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_of(constant)
