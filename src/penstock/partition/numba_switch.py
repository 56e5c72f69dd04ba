"""Switch between plain Python and Numba: short loops are interpreted, long ones compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

#: Innermost iterations above which importing Numba pays off (the import takes about a second, and
#: the first run on a machine compiles for some seconds more), and above which a compiled loop pays
#: off in a process that has Numba imported already.
WORTH_LOADING, WORTH_CALLING = 500_000, 20_000


def run(loop: Callable[..., Any], work: float, *arguments: Any) -> Any:
    """Call a function of `loops.py` or `kind_loops.py`, compiled by Numba if its work is long.

    Args:
        loop: the function; Numba must be able to compile it.
        work: approximate number of innermost iterations, over all calls that the search will make.
        arguments: numbers and arrays; the function may write to the arrays.
    """
    if work >= (WORTH_CALLING if "numba" in sys.modules else WORTH_LOADING):
        loop = _compiled(loop)
    return loop(*arguments)


@cache
def _compiled(loop: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function with Numba; return it unchanged where Numba is not installed."""
    try:
        from numba import njit
    except ImportError:
        return loop
    try:
        return njit(cache=True, nogil=True)(loop)
    except RuntimeError:  # Numba has no writable cache folder: every process compiles anew
        return njit(nogil=True)(loop)
