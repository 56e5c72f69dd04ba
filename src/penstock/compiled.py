"""Kernels: how inner loops are compiled by Numba, and when plain Python runs them instead.

A kernel is a function of numbers, arrays and named tuples of arrays. One source serves both ways
and gives the same bits in both. There are two ways to declare one:

* `run(kernel, work, ...)` decides at every call. It is for loops that are often short: a command
  that plans a small model must not wait for Numba.
* `@compiled` compiles always. It is for searches that always take seconds; the module that holds
  the kernel is imported when the search starts, because the decorator imports Numba.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

#: Work is counted in innermost iterations, of which plain Python takes about 1 microsecond each.
#:
#: Importing Numba and calling its first kernel takes 0.6 to 1.1 s, from the cache on disk (measured
#: on one shared core). The iterations that have run in plain Python count towards it, so that many
#: short calls together never cost much more than twice what the best choice would have.
WORTH_LOADING = 500_000
#: Once Numba is loaded, a further kernel takes 15 to 20 ms to load from the cache.
WORTH_COMPILING = 20_000
# Once a kernel is loaded, a call takes 3 to 10 microseconds, which is never much longer than plain
# Python takes.

_dispatchers: dict[Callable[..., Any], Callable[..., Any]] = {}
#: Iterations that each kernel has run in plain Python.
_plain_work: Counter[Callable[..., Any]] = Counter()


def compiled(kernel: Kernel) -> Kernel:
    """Return the kernel compiled by Numba: at its first call, or from the cache on disk."""
    if kernel not in _dispatchers:
        njit = _load_numba()
        # As NumPy does, divisions by zero return infinity or NaN; testing every divisor is slower.
        options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
        try:
            _dispatchers[kernel] = njit(cache=True, **options)(kernel)
        except RuntimeError:  # there is no folder for the cache that this user may write to
            _dispatchers[kernel] = njit(**options)(kernel)
    return cast("Kernel", _dispatchers[kernel])


class _PreparationTime:
    """The seconds in which Numba was imported and compiled kernels, in this process.

    Attributes:
        import_s: seconds of the import.
        timer: Numba's own listener to its compile events; None before the import.
    """

    def __init__(self) -> None:
        self.import_s = 0.0
        self.timer: Any = None

    def seconds(self) -> float:
        """Return the seconds so far; a compilation that is still running does not count yet."""
        if self.timer is None or not self.timer.done:
            return self.import_s
        return self.import_s + float(self.timer.duration)


_preparation = _PreparationTime()


def preparation_s() -> float:
    """Return the seconds in which this process imported Numba and compiled kernels."""
    return _preparation.seconds()


def _load_numba() -> Callable[..., Any]:
    """Import Numba, count the time that it takes from now on, and return its compiler."""
    start_s = time.monotonic()
    from numba import njit
    from numba.core import event

    if _preparation.timer is None:
        _preparation.import_s = time.monotonic() - start_s
        _preparation.timer = event.TimingListener()  # type: ignore[no-untyped-call]
        event.register("numba:compile", _preparation.timer)  # type: ignore[no-untyped-call]
    return cast("Callable[..., Any]", njit)


def run(
    kernel: Callable[..., Any],
    work: float,
    *arguments: Any,
    calls: float = 1,
    on_lists: bool = False,
) -> Any:
    """Call a kernel, compiled if that pays off.

    Args:
        kernel: the function in plain Python.
        work: approximate number of innermost iterations of this call.
        arguments: numbers, arrays, and tuples of them; the kernel may write to the arrays.
        calls: number of such calls that the caller expects to make, this one included.
        on_lists: convert arrays to lists for plain Python, which reads lists several times faster.
            Then the last argument is the only output, and the kernel indexes one axis at a time.
    """
    if is_worth_compiling(kernel, work, calls):
        return compiled(kernel)(*arguments)
    _plain_work[kernel] += int(work)
    return _run_on_lists(kernel, arguments) if on_lists else kernel(*arguments)


def is_worth_compiling(kernel: Callable[..., Any], work: float, calls: float = 1) -> bool:
    """Return whether `run` would call the compiled kernel; arguments as there."""
    if kernel in _dispatchers:
        return True
    if "numba" in sys.modules:
        return _plain_work[kernel] + work * calls >= WORTH_COMPILING
    return _plain_work.total() + work * calls >= WORTH_LOADING


def _run_on_lists(kernel: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call a kernel with lists, and copy its output, the last argument, back to the arrays."""
    lists = [_as_lists(argument) for argument in arguments]
    result = kernel(*lists)
    outputs, output_lists = arguments[-1], lists[-1]
    if not isinstance(outputs, tuple):
        outputs, output_lists = (outputs,), (output_lists,)
    for array, values in zip(outputs, output_lists, strict=True):
        array[...] = values
    return result


def _as_lists(value: Any) -> Any:
    """Convert arrays, also in named tuples, to lists."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return type(value)(*map(_as_lists, value)) if isinstance(value, tuple) else value
