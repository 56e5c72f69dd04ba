"""Loops that run as plain Python while there is little to do, and compiled by Numba from then on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

#: Turns of a loop from which on Numba is loaded (a second, and at the first time on a machine some
#: more to compile), and from
#: which on it is worth calling once somebody has loaded it.
WORTH_LOADING, WORTH_CALLING = 500_000, 20_000


def run(loop: Callable[..., Any], work: float, *arguments: Any) -> Any:
    """Call a function of `loops.py`.

    Args:
        loop: the function; it must be one that Numba can compile.
        work: about how many turns its innermost loop takes, in all calls that will follow each
        other. arguments: numbers, and arrays, which it may fill.
    """
    if work >= (WORTH_CALLING if "numba" in sys.modules else WORTH_LOADING):
        loop = _compiled(loop)
    return loop(*arguments)


@cache
def _compiled(loop: Callable[..., Any]) -> Callable[..., Any]:
    try:
        from numba import njit
    except ImportError:
        return loop
    try:
        return njit(cache=True, nogil=True)(loop)
    except RuntimeError:  # no folder that Numba may write to: compiled again in every process
        return njit(nogil=True)(loop)
