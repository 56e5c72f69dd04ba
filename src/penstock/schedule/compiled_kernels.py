"""The kernels of `kernels.py`, compiled by Numba and cached on disk.

Importing this file loads Numba; `engine.py` decides when.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

from penstock.schedule import kernels


def _compile(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return the kernel compiled by Numba on its first call."""
    try:
        return njit(cache=True, nogil=True)(kernel)
    except RuntimeError:  # Numba has no writable cache folder: every process compiles anew
        return njit(nogil=True)(kernel)


order_ops = _compile(kernels.order_ops)
time_ops = _compile(kernels.time_ops)
time_ops_contended = _compile(kernels.time_ops_contended)
time_vectors = _compile(kernels.time_vectors)
