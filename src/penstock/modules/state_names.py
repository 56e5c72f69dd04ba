"""Names of a layer's tensors in the `state_dict` of the whole model."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


def prefix_of(layer: str, module: nn.Module) -> str:
    """Return the prefix of the names in `module`.

    It is the name of the layer. A layer of a traced model has `whole_names`: it contains its
    tensors under their names in the model, so the prefix is empty.
    """
    return "" if getattr(module, "whole_names", False) else layer


def full_name(path: str, name: str) -> str:
    """Return the name in the model of an attribute of the module at `path`."""
    return f"{path}.{name}" if path else name


def state_of(layer: str, module: nn.Module) -> dict[str, Tensor]:
    """Return a layer's parameters and persistent buffers by name, not copied."""
    prefix = prefix_of(layer, module)
    entries = module.state_dict(prefix=f"{prefix}." if prefix else "")
    return {name: value for name, value in entries.items() if isinstance(value, Tensor)}


def parameters_of(layer: str, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield a layer's parameters with their names, each once."""
    return module.named_parameters(prefix_of(layer, module))
