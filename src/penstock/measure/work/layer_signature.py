"""Keys by which equal layers with equal inputs are recognised, so that they are counted once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

#: A hashable key of a value or a layer.
Signature = object


def value_signature(value: Any) -> Signature:
    """Return a key that is equal for values that a layer cannot distinguish by shapes.

    Values of unknown types get a key of their own.
    """
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.requires_grad
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(value_signature, value))
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(map(value_signature, value))
    if isinstance(value, dict):
        return type(value), tuple((key, value_signature(entry)) for key, entry in value.items())
    if isinstance(value, (bool, int, float, str, torch.dtype, type(None))):
        return value
    return "only", id(value)


def layer_signature(module: nn.Module) -> Signature:
    """Return a key that is equal for layers that do the same.

    With it a transformer's blocks are counted once.
    """
    # Which of its tensors are identical is part of what a layer is: number them by identity.
    numbers: dict[int, int] = {}
    parts = []
    for name, part in module.named_modules(remove_duplicate=False):
        tensors = []
        for holder in (part._parameters, part._buffers):
            for key, tensor in holder.items():
                number = None if tensor is None else numbers.setdefault(id(tensor), len(numbers))
                tensors.append((key, value_signature(tensor), number))
        settings = tuple(
            (key, value_signature(value))
            for key, value in vars(part).items()
            if key not in ("_parameters", "_buffers", "_modules")
        )
        parts.append((name, type(part), tuple(tensors), settings))
    return tuple(parts)
