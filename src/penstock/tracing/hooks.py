"""Hooks on weights, which `copy.deepcopy` leaves behind."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


def copy_tensor_hooks(source: Tensor, copy: Tensor) -> None:
    """Let a copy of a weight have the hooks that `register_hook` has put on it."""
    hooks = source._backward_hooks
    if hooks and copy.requires_grad and not copy._backward_hooks:
        for hook in hooks.values():
            copy.register_hook(hook)  # type: ignore[no-untyped-call]


def copy_weight_hooks(sources: Iterable[nn.Module], copies: Iterable[nn.Module]) -> None:
    """Likewise for all parameters of some modules and their copies."""
    for source, copied in zip(sources, copies, strict=True):
        made = dict(copied.named_parameters())
        for name, parameter in source.named_parameters():
            if name in made:
                copy_tensor_hooks(parameter, made[name])


def hooked(modules: Iterable[nn.Module]) -> list[str]:
    """Names of parameters with hooks on their gradients."""
    return [
        name
        for module in modules
        for name, parameter in module.named_parameters()
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    ]
