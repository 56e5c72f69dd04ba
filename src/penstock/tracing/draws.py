"""Random draws that a trace cannot contain: Python, NumPy, the operating system, and the clock.

Their values during tracing would be constants of the graph: a layer that is dropped once would be
dropped in every batch. They are therefore rejected, with the line that draws. torch's own random
ops are part of the graph and draw again for every micro-batch.
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

from penstock.modules.state_names import full_name
from penstock.tracing.faults import Refused, is_standard, is_torchs, is_users

_ADVICE = (
    "a trace would repeat this one value in every batch. Draw with torch: `keep = torch.rand(()) < "
    "p` and `torch.where(keep, a, b)`, or hand the drawn values to the model as inputs"
)

#: Classes of generators, and functions that read their states.
_STATES: dict[str, Callable[[Any], Any]] = {
    "random.Random": lambda generator: generator.getstate(),
    "numpy.random._generator.Generator": lambda generator: generator.bit_generator.state,
    "numpy.random.mtrand.RandomState": lambda generator: generator.get_state(legacy=False),
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

#: Depth to which attributes of modules are searched for generators.
_DEPTH = 4


class Drawn(Refused):
    """The state of a generator has changed; `Draws.locate` finds the line that changed it."""


@dataclass(eq=False)
class _Source:
    """A generator.

    Attributes:
        name: its name in messages.
        state: reads its state.
        restore: sets its state.
    """

    name: str
    state: Callable[[], Any]
    restore: Callable[[Any], None]

    def mark(self) -> object:
        """Return its state as a value that can be compared."""
        state = self.state()
        if not isinstance(state, dict):
            return state
        inner = state["state"]
        key = inner.get("key")
        if key is None:
            return pickle.dumps(state)
        # MT19937 has an array in its state, which `==` would compare element by element.
        return key.tobytes(), inner["pos"], state.get("has_gauss")


@dataclass(eq=False)
class Draws:
    """Watches one forward of a model for draws.

    Attributes:
        model: the model, whose attributes are searched for generators.
        locate: find the line of a draw; slower.
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
        """Run the forward in this context.

        Raises:
            Drawn: it drew random numbers.
            Refused: it read the clock or the operating system's random bytes, or seeded torch.
        """
        self._sources = [*_global_sources(), *_model_sources(self.model)]
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
                if self._changed_source() is not None:
                    raise Drawn(self._message(), place=self._place)
        finally:
            for source, (state, mark) in zip(self._sources, self._before, strict=True):
                if source.mark() != mark:
                    source.restore(state)

    def _message(self) -> str:
        """Return why the model cannot be traced, with the source of the numbers."""
        source = self._changed_source()
        name = source.name if source else "a generator"
        return f"it draws random numbers from {name}: {_ADVICE}"

    def _changed_source(self) -> _Source | None:
        """Return a source whose state has changed; None if none has."""
        for source, (_, mark) in zip(self._sources, self._before, strict=True):
            if source.mark() != mark:
                return source
        return None

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Check before each line of the model's code whether the line before has drawn."""
        del argument
        if self._place is not None or not is_users(frame.f_code.co_filename):
            return None
        if self._last is not None and self._changed_source() is not None:
            self._place = traceback.FrameSummary(
                self._last.f_code.co_filename, self._last_line, self._last.f_code.co_name
            )
            raise Drawn(self._message(), place=self._place)  # the forward ends here
        if event == "return":
            # What follows a return runs in the caller, so the next change of state is of its line.
            outer = frame.f_back
            while outer is not None and not is_users(outer.f_code.co_filename):
                outer = outer.f_back
            frame = frame if outer is None else outer
        self._last, self._last_line = frame, frame.f_lineno
        return self._trace


def _global_sources() -> Iterator[_Source]:
    """Yield the global generators of Python and, if it is loaded, of NumPy."""
    yield _Source("Python's `random`", random.getstate, random.setstate)
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        yield _Source("`numpy.random`", lambda: numpy.get_state(legacy=False), numpy.set_state)


def _model_sources(model: nn.Module) -> Iterator[_Source]:
    """Yield the generators that modules, their classes or the classes' files have."""
    visited: set[int] = set()
    files: set[str] = set()
    for path, module in model.named_modules():
        yield from _within_value(path, vars(module), visited, _DEPTH)
        for kind in type(module).__mro__:
            if _is_library(kind.__module__):
                continue
            yield from _within_value(kind.__qualname__, dict(vars(kind)), visited, 1)
            file = sys.modules.get(kind.__module__)
            if file is not None and kind.__module__ not in files:
                files.add(kind.__module__)
                yield from _within_value(kind.__module__, dict(vars(file)), visited, 1)


def _is_library(module: str) -> bool:
    """Return whether a module belongs to torch or Python, and not to the user."""
    return module == "builtins" or module.partition(".")[0] in ("torch", "abc", "typing")


