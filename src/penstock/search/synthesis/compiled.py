"""Functions compiled by Numba where it is installed, and played by Python where it is not.

Only the kernels of this folder import it, and they are imported when a search begins: Numba takes a
second to load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

Kernel = TypeVar("Kernel", bound=Callable[..., object])


def _njit() -> Any:
    try:
        from numba import njit
    except ImportError:
        return None
    return njit


_NJIT = _njit()


def compiled(function: Kernel) -> Kernel:
    """`function`, compiled at its first call; what that made is kept on disk, where there is a
    folder to write to.
    """
    if _NJIT is None:
        return function
    try:
        return cast("Kernel", _NJIT(cache=True, error_model="numpy")(function))
    except RuntimeError:
        return cast("Kernel", _NJIT(error_model="numpy")(function))
