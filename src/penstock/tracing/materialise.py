"""Allocation and initialisation of layers that were built on the meta device.

A rank does this for the layers that it holds.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ChainError
from penstock.modules.initialise import initial_values
from penstock.modules.randomness import drawing, seed_generators, stream_seed
from penstock.tracing.traced_chain import TracedChain
from penstock.tracing.traced_layer import TracedLayer


def materialise(
    traced: TracedChain, indices: Sequence[int], device: torch.device, seed: int
) -> list[nn.Module]:
    """Return the modules of some layers, on `device`.

    Layers with memory are moved and stay the user's own modules. Layers on the meta device are
    copied, allocated, and initialised by the `reset_parameters()` of their submodules, children
    first, with random numbers that depend on `seed` and the layer's index alone. Tensors that have
    values already, in these layers or shared with them, keep them.

    Raises:
        ChainError: a submodule on the meta device has tensors of its own and no `reset_parameters`;
            for traced models see `initialise`.
    """
    modules = [traced.modules[index] for index in indices]
    if not any(map(_has_meta, modules)):
        return [module.to(device) for module in modules]
    # One copy of all modules together preserves sharing.
    modules = list(copy.deepcopy(nn.ModuleList(modules), _uncopied(modules)))
    allocated: dict[int, Tensor] = {}
    with drawing(device), torch.no_grad():
        for index, module in zip(indices, modules, strict=True):
            seed_generators(device, stream_seed(seed, -1, index))
            if isinstance(module, TracedLayer):
                _initialise_traced(module, device, allocated)
                continue
            for name, submodule in _children_first(module, traced.layers[index].name):
                _initialise(submodule, name, device, allocated)
    return [module.to(device) for module in modules]


def _uncopied(modules: Sequence[nn.Module]) -> dict[int, object]:
    """Return a memo for `copy.deepcopy` by which objects with memory are not copied.

    They are tensors, and layers whose tensors all have memory.
    """
    memo: dict[int, object] = {}
    for module in modules:
        tensors = list(_tensors(module))
        memo.update((id(tensor), tensor) for tensor in tensors if not tensor.is_meta)
        if tensors and not _has_meta(module):
            memo[id(module)] = module
    return memo


def _has_meta(module: nn.Module) -> bool:
    """Return whether any tensor of a module is on the meta device."""
    return any(tensor.is_meta for tensor in _tensors(module))


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of a module."""
    yield from module.parameters()
    yield from module.buffers()


def _children_first(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and its submodules with their names, each after its children."""
    for child_name, child in module.named_children():
        yield from _children_first(child, f"{name}.{child_name}")
    yield name, module


def _initialise(
    module: nn.Module, name: str, device: torch.device, allocated: dict[int, Tensor]
) -> None:
    """Allocate and initialise the tensors of a module, without those of its children.

    Args:
        module: the module.
        name: its name, for messages.
        device: where to allocate.
        allocated: the tensors allocated so far, by the id of the meta tensor; shared tensors are
            allocated and initialised once.
    """
    fresh: set[int] = set()
    members: list[dict[str, Any]] = [module._parameters, module._buffers]
    for tensors in members:
        for key, tensor in tensors.items():
            if tensor is None or not tensor.is_meta:
                continue
            if id(tensor) not in allocated:
                allocated[id(tensor)] = _allocate(tensor, device)
                fresh.add(id(allocated[id(tensor)]))
            tensors[key] = allocated[id(tensor)]
    if fresh:
        _reset(module, name, fresh)


def _reset(module: nn.Module, name: str, fresh: set[int]) -> None:
    """Initialise those tensors of a module whose ids are in `fresh`."""
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is None:
        raise ChainError(
            f"{name} ({type(module).__name__}) is on the meta device and has weights of its own, "
            "but no reset_parameters() to initialise them. Give the class one, or build the model "
            "on a real device"
        )
    # The reset changes all tensors of the module. Restore those that have values already, such as
    # the weight that a head shares with the embedding while its bias is new.
    initialised = [
        (tensor, tensor.clone())
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None and id(tensor) not in fresh
    ]
    reset()
    for tensor, values in initialised:
        tensor.copy_(values)


def _allocate(tensor: Tensor, device: torch.device) -> Tensor:
    """Return an uninitialised tensor on `device` like a tensor on the meta device."""
    empty: Tensor = torch.empty_like(tensor, device=device)
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty


def _initialise_traced(
    layer: TracedLayer, device: torch.device, allocated: dict[int, Tensor]
) -> None:
    """Allocate and initialise the tensors of a traced layer by the modules of the model."""
    fresh: dict[str, Tensor] = {}
    for first, (members, key) in layer.places.items():
        tensor = members[key]
        if tensor.is_meta and id(tensor) not in allocated:
            fresh[first] = tensor
    values = initial_values(layer.variants.skeleton, layer.variants.names, fresh, device)
    allocated.update((id(fresh[first]), tensor) for first, tensor in values.items())
    for module in layer.modules():
        _replace_meta(module._parameters, allocated)
        _replace_meta(module._buffers, allocated)


def _replace_meta(members: dict[str, Any], allocated: Mapping[int, Tensor]) -> None:
    """Replace the tensors on the meta device in a module's parameters or buffers."""
    for key, tensor in members.items():
        if tensor is not None and tensor.is_meta:
            members[key] = allocated[id(tensor)]