def _within_value(path: str, value: Any, visited: set[int], depth: int) -> Iterator[_Source]:
    """Yield the generators in a value, searched to a depth."""
    if isinstance(value, (str, int, float, bytes, torch.Tensor, ModuleType)) or value is None:
        return
    if id(value) in visited:
        return
    visited.add(id(value))
    reader = _reader(value)
    if reader is not None:
        yield _Source(f"{path} ({type(value).__name__})", lambda: reader(value), lambda _: None)
    elif depth > 0:
        for key, item in _items(value):
            yield from _within_value(full_name(path, key), item, visited, depth - 1)


def _items(value: Any) -> Iterable[tuple[str, Any]]:
    """Return the values inside of a value, with their names."""
    if isinstance(value, dict):
        return [(str(key), item) for key, item in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(str(number), item) for number, item in enumerate(value)]
    if isinstance(value, (nn.Module, type)) or callable(value):
        return ()
    return list(getattr(value, "__dict__", {}).items())


def _reader(value: Any) -> Callable[[Any], Any] | None:
    """Return a function that reads the state of a generator; None for other objects."""
    for kind in type(value).__mro__:
        reader = _STATES.get(f"{kind.__module__}.{kind.__qualname__}")
        if reader is not None:
            return None if isinstance(value, random.SystemRandom) else reader
    return None


@contextmanager
def _refusing(model: nn.Module) -> Iterator[None]:
    """Let functions without comparable state raise `Refused` when the model calls them.

    They are replaced in their own modules and in the files of the model's classes; the replacements
    refuse calls of this thread only.
    """
    thread = threading.get_ident()
    names_of: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in (time, os, random, uuid, torch, torch.random, *_files_of(model)):
        # A function may have further names, by `from time import time` or `random._urandom`.
        for name, value in vars(module).items():
            names_of.setdefault(id(value), []).append((vars(module), name))
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    for function, reason, direct in _stateless():
        refusing = _refusing_function(function, reason, thread, direct=direct)
        for namespace, name in names_of.get(id(function), []):
            replaced.append((namespace, name, function))
            namespace[name] = refusing
    generator_class: Any = random.Random
    seed = generator_class.seed
    generator_class.seed = _refusing_seed(seed, thread)
    try:
        yield
    finally:
        generator_class.seed = seed
        for namespace, name, function in replaced:
            namespace[name] = function


def _refusing_function(
    function: Any, reason: str, thread: int, *, direct: bool
) -> Callable[..., Any]:
    """Return a function that raises `Refused` if the model calls it, else calls `function`."""

    def refuses(*args: Any, **kwargs: Any) -> Any:
        """Call the function, unless the model's forward calls it."""
        # The replacement is one for all threads of the process, of which others may draw.
        if threading.get_ident() == thread and _for_model(sys._getframe(1), direct=direct):
            raise Refused(reason)
        return function(*args, **kwargs)

    return refuses


def _refusing_seed(seed: Callable[..., None], thread: int) -> Callable[..., None]:
    """Return a replacement of `random.Random.seed` that refuses to seed from the system."""

    def seeds(self: random.Random, *args: Any, **kwargs: Any) -> None:
        """Seed a generator, unless the model's forward creates it without a seed."""
        # The seed is the only argument, by position or by name; None stands for the system's bits.
        is_unseeded = (*args, *kwargs.values(), None)[0] is None
        if (
            is_unseeded
            and threading.get_ident() == thread
            and _for_model(sys._getframe(1), direct=False)
        ):
            raise Refused(f"it makes a generator without a seed: {_ADVICE}")
        seed(self, *args, **kwargs)

    return seeds


def _stateless() -> Iterator[tuple[Any, str, bool]]:
    """Yield functions, why they are refused, and whether only direct calls by the model are."""
    clock = (
        "it reads the clock, and a trace would have one time for ever. Take the time outside of "
        "the model"
    )
    for name in _CLOCKS:
        yield getattr(time, name), clock, True
    bits = f"it draws random bits from the operating system: {_ADVICE}"
    yield os.urandom, bits, False
    yield uuid.uuid1, bits, False
    seeds = (
        "it sets the state of torch's generator, which a trace does not repeat: what a layer draws "
        "depends on seed, step and micro-batch"
    )
    for name in _SEEDS:
        yield getattr(torch, name), seeds, True


def _for_model(frame: FrameType | None, *, direct: bool) -> bool:
    """Return whether the model's code makes a call, itself or through Python's own modules.

    Calls by torch, and by Python for other purposes, do not count.

    Args:
        frame: the frame that makes the call.
        direct: calls through Python's own modules do not count either.
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
    """Return the Python modules of the user that define the classes of a model."""
    names = {kind.__module__ for part in model.modules() for kind in type(part).__mro__}
    return [sys.modules[name] for name in names if name in sys.modules and not _is_library(name)]
