"""Layers that other ranks hold, as far as this one must know them: their forms, without the memory
of their parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import replace

import torch
from torch import nn

from penstock.tracing.chain import TracedChain
from penstock.tracing.hooks import copy_tensor_hooks


def without_others(traced: TracedChain, held: Collection[int]) -> TracedChain:
    """The chain with copies on the meta device in the places of layers that are not in `held`.

    Nobody's own modules change: whoever still has the model has it whole. Parameters that a held
    layer uses too, and buffers, stay as they are; so do layers that were cut out of a traced model,
    which may have to be traced again.
    """
    if any(getattr(module, "whole_names", False) for module in traced.modules):
        return replace(traced, roots=())
    kept = {id(parameter) for index in held for parameter in traced.modules[index].parameters()}
    memo: dict[int, object] = {}
    for index, module in enumerate(traced.modules):
        if index in held:
            continue
        for parameter in module.parameters():
            stays = id(parameter) in kept or parameter.is_meta
            memo[id(parameter)] = parameter if stays else _without_memory(parameter)
        memo.update((id(buffer), buffer) for buffer in module.buffers())
    modules = [
        module if index in held else _copied(module, memo)
        for index, module in enumerate(traced.modules)
    ]
    return replace(traced, modules=tuple(modules), roots=())


def _without_memory(parameter: nn.Parameter) -> nn.Parameter:
    made = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    copy_tensor_hooks(parameter, made)
    return made


def _copied(module: nn.Module, memo: dict[int, object]) -> nn.Module:
    """A copy of a module whose tensors are those in `memo`; the module itself where it is of a kind
    that cannot be copied.
    """
    try:
        return copy.deepcopy(module, memo)
    except Exception:  # noqa: BLE001 - whatever a user's module raises, it can stay as it is
        return module
