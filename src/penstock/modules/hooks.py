"""Hooks of modules, and hooks on parameters, which `copy.deepcopy` does not copy."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module itself, without its submodules, has forward or backward hooks."""
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


def copy_tensor_hooks(source: Tensor, copy: Tensor) -> None:
    """Register the hooks of a tensor (by `register_hook`) on its copy."""
    hooks = source._backward_hooks
    if hooks and copy.requires_grad and not copy._backward_hooks:
        for hook in hooks.values():
            copy.register_hook(hook)  # type: ignore[no-untyped-call]


def copy_weight_hooks(sources: Iterable[nn.Module], copies: Iterable[nn.Module]) -> None:
    """Register the hooks of all parameters of some modules on their copies."""
    for source, copied in zip(sources, copies, strict=True):
        copied_parameters = dict(copied.named_parameters())
        for name, parameter in source.named_parameters():
            if name in copied_parameters:
                copy_tensor_hooks(parameter, copied_parameters[name])


def hooked(modules: Iterable[nn.Module]) -> list[str]:
    """Return the names of parameters with hooks on their gradients."""
    return [
        name
        for module in modules
        for name, parameter in module.named_parameters()
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    ]
