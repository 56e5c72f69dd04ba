"""The state of an optimizer as tensors by name, one entry for every parameter: what a checkpoint
takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.errors import SettingError

#: Before the name of what an optimizer keeps as a plain number: it becomes a tensor of no
#: dimensions, and a number again.
_PLAIN = "plain/"


def optimizer_state(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter]
) -> dict[str, list[Tensor | None]]:
    """All that it keeps.

    Raises:
        SettingError: it keeps something that is neither tensor nor plain number.
    """
    found: dict[str, list[Tensor | None]] = {}
    for i, parameter in enumerate(parameters):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found.setdefault(key, [None] * len(parameters))[i] = value
            elif isinstance(value, (int, float)):
                found.setdefault(_PLAIN + key, [None] * len(parameters))[i] = torch.tensor(
                    float(value), dtype=torch.float64
                )
            elif value is not None:
                raise SettingError(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} as {key!r}: a checkpoint can hold tensors "
                    "and plain numbers"
                )
    return found


def load_optimizer_state(
    optimizer: Optimizer,
    parameters: Sequence[nn.Parameter],
    state: Mapping[str, Sequence[Tensor | None]],
) -> None:
    """Let it keep this, and nothing else."""
    on_device = {
        p: group.get("capturable") or group.get("fused")
        for group in optimizer.param_groups
        for p in group["params"]
    }
    for i, parameter in enumerate(parameters):
        held: dict[str, object] = {}
        for key, row in state.items():
            value = row[i]
            if value is None:
                continue
            if key.startswith(_PLAIN):
                held[key.removeprefix(_PLAIN)] = value.item()
            else:
                # Counters stay on the CPU, where optimizers keep them; everything shaped like the
                # parameter goes with it.
                goes = value.dim() or on_device.get(parameter)
                held[key] = value.detach().to(parameter.device if goes else value.device, copy=True)
        optimizer.state.pop(parameter, None)
        if held:
            optimizer.state[parameter] = held
