"""Draws that a trace cannot see: random numbers from Python, NumPy or the operating system, and the
clock.

What they give while a model is traced would be a constant of its graph: a layer that is dropped
once would be dropped for ever. So they are refused, with the line that draws. torch's own random
ops are part of the graph and draw anew for every micro-batch.
"""

from __future__ import annotations

import os
import pickle
import random
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import nn

from penstock.tracing.faults import Refused, is_standard, is_torchs, is_users

_ADVICE = (
    "a trace would repeat this one value in every batch. Draw with torch: `keep = torch.rand(()) < p` and `torch.where(keep, a, b)`, "
    "or hand the drawn values to the model as inputs"
)

#: Objects that draw, and how to read where they are in their sequence.
_STATES: dict[str, Callable[[Any], Any]] = {
    "random.Random": lambda each: each.getstate(),
    "numpy.random._generator.Generator": lambda each: each.bit_generator.state,
    "numpy.random.mtrand.RandomState": lambda each: each.get_state(legacy=False),
}

_CLOCKS = (
    "time",
    "time_ns",
    "perf_counter",
    "perf_counter_ns",
    "monotonic",
    "monotonic_ns",
    "process_time",
    "process_time_ns",
)
_SEEDS = ("manual_seed", "seed", "set_rng_state")

_DEPTH = 4


class Drawn(Refused):
    """A generator is not where it was; which line moved it is to be found out by `Draws.locate`."""


@dataclass(eq=False)
class _Source:
    """A generator: what messages call it, where it is in its sequence, and how to put it back."""

    name: str
    state: Callable[[], Any]
    restore: Callable[[Any], None]

    def mark(self) -> object:
        """Its state as something that can be compared."""
        state = self.state()
        if not isinstance(state, dict):
            return state
        inner = state["state"]
        key = inner.get("key")
        return (
            pickle.dumps(state)
            if key is None
            else (key.tobytes(), inner["pos"], state.get("has_gauss"))
        )


@dataclass(eq=False)
class Draws:
    """Watches one forward of a model.

    Attributes:
        model: whose attributes are searched for generators.
        locate: whether the line of a draw is looked for; slower.
    """

    model: nn.Module
    locate: bool = False
    _sources: list[_Source] = field(default_factory=list)
    _before: list[tuple[Any, object]] = field(default_factory=list)
    _place: traceback.FrameSummary | None = None
    _last: FrameType | None = None
    _last_line: int = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Run the forward in here.

        Raises:
            Drawn: it drew.
            Refused: it read the clock or the operating system's random bytes, or seeded torch.
        """
        self._sources = [*_global_sources(), *_held_sources(self.model)]
        self._before = [(source.state(), source.mark()) for source in self._sources]
        tracer = sys.gettrace()
        try:
            with _refusing(self.model):
                if self.locate:
                    sys.settrace(self._trace)
                try:
                    yield
                finally:
                    if self.locate:
                        sys.settrace(tracer)
                if self._moved() is not None:
                    raise Drawn(self._told(), place=self._place)
        finally:
            for source, (state, mark) in zip(self._sources, self._before, strict=True):
                if source.mark() != mark:
                    source.restore(state)

    def _told(self) -> str:
        moved = self._moved()
        return f"it draws random numbers from {moved.name if moved else 'a generator'}: {_ADVICE}"

    def _moved(self) -> _Source | None:
        for source, (_, mark) in zip(self._sources, self._before, strict=True):
            if source.mark() != mark:
                return source
        return None

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Before each line of the model's own code: whether the line before has drawn."""
        del argument
        if self._place is not None or not is_users(frame.f_code.co_filename):
            return None
        if self._last is not None and self._moved() is not None:
            self._place = traceback.FrameSummary(
                self._last.f_code.co_filename, self._last_line, self._last.f_code.co_name
            )
            raise Drawn(self._told(), place=self._place)  # the forward ends here
        if event == "return":
            outer = frame.f_back
            while outer is not None and not is_users(outer.f_code.co_filename):
                outer = outer.f_back
            frame = frame if outer is None else outer
        self._last, self._last_line = frame, frame.f_lineno
        return self._trace


def _global_sources() -> Iterator[_Source]:
    yield _Source("Python's `random`", random.getstate, random.setstate)
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        yield _Source("`numpy.random`", lambda: numpy.get_state(legacy=False), numpy.set_state)


