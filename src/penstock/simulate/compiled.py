"""The loops of `kernels.py`, compiled by Numba and kept on disk. Importing this file loads Numba:
see `engine.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

from penstock.simulate import kernels


def _compiled(kernel: Callable[..., Any]) -> Callable[..., Any]:
    try:
        return njit(cache=True, nogil=True)(kernel)
    except RuntimeError:  # no folder that Numba may write to: compiled again in every process
        return njit(nogil=True)(kernel)


order_ops = _compiled(kernels.order_ops)
timed = _compiled(kernels.timed)
contended = _compiled(kernels.contended)
lanes = _compiled(kernels.lanes)
