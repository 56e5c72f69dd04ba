"""Why a layer cannot be held by several ranks at once: what two copies of it would do differently
from one.

Copies of a stage run different micro-batches and add up their gradients. A layer whose forward
reads state that forwards change, or whose gradients pass through a hook, then trains to other
numbers than in one process. What can be seen without running the layer is found here;
`module_state` finds what only a forward shows.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator, Mapping
from types import CellType
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.spectral_norm import SpectralNorm

from penstock.tracing.chain import TracedChain
from penstock.tracing.names import prefix_of


def single_copy_reasons(traced: TracedChain) -> dict[int, tuple[str, ...]]:
    """By layer, why it cannot have copies; layers that can are left out.

    >>> from penstock.tracing.chain import chain
    >>> model = nn.Sequential(nn.Embedding(9, 4, max_norm=1.0), nn.Linear(4, 2))
    >>> single_copy_reasons(chain(model))
    {0: ('layer 0 (Embedding): max_norm=1.0 changes the weight in every forward',)}
    """
    found: dict[int, tuple[str, ...]] = {}
    for index, (layer, module) in enumerate(zip(traced.layers, traced.modules, strict=True)):
        prefix = prefix_of(layer.name, module)
        reasons = [
            f"layer {name} ({type(part).__name__}): {reason}"
            for name, part in module.named_modules(prefix=prefix)
            for reason in _reasons(part)
        ]
        if reasons:
            found[index] = tuple(dict.fromkeys(reasons))
    return found


def weights_with_hooks(traced: TracedChain) -> dict[str, str]:
    """Parameters that have hooks, by the chain's names, with what registered the first of them."""
    found: dict[str, str] = {}
    for layer, module in zip(traced.layers, traced.modules, strict=True):
        for name, parameter in module.named_parameters(prefix_of(layer.name, module)):
            kind = weight_hook(parameter)
            if kind:
                found.setdefault(traced.aliases.get(name, name), kind)
    return found


def weights_with_max_norm(traced: TracedChain) -> frozenset[str]:
    """The tables, by the chain's names, whose rows an embedding renormalises in its forward."""
    found: set[str] = set()
    for layer, module in zip(traced.layers, traced.modules, strict=True):
        for name, part in module.named_modules(prefix=prefix_of(layer.name, module)):
            if _max_norm(part) is not None:
                own = f"{name}.weight" if name else "weight"
                found.add(traced.aliases.get(own, own))
    return frozenset(found)


def weight_hook(tensor: Tensor) -> str:
    """What registered a hook on a tensor, one that may change weights before others; empty where it
    has none.
    """
    if getattr(tensor, "_post_accumulate_grad_hooks", None):
        return "register_post_accumulate_grad_hook"
    return "register_hook" if tensor._backward_hooks else ""


def keeps_sparse_gradients(module: nn.Module) -> bool:
    """Whether the gradient of a module's weight is a sparse tensor."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and bool(module.sparse)


def _reasons(part: nn.Module) -> Iterator[str]:
    norm = _max_norm(part)
    if norm is not None:
        yield f"max_norm={norm} changes the weight in every forward"
    yield from _spectral_norms(part)
    for name, parameter in part._parameters.items():
        if parameter is not None and (kind := weight_hook(parameter)):
            yield f"{name} has a gradient hook ({kind}), which would see the gradients of one copy, not their sum"
    for name, hook in _module_hooks(part):
        if _changes_variables(hook) or ("backward" in name and _changes_containers(hook)):
            yield f"the hook {_name_of(hook)} ({name}) changes variables of its own, of which each copy would have others"


def _max_norm(part: nn.Module) -> float | None:
    return part.max_norm if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) else None


def _spectral_norms(part: nn.Module) -> Iterator[str]:
    """Both of torch's spectral norms: their power iteration moves a buffer in every forward, and
    divides by what it comes to.
    """
    names = [
        hook.name for hook in part._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)
    ]
    if parametrize.is_parametrized(part):
        assert isinstance(part.parametrizations, nn.ModuleDict)
        names += [
            name
            for name, steps in part.parametrizations.items()
            if isinstance(steps, nn.Module)
            and any(isinstance(step, parametrizations._SpectralNorm) for step in steps.children())
        ]
    for name in names:
        yield f"spectral_norm of {name} moves its power iteration in every forward"


def _module_hooks(part: nn.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The hooks of a module that may change what runs, with what registered each. Torch's own are
    known to `_spectral_norms`.
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
    """Whether a hook returns something, and rebinds a variable from outside or an attribute
    meanwhile.

    A hook that only records what it sees returns None, and changes nothing that training reads.
    """
    code = getattr(_function_of(hook), "__code__", None)
    if code is None:
        return False
    stores = returns = False
    before: dis.Instruction | None = None
    for step in dis.get_instructions(code):
        outside = step.opname == "STORE_DEREF" and step.argval in code.co_freevars
        stores |= outside or step.opname in ("STORE_GLOBAL", "STORE_ATTR")
        if step.opname == "RETURN_CONST":
            returns |= step.argval is not None
        elif step.opname == "RETURN_VALUE":
            nothing = before is not None and before.opname == "LOAD_CONST" and before.argval is None
            returns |= not nothing
        before = step
    return stores and returns


def _changes_containers(hook: Callable[..., Any]) -> bool:
    """Whether a hook may write into a list or dict from outside; of forward hooks that is observed
    while they run.
    """
    function = _function_of(hook)
    code = getattr(function, "__code__", None)
    if code is None or not any(
        step.opname == "STORE_SUBSCR" for step in dis.get_instructions(code)
    ):
        return False
    cells = getattr(function, "__closure__", None) or ()
    return any(isinstance(_in_cell(cell), (list, dict, Tensor)) for cell in cells)


def _in_cell(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing has been assigned yet
        return None


def _function_of(hook: Callable[..., Any]) -> Any:
    """The Python function behind a bound method, a partial, or an object that can be called."""
    while hasattr(hook, "func"):
        hook = hook.func
    if not hasattr(hook, "__code__") and not hasattr(hook, "__func__"):
        hook = vars(type(hook)).get("__call__", hook)
    return getattr(hook, "__func__", hook)


def _name_of(hook: Callable[..., Any]) -> str:
    return str(getattr(_function_of(hook), "__qualname__", type(hook).__name__))
