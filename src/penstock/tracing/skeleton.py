"""Skeletons: copies of a model whose parameters and buffers have no memory."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from penstock.errors import ChainError
from penstock.tracing.python_state.python_values import is_mutable


def skeleton_of(
    model: nn.Module,
    previous: nn.Module | None = None,
    caches: Mapping[str, Collection[str]] | None = None,
) -> nn.Module:
    """Return a copy of a model whose parameters and buffers are on the meta device.

    Args:
        model: the model.
        previous: an earlier skeleton.
        caches: by the path of a module, attributes that are copied from `previous` instead. They
            are caches of the forward, and may by now hold objects that cannot be copied.

    Raises:
        ChainError: the model cannot be copied.
    """
    caches = caches or {}
    # `deepcopy` takes what the memo has for an object instead of copying it: None for caches, which
    # are set below.
    memo: dict[int, object] = {}
    for path, names in caches.items():
        values = [vars(model.get_submodule(path)).get(name) for name in names]
        memo.update((id(value), None) for value in values if is_mutable(value))
    replace_tensors(model, memo, "meta")
    try:
        skeleton = copy.deepcopy(model, memo)
    except Exception as error:
        raise ChainError(
            f"{type(model).__name__} cannot be copied to be traced ({type(error).__name__}: "
            f"{error}). A tensor attribute of the model must be a buffer, or one without a graph; "
            "locks, files and similar objects should be created when they are needed"
        ) from error
    for path, names in caches.items():
        attributes = vars(skeleton.get_submodule(path))
        previous_attributes = {} if previous is None else vars(previous.get_submodule(path))
        for name in names:
            attributes.pop(name, None)
            if name in previous_attributes:
                attributes[name] = previous_attributes[name]
    return skeleton


def replace_tensors(model: nn.Module, memo: dict[int, object], device: str) -> None:
    """Add empty tensors for all parameters and buffers to a memo for `copy.deepcopy`."""
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) in memo:
            continue
        # With the same strides: whether a view of a tensor is possible depends on them.
        empty: Tensor = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
        )
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
