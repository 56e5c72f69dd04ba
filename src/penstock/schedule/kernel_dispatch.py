"""Choose between the kernels compiled by Numba and the same in plain Python.

Loading Numba takes about as long as a hundred thousand ops in plain Python, and compiling, once per
machine, some seconds. So a single small schedule never loads it; large ones do, and so do small
ones that are simulated many times.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from penstock.schedule import kernels

#: Numba is loaded for a call of this many ops, or if this many were simulated before for the same
#: schedule.
WORTH_LOADING = 50_000
WORTH_RETURNING = 20_000
#: Number of ops above which a call of a compiled kernel, once loaded, is cheaper than plain Python.
WORTH_CALLING = 30

_COMPILED = "penstock.schedule.compiled_kernels"


def load_compiled() -> ModuleType | None:
    """Load (and if necessary compile) the kernels; None if Numba is not installed.

    For callers that are going to simulate many small schedules: afterwards all but the smallest run
    compiled.
    """
    try:
        from penstock.schedule import compiled_kernels as compiled
    except ImportError:
        return None
    return compiled


def run(kernel: str, work: int, effort: int, *arguments: Any) -> Any:
    """Call a kernel of `kernels.py`.

    Args:
        kernel: the function's name.
        work: number of ops it will process.
        effort: number of ops processed for the same schedule in earlier simulations.
        arguments: numbers, arrays, and named tuples of them; the last one is the output.
    """
    module = sys.modules.get(_COMPILED) if work >= WORTH_CALLING else None
    if module is None and (work >= WORTH_LOADING or effort >= WORTH_RETURNING):
        module = load_compiled()
    if module is not None:
        return getattr(module, kernel)(*arguments)
    return _run_on_lists(getattr(kernels, kernel), arguments)


def _run_on_lists(kernel: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Run a kernel on lists and copy its output, the last argument, back to the arrays.

    Plain Python reads lists several times faster than arrays.
    """
    lists = list(map(_as_lists, arguments))
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
