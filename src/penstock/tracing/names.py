"""What the tensors of a layer are called in the whole model's `state_dict`."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


def prefix_of(layer: str, module: nn.Module) -> str:
    """What the names in `module` are preceded by: the layer's own name, or nothing where the module
    was cut out of a traced model and has `whole_names`, under which its tensors stand in it as they
    do in the model.
    """
    return "" if getattr(module, "whole_names", False) else layer


def state_of(layer: str, module: nn.Module) -> dict[str, Tensor]:
    """A layer's parameters and persistent buffers, live."""
    prefix = prefix_of(layer, module)
    held = module.state_dict(prefix=f"{prefix}." if prefix else "")
    return {name: value for name, value in held.items() if isinstance(value, Tensor)}


def parameters_of(layer: str, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """A layer's parameters, each once."""
    return module.named_parameters(prefix_of(layer, module))
