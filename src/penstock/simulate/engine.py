"""Which loops run: those of Numba where they pay, else the same in plain Python.

Loading Numba takes about as long as a hundred thousand ops in plain Python, and compiling, once per
machine, some seconds. So one small schedule never loads it; large ones do, and small ones that are
simulated again and again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from penstock.simulate import kernels

#: Ops walked at once from which on Numba is loaded, and ops walked earlier for the same schedule.
WORTH_LOADING = 50_000
WORTH_RETURNING = 20_000
#: Ops from which on a call of a compiled loop, once loaded, is cheaper than the plain one.
WORTH_CALLING = 30

_COMPILED = "penstock.simulate.compiled"


def load_compiled() -> ModuleType | None:
    """The compiled loops, loaded and if need be compiled now; None where there is no Numba.

    For those who are going to simulate many small schedules: from then on all but the smallest run
    compiled.
    """
    try:
        from penstock.simulate import compiled
    except ImportError:
        return None
    return compiled


def run(kernel: str, work: int, effort: int, *arguments: Any) -> Any:
    """Call a loop of `kernels.py` on arrays that it may fill.

    Args:
        kernel: the function's name.
        work: ops that it will walk.
        effort: ops that have been walked for the same schedule in earlier simulations.
        arguments: numbers, arrays, and named tuples of them.
    """
    found = sys.modules.get(_COMPILED) if work >= WORTH_CALLING else None
    if found is None and (work >= WORTH_LOADING or effort >= WORTH_RETURNING):
        found = load_compiled()
    if found is not None:
        return getattr(found, kernel)(*arguments)
    return _plain(getattr(kernels, kernel), arguments)


def _plain(kernel: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Run on lists, which Python reads several times faster than arrays, and write back what was
    filled: the last argument.
    """
    lists = list(map(_listed, arguments))
    result = kernel(*lists)
    filled = arguments[-1] if isinstance(arguments[-1], tuple) else arguments[-1:]
    for array, values in zip(
        filled, lists[-1] if isinstance(arguments[-1], tuple) else lists[-1:], strict=True
    ):
        array[...] = values
    return result


def _listed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return type(value)(*map(_listed, value)) if isinstance(value, tuple) else value
