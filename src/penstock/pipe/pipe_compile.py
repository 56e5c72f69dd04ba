"""Keep torch.compile out of a Pipe: it cannot follow the threads of the partitions."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

_NOT_COMPILED = (
    "torch.compile leaves a Pipe as it is: the results are those without it, and not faster, "
    "because the partitions run in threads of their own. Compile the layers, or use "
    "ps.Pipeline(..., compile=True)"
)


def without_compilation(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function outside torch.compile, with a warning if torch compiles the caller.

    Without torch.compile in the process this costs a look-up: importing it takes a second.
    """
    if "torch._dynamo" not in sys.modules:
        return function(*args, **kwargs)
    if torch.compiler.is_compiling():
        warnings.warn(_NOT_COMPILED, stacklevel=4)
    uncompiled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return uncompiled(*args, **kwargs)
