"""Ops that draw from torch's generators."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@lru_cache(maxsize=4096)
def is_random_op(func: Any) -> bool:
    """Return whether an op is tagged as random."""
    return torch.Tag.nondeterministic_seeded in func.tags


@lru_cache(maxsize=256)
def _dropout_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return position and name of an op's dropout probability, if it has one.

    Fused attention is tagged as random even when its dropout probability is 0.
    """
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.name == "dropout_p"
    )


def draws_with(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a random op draws with these arguments: not if its dropout_p is 0."""
    dropout_arguments = _dropout_arguments(func)
    return not dropout_arguments or any(
        (args[position] if position < len(args) else kwargs.get(name, 0.0)) != 0
        for position, name in dropout_arguments
    )


class RandomOpDetector(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that detects whether a random op has run.

    Attributes:
        detected: whether one has.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.detected = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op."""
        self.detected |= is_random_op(func)
        return func(*args, **(kwargs or {}))
