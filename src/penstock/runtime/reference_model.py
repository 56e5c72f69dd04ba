"""The whole model on one device, with the values that the stages have: what a pipeline is compared
with.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from penstock.runtime import state
from penstock.runtime.stage_builder import Training
from penstock.tracing.chain import TracedChain
from penstock.tracing.hooks import copy_tensor_hooks, copy_weight_hooks
from penstock.tracing.materialise import materialise
from penstock.tracing.names import state_of


def reference_model(
    placed: state.Placed, values: Mapping[str, Tensor], training: Training, device: torch.device
) -> list[nn.Module]:
    """A copy of the whole model on a device with these values."""
    copied = tuple(copy.deepcopy(nn.ModuleList(placed.traced.modules)))
    copy_weight_hooks(placed.traced.modules, copied)
    _give_memory(copied)
    # What is still on the meta device is initialised, for the buffers that no state has.
    modules = materialise(
        TracedChain(placed.traced.description, copied, placed.traced.aliases),
        range(len(copied)),
        device,
        seed=0,
    )
    layout = training.options.memory_format
    if layout is not None:
        modules = [module.to(memory_format=layout) for module in modules]  # type: ignore[call-overload]
    with torch.no_grad():
        for layer, module in zip(placed.traced.layers, modules, strict=True):
            module.zero_grad()
            for name, target in state_of(layer.name, module).items():
                target.copy_(values[name])
    return modules


def _give_memory(modules: Sequence[nn.Module]) -> None:
    """Real parameters for those on the meta device: all get their values from the state."""
    made: dict[int, nn.Parameter] = {}
    for part in (part for module in modules for part in module.modules()):
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(
                        torch.empty_like(parameter, device="cpu"), parameter.requires_grad
                    )
                    copy_tensor_hooks(parameter, made[id(parameter)])
                part._parameters[name] = made[id(parameter)]
