"""Functions compiled by Numba where it is installed, and played by Python where it is not.

Only the kernels of this folder import it, and they are imported when a search begins: Numba takes a second to load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

Kernel = TypeVar("Kernel", bound=Callable[..., object])

try:
    from numba import njit  # type: ignore[import-untyped]
except ImportError:
    njit = None


def compiled(function: Kernel) -> Kernel:
    """`function`, compiled at its first call; what that made is kept on disk."""
    return function if njit is None else cast("Kernel", njit(cache=True, error_model="numpy")(function))