def _held_sources(model: nn.Module) -> Iterator[_Source]:
    """Generators that the model's modules, their classes, or the files of these hold."""
    seen: set[int] = set()
    files: set[str] = set()
    for path, part in model.named_modules():
        yield from _within_value(path, vars(part), seen, _DEPTH)
        for kind in type(part).__mro__:
            if _is_library(kind.__module__):
                continue
            yield from _within_value(kind.__qualname__, dict(vars(kind)), seen, 1)
            file = sys.modules.get(kind.__module__)
            if file is not None and kind.__module__ not in files:
                files.add(kind.__module__)
                yield from _within_value(kind.__module__, dict(vars(file)), seen, 1)


def _is_library(module: str) -> bool:
    return module == "builtins" or module.partition(".")[0] in ("torch", "abc", "typing")


def _within_value(name: str, value: Any, seen: set[int], depth: int) -> Iterator[_Source]:
    if isinstance(value, (str, int, float, bytes, torch.Tensor, ModuleType)) or value is None:
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    reader = _reader(value)
    if reader is not None:
        yield _Source(f"{name} ({type(value).__name__})", lambda: reader(value), lambda _: None)
    elif depth > 0:
        for key, item in _items(value):
            yield from _within_value(f"{name}.{key}" if name else key, item, seen, depth - 1)


def _items(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(str(key), item) for key, item in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(str(number), item) for number, item in enumerate(value)]
    if isinstance(value, (nn.Module, type)) or callable(value):
        return ()
    return list(getattr(value, "__dict__", {}).items())


def _reader(value: Any) -> Callable[[Any], Any] | None:
    """How to read the state of a generator; None of anything else."""
    for kind in type(value).__mro__:
        reader = _STATES.get(f"{kind.__module__}.{kind.__qualname__}")
        if reader is not None:
            return None if isinstance(value, random.SystemRandom) else reader
    return None


@contextmanager
def _refusing(model: nn.Module) -> Iterator[None]:
    """Let functions that have no state to compare refuse by themselves, where this thread calls
    them for the model.
    """
    own = threading.get_ident()
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for files in (time, os, random, uuid, torch, torch.random, *_files_of(model)):
        for name, value in vars(files).items():
            places.setdefault(id(value), []).append((vars(files), name))
    changed: list[tuple[dict[str, Any], str, Any]] = []
    for function, why, direct in _stateless():

        def refuses(
            *args: Any,
            _function: Any = function,
            _why: str = why,
            _direct: bool = direct,
            **named: Any,
        ) -> Any:
            if threading.get_ident() == own and _for_model(sys._getframe(1), direct=_direct):
                raise Refused(_why)
            return _function(*args, **named)

        changed += [(names, name, function) for names, name in places.get(id(function), [])]
        for names, name in places.get(id(function), []):
            names[name] = refuses
    kind: Any = random.Random
    seed = kind.seed

    def seeds(self: random.Random, *args: Any, **named: Any) -> None:
        unseeded = (*args, *named.values(), None)[0] is None
        if unseeded and threading.get_ident() == own and _for_model(sys._getframe(1), direct=False):
            raise Refused(f"it makes a generator without a seed: {_ADVICE}")
        seed(self, *args, **named)

    kind.seed = seeds
    try:
        yield
    finally:
        kind.seed = seed
        for names, name, function in changed:
            names[name] = function


def _stateless() -> Iterator[tuple[Any, str, bool]]:
    """Functions, why they are refused, and whether only where the model calls them itself."""
    clock = "it reads the clock, and a trace would have one time for ever. Take the time outside of the model"
    for name in _CLOCKS:
        yield getattr(time, name), clock, True
    bits = f"it draws random bits from the operating system: {_ADVICE}"
    yield os.urandom, bits, False
    yield uuid.uuid1, bits, False
    seeds = (
        "it sets the state of torch's generator, which a trace does not repeat: what a layer draws depends on seed, step and "
        "micro-batch"
    )
    for name in _SEEDS:
        yield getattr(torch, name), seeds, True


def _for_model(frame: FrameType | None, *, direct: bool) -> bool:
    """Whether the model's code has called, by itself or through Python's own modules; not torch,
    and not what Python does besides.
    """
    while frame is not None:
        name = frame.f_code.co_filename
        if is_torchs(name):
            return False
        if not is_standard(name):
            return True
        if direct:
            return False
        frame = frame.f_back
    return False


def _files_of(model: nn.Module) -> list[ModuleType]:
    names = {kind.__module__ for part in model.modules() for kind in type(part).__mro__}
    return [sys.modules[name] for name in names if name in sys.modules and not _is_library(name)]
