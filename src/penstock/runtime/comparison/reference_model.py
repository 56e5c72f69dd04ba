"""Copy of the whole model on one device, with the current values of the stages."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from penstock.modules.hooks import copy_tensor_hooks, copy_weight_hooks
from penstock.modules.state_names import state_of
from penstock.stage import stage_state as state
from penstock.stage.stage_builder import Training
from penstock.tracing.materialise import materialise
from penstock.tracing.traced_chain import TracedChain


def reference_model(
    placed: state.Placed, values: Mapping[str, Tensor], training: Training, device: torch.device
) -> list[nn.Module]:
    """Copy the whole model to a device.

    Args:
        placed: the placement of the stages.
        values: parameters and buffers by name.
        training: how the model is trained.
        device: the device.

    Returns:
        The layers, with the hooks of the model's weights.
    """
    copied = tuple(copy.deepcopy(nn.ModuleList(placed.traced.modules)))
    copy_weight_hooks(placed.traced.modules, copied)
    _allocate_parameters(copied)
    # Initialises the tensors that are still on the meta device: the non-persistent buffers.
    modules = materialise(
        TracedChain(placed.traced.description, copied, placed.traced.aliases),
        range(len(copied)),
        device,
        seed=0,
    )
    layout = training.options.memory_format
    if layout is not None:
        modules = [
            module.to(memory_format=layout)  # type: ignore[call-overload]
            for module in modules
        ]
    with torch.no_grad():
        for layer, module in zip(placed.traced.layers, modules, strict=True):
            for name, target in state_of(layer.name, module).items():
                target.copy_(values[name])
    return modules


def _allocate_parameters(modules: Sequence[nn.Module]) -> None:
    """Replace parameters on the meta device by ones with memory; their values come later.

    A parameter that several modules use stays one parameter.
    """
    replacements: dict[int, nn.Parameter] = {}
    for module in modules:
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is None or not parameter.is_meta:
                    continue
                if id(parameter) not in replacements:
                    memory = torch.empty_like(parameter, device="cpu")
                    replacement = nn.Parameter(memory, parameter.requires_grad)
                    copy_tensor_hooks(parameter, replacement)
                    replacements[id(parameter)] = replacement
                part._parameters[name] = replacements[id(parameter)]
