"""The state of an optimizer as tensors by name, for checkpoints.

For each name there is one entry for every parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.errors import SettingError

#: Keys of optimizer state that torch's own optimizers keep in the shape of the parameter. Listed,
#: because a shape does not tell: the step count of a parameter of one number has its shape too.
PARAMETER_SHAPED = frozenset(
    (
        "momentum_buffer",
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "exp_inf",
        "sum",
        "ax",
        "prev",
        "step_size",
    )
)
#: Prefix for the names of plain numbers. A checkpoint has them as tensors without dimensions;
#: loading makes numbers of them again.
_NUMBER_PREFIX = "plain/"


def optimizer_state(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter]
) -> dict[str, list[Tensor | None]]:
    """Return the state of an optimizer, for each name one entry per parameter.

    Raises:
        SettingError: the state has a value that is neither a tensor nor a number.
    """
    tensors: dict[str, list[Tensor | None]] = {}
    for i, parameter in enumerate(parameters):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors.setdefault(key, [None] * len(parameters))[i] = value
            elif isinstance(value, (int, float)):
                tensors.setdefault(_NUMBER_PREFIX + key, [None] * len(parameters))[i] = (
                    torch.tensor(float(value), dtype=torch.float64)
                )
            elif value is not None:
                raise SettingError(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} as {key!r}: a "
                    "checkpoint can hold tensors and plain numbers"
                )
    return tensors


def load_optimizer_state(
    optimizer: Optimizer,
    parameters: Sequence[nn.Parameter],
    state: Mapping[str, Sequence[Tensor | None]],
) -> None:
    """Replace the state of an optimizer.

    Args:
        optimizer: the optimizer.
        parameters: its parameters, in the order of the entries of `state`.
        state: result of `optimizer_state`.
    """
    counts_on_device: set[int] = set()
    for group in optimizer.param_groups:
        if group.get("capturable") or group.get("fused"):
            counts_on_device.update(map(id, group["params"]))
    for i, parameter in enumerate(parameters):
        parameter_state: dict[str, object] = {}
        for key, row in state.items():
            value = row[i]
            if value is None:
                continue
            if key.startswith(_NUMBER_PREFIX):
                parameter_state[key.removeprefix(_NUMBER_PREFIX)] = value.item()
            else:
                on_device = id(parameter) in counts_on_device
                device = state_device(value, parameter, counts_on_device=on_device)
                parameter_state[key] = value.detach().to(device, copy=True)
        optimizer.state.pop(parameter, None)
        if parameter_state:
            optimizer.state[parameter] = parameter_state


def state_device(value: Tensor, parameter: Tensor, *, counts_on_device: bool) -> torch.device:
    """Return the device for loaded state of a parameter.

    Step counters stay on the CPU, where optimizers keep them by default; tensors of the parameter's
    shape go to its device.

    Args:
        value: the state.
        parameter: the parameter.
        counts_on_device: whether the optimizer is one that keeps the counters there, too.
    """
    return parameter.device if value.dim() or counts_on_device else value.device
