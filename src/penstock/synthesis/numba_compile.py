"""Compile functions by Numba if it is installed; else Python runs them.

Only the kernels of this folder import this module, and they are imported when a search starts:
Numba takes a second to load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

Kernel = TypeVar("Kernel", bound=Callable[..., object])


def _njit() -> Any:
    """Return Numba's decorator, or None if it is not installed."""
    try:
        from numba import njit
    except ImportError:
        return None
    return njit


_NJIT = _njit()


def compiled(function: Kernel) -> Kernel:
    """Return `function`, compiled at its first call, and cached on disk if there is a writable
    folder.
    """
    if _NJIT is None:
        return function
    try:
        return cast("Kernel", _NJIT(cache=True, error_model="numpy")(function))
    except RuntimeError:
        return cast("Kernel", _NJIT(error_model="numpy")(function))
