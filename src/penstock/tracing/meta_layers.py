"""Copies on the meta device of layers that other ranks hold: shapes without memory."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import replace

import torch
from torch import nn

from penstock.modules.hooks import copy_tensor_hooks
from penstock.tracing.traced_chain import TracedChain


def without_others(traced: TracedChain, held: Collection[int]) -> TracedChain:
    """Replace layers that are not in `held` by copies on the meta device.

    The user's modules do not change. Parameters that a held layer uses too, and buffers, keep their
    memory. Layers of a traced model are not replaced, since they may have to be traced again.

    Args:
        traced: the chain.
        held: indices of the layers that this rank holds.
    """
    if any(getattr(module, "whole_names", False) for module in traced.modules):
        return replace(traced, roots=())
    modules = list(traced.modules)
    held_parameters: set[int] = set()
    for index in held:
        held_parameters.update(map(id, modules[index].parameters()))
    others = [index for index in range(len(modules)) if index not in held]
    memo: dict[int, object] = {}
    for index in others:
        for parameter in modules[index].parameters():
            has_memory = id(parameter) in held_parameters or parameter.is_meta
            memo[id(parameter)] = parameter if has_memory else _without_memory(parameter)
        memo.update((id(buffer), buffer) for buffer in modules[index].buffers())
    for index in others:
        modules[index] = _copy_module(modules[index], memo)
    return replace(traced, modules=tuple(modules), roots=())


def _without_memory(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter on the meta device with the same hooks."""
    meta_parameter = nn.Parameter(
        torch.empty_like(parameter, device="meta"), parameter.requires_grad
    )
    copy_tensor_hooks(parameter, meta_parameter)
    return meta_parameter


def _copy_module(module: nn.Module, memo: dict[int, object]) -> nn.Module:
    """Return a copy of a module with the tensors in `memo`; the module itself if copying fails."""
    try:
        return copy.deepcopy(module, memo)
    except Exception:  # noqa: BLE001 - whatever a user's module raises, it can stay as it is
        return module
