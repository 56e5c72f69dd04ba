"""Reasons why a layer cannot be replicated on several ranks.

Replicas of a stage run different micro-batches and add their gradients. A layer whose forward reads
state that forwards change, or whose gradients pass through a hook, then trains to other numbers
than in one process. This module finds what is visible without running the layer; `moving_state`
finds the rest.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.spectral_norm import SpectralNorm

from penstock.modules.module_state import cell_value
from penstock.modules.state_names import prefix_of
from penstock.tracing.traced_chain import TracedChain


def single_copy_reasons(traced: TracedChain) -> dict[int, tuple[str, ...]]:
    """Return the reasons by layer; layers that can be replicated are omitted.

    >>> from penstock.tracing.traced_chain import chain
    >>> model = nn.Sequential(nn.Embedding(9, 4, max_norm=1.0), nn.Linear(4, 2))
    >>> single_copy_reasons(chain(model))
    {0: ('layer 0 (Embedding): max_norm=1.0 changes the weight in every forward',)}
    """
    reasons_by_layer: dict[int, tuple[str, ...]] = {}
    for index, (layer, module) in enumerate(zip(traced.layers, traced.modules, strict=True)):
        prefix = prefix_of(layer.name, module)
        reasons = [
            f"layer {name} ({type(part).__name__}): {reason}"
            for name, part in module.named_modules(prefix=prefix)
            for reason in _reasons(part)
        ]
        if reasons:
            reasons_by_layer[index] = tuple(dict.fromkeys(reasons))
    return reasons_by_layer


def weights_with_hooks(traced: TracedChain) -> dict[str, str]:
    """Return the parameters that have hooks, with the method that registered the first hook."""
    registrars: dict[str, str] = {}
    for layer, module in zip(traced.layers, traced.modules, strict=True):
        for name, parameter in module.named_parameters(prefix_of(layer.name, module)):
            registrar = weight_hook(parameter)
            if registrar:
                registrars.setdefault(traced.first_name(name), registrar)
    return registrars


def weights_with_max_norm(traced: TracedChain) -> frozenset[str]:
    """Return the chain's names of embedding tables that are renormalised in the forward."""
    tables: set[str] = set()
    for layer, module in zip(traced.layers, traced.modules, strict=True):
        for name, part in module.named_modules(prefix=prefix_of(layer.name, module)):
            if _max_norm(part) is not None:
                weight = f"{name}.weight" if name else "weight"
                tables.add(traced.first_name(weight))
    return frozenset(tables)


def weight_hook(tensor: Tensor) -> str:
    """Return the method that registered a hook on a tensor; "" if it has none.

    Of the two kinds of hooks the one that may change weights comes first.
    """
    if getattr(tensor, "_post_accumulate_grad_hooks", None):
        return "register_post_accumulate_grad_hook"
    return "register_hook" if tensor._backward_hooks else ""


def keeps_sparse_gradients(module: nn.Module) -> bool:
    """Return whether the gradient of a module's weight is a sparse tensor."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and bool(module.sparse)


def _reasons(part: nn.Module) -> Iterator[str]:
    """Yield the reasons why replicas of a module would not compute what one copy does."""
    norm = _max_norm(part)
    if norm is not None:
        yield f"max_norm={norm} changes the weight in every forward"
    yield from _spectral_norms(part)
    for name, parameter in part._parameters.items():
        if parameter is not None and (kind := weight_hook(parameter)):
            yield (
                f"{name} has a gradient hook ({kind}), which would see the gradients of one copy, "
                "not their sum"
            )
    for name, hook in _module_hooks(part):
        if _changes_variables(hook) or ("backward" in name and _changes_containers(hook)):
            yield (
                f"the hook {_name_of(hook)} ({name}) changes variables of its own, of which each "
                "copy would have others"
            )


def _max_norm(part: nn.Module) -> float | None:
    """Return the norm to which an embedding table is renormalised; None for other modules."""
    return part.max_norm if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) else None


def _spectral_norms(part: nn.Module) -> Iterator[str]:
    """Yield the reasons due to torch's two implementations of spectral norm.

    Their power iteration changes a buffer in every forward, and the weight depends on it.
    """
    hooks = part._forward_pre_hooks.values()
    names = [hook.name for hook in hooks if isinstance(hook, SpectralNorm)]
    if parametrize.is_parametrized(part):
        assert isinstance(part.parametrizations, nn.ModuleDict)
        for name, steps in part.parametrizations.items():
            if any(isinstance(step, parametrizations._SpectralNorm) for step in steps.children()):
                names.append(name)
    for name in names:
        yield f"spectral_norm of {name} moves its power iteration in every forward"


def _module_hooks(part: nn.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the hooks of a module that may change what runs, with the method that registers each.

    torch's own hooks are excluded; `_spectral_norms` handles them.
    """
    registered: Mapping[str, Mapping[int, Callable[..., Any]]] = {
        "register_forward_pre_hook": part._forward_pre_hooks,
        "register_forward_hook": part._forward_hooks,
        "register_full_backward_pre_hook": part._backward_pre_hooks,
        "register_full_backward_hook": part._backward_hooks,
    }
    for name, hooks in registered.items():
        for hook in hooks.values():
            if not type(hook).__module__.startswith("torch."):
                yield name, hook


def _changes_variables(hook: Callable[..., Any]) -> bool:
    """Return whether a hook returns a value, and assigns an outer variable or an attribute.

    A hook that only records what it observes returns None, and changes nothing that training reads.
    """
    code = getattr(_function_of(hook), "__code__", None)
    if code is None:
        return False
    stores = returns = False
    before: dis.Instruction | None = None
    for step in dis.get_instructions(code):
        outside = step.opname == "STORE_DEREF" and step.argval in code.co_freevars
        stores |= outside or step.opname in ("STORE_GLOBAL", "STORE_ATTR")
        # An instruction of Python 3.12 and 3.13; other versions load the constant and return it.
        if step.opname == "RETURN_CONST":
            returns |= step.argval is not None
        elif step.opname == "RETURN_VALUE":
            is_none = before is not None and before.opname == "LOAD_CONST" and before.argval is None
            returns |= not is_none
        before = step
    return stores and returns


def _changes_containers(hook: Callable[..., Any]) -> bool:
    """Return whether a hook may write into a list or dict of an enclosing function.

    Used for backward hooks; forward hooks are observed while they run.
    """
    function = _function_of(hook)
    code = getattr(function, "__code__", None)
    if code is None or not any(
        step.opname == "STORE_SUBSCR" for step in dis.get_instructions(code)
    ):
        return False
    cells = getattr(function, "__closure__", None) or ()
    return any(isinstance(cell_value(cell), (list, dict, Tensor)) for cell in cells)


def _function_of(hook: Callable[..., Any]) -> Any:
    """Return the Python function of a bound method, a partial, or a callable object."""
    while hasattr(hook, "func"):
        hook = hook.func
    if not hasattr(hook, "__code__") and not hasattr(hook, "__func__"):
        hook = vars(type(hook)).get("__call__", hook)
    return getattr(hook, "__func__", hook)


def _name_of(hook: Callable[..., Any]) -> str:
    """Return the name of a hook, for messages."""
    return str(getattr(_function_of(hook), "__qualname__", type(hook).__name__))
