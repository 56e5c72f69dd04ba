"""Real weights for layers that were built on the meta device: only for the layers that a rank
holds.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from penstock.errors import ChainError
from penstock.tracing.chain import TracedChain
from penstock.tracing.initialise import drawn
from penstock.tracing.randomness import drawing, seed_generators, stream_seed
from penstock.tracing.traced import TracedLayer


def materialise(
    traced: TracedChain, indices: Sequence[int], device: torch.device, seed: int
) -> list[nn.Module]:
    """The modules of some layers, on `device`.

    Layers with real weights are moved and stay the user's own modules. Layers on the meta device
    are copied, get memory, and are initialised by their submodules' `reset_parameters()`, children
    first, with random numbers that depend on `seed` and the layer's index alone. What already has
    values, in them or shared with them, keeps these.

    Raises:
        ChainError: a submodule on the meta device has tensors of its own and no `reset_parameters`;
        for traced models see `initialise`.
    """
    modules = [traced.modules[index] for index in indices]
    if not any(tensor.is_meta for module in modules for tensor in _tensors(module)):
        return [module.to(device) for module in modules]
    # One copy of all of them together keeps what they share shared; of real tensors, and layers of
    # these, no copy is made.
    kept: dict[int, object] = {
        id(tensor): tensor
        for module in modules
        for tensor in _tensors(module)
        if not tensor.is_meta
    }
    for module in modules:
        tensors = list(_tensors(module))
        if tensors and not any(tensor.is_meta for tensor in tensors):
            kept[id(module)] = module
    modules = list(copy.deepcopy(nn.ModuleList(modules), kept))
    made: dict[int, Tensor] = {}
    with drawing(device), torch.no_grad():
        for index, module in zip(indices, modules, strict=True):
            seed_generators(device, stream_seed(seed, -1, index))
            if isinstance(module, TracedLayer):
                _fill_traced(module, device, made)
                continue
            for name, part in _children_first(module, traced.layers[index].name):
                _fill(part, name, device, made)
    return [module.to(device) for module in modules]


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _children_first(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield from _children_first(child, f"{name}.{child_name}")
    yield name, module


def _fill(part: nn.Module, name: str, device: torch.device, made: dict[int, Tensor]) -> None:
    """Give `part`'s own tensors memory and values; those that had values before, or share an
    earlier module's, keep them.
    """
    fresh: set[int] = set()
    for holder in (part._parameters, part._buffers):
        for key, tensor in holder.items():
            if tensor is None or not tensor.is_meta:
                continue
            if id(tensor) not in made:
                empty: Tensor = torch.empty_like(tensor, device=device)
                made[id(tensor)] = (
                    nn.Parameter(empty, tensor.requires_grad)
                    if isinstance(tensor, nn.Parameter)
                    else empty
                )
                fresh.add(id(made[id(tensor)]))
            holder[key] = made[id(tensor)]  # type: ignore[assignment]  # the dict's own kind goes back into it
    if not fresh:
        return
    reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
    if reset is None:
        raise ChainError(
            f"{name} ({type(part).__name__}) is on the meta device and has weights of its own, but no reset_parameters() "
            "to initialise them. Give the class one, or build the model on a real device"
        )
    # A head with a bias of its own and the embedding's weight, say: its reset draws both, and only
    # the bias is to be drawn.
    own = (*part._parameters.values(), *part._buffers.values())
    settled = [
        (tensor, tensor.clone()) for tensor in own if tensor is not None and id(tensor) not in fresh
    ]
    reset()
    for tensor, values in settled:
        tensor.copy_(values)


def _fill_traced(layer: TracedLayer, device: torch.device, made: dict[int, Tensor]) -> None:
    """The same for a layer of a traced model, whose modules are elsewhere."""
    held = {first: tensors[key] for first, (tensors, key) in layer.places.items()}
    wanted = {
        first: tensor for first, tensor in held.items() if tensor.is_meta and id(tensor) not in made
    }
    found = drawn(layer.variants.skeleton, layer.variants.names, wanted, device)
    made.update((id(wanted[first]), tensor) for first, tensor in found.items())
    for part in layer.modules():
        for holder in (part._parameters, part._buffers):
            for key, tensor in holder.items():
                if tensor is not None and tensor.is_meta:
                    holder[key] = made[id(tensor)]  # type: ignore[assignment]  # the dict's own kind goes back into it
