"""State of optimizers and weight rules in the form of checkpoints.

It is keyed by the names of the parameters, and thus independent of the cut into stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.errors import SettingError
from penstock.modules.state_names import parameters_of
from penstock.optim.class_names import class_name
from penstock.optim.optimizer_state import state_device
from penstock.optim.stage_weights import StageWeights
from penstock.stage.stage import Stage
from penstock.values.sharded import copy_whole, whole


@dataclass(frozen=True)
class Facts:
    """The non-tensor optimizer state of one parameter.

    Attributes:
        options: the options of its parameter group.
        state: plain values of its optimizer state.
        group: the number of its group in the optimizer; None in checkpoints of schema 1.
        kind: the class name of the optimizer; None in checkpoints of schema 1.
    """

    options: dict[str, Any]
    state: dict[str, Any]
    group: int | None = None
    kind: str | None = None


def names_of(stage: Stage) -> dict[Tensor, str]:
    """Return the parameters that a stage's optimizer may have, with their first names.

    Frozen parameters are included.
    """
    names: dict[Tensor, str] = {}
    for layer in stage.layers:
        for name, parameter in parameters_of(layer.name, layer.module):
            names.setdefault(parameter, name)
    return {parameter: names[parameter] for parameter in stage.update.candidates}


def optimizer_state(stage: Stage, prefix: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state of a stage's optimizer.

    Args:
        stage: the stage.
        prefix: the prefix of all names.

    Returns:
        Tensors on the CPU by `<prefix>optimizer/<parameter>/<key>`; and by `<prefix><parameter>`
        the fields of `Facts`.

    Raises:
        SettingError: the optimizer keeps something else than tensors and plain values.
    """
    optimizer = stage.update.optimizer
    if optimizer is None:
        return {}, {}
    tensors: dict[str, Tensor] = {}
    facts: dict[str, Any] = {}
    names = names_of(stage)
    kind = class_name(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        options = _plain_options(group)
        for parameter in group["params"]:
            name = names[parameter]
            state, plain_state = _parameter_state(optimizer, parameter, name)
            for key, value in state.items():
                tensors[f"{prefix}optimizer/{name}/{key}"] = value
            facts[f"{prefix}{name}"] = {
                "options": options,
                "state": plain_state,
                "group": number,
                "kind": kind,
            }
    return tensors, facts


def _parameter_state(
    optimizer: Optimizer, parameter: Tensor, name: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors, copied to the CPU, and the plain values that belong to one parameter.

    Raises:
        SettingError: there is something else.
    """
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for key, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, Tensor):
            tensors[key] = whole(value).detach().to("cpu", copy=True).contiguous()
        elif _is_plain(value):
            plain[key] = value
        else:
            raise SettingError(
                f"{type(optimizer).__name__} keeps a {type(value).__name__} as {key!r} of "
                f"{name}: a checkpoint can hold tensors and plain numbers"
            )
    return tensors, plain


def restore_optimizer(
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Facts],
) -> None:
    """Restore the options and the state of an optimizer.

    Args:
        optimizer: the optimizer.
        names: the names of its parameters.
        tensors: the saved tensors, by `<parameter>/<key>`.
        facts: the saved non-tensor state, by parameter. A parameter without any gets no state.
    """
    saved_tensors: dict[str, dict[str, Tensor]] = {}
    for path, tensor in tensors.items():
        name, _, key = path.rpartition("/")
        saved_tensors.setdefault(name, {})[key] = tensor
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
            name = names[parameter]
            if name not in facts:
                continue
            _restore_options(group, facts[name].options)
            on_device = bool(group.get("capturable") or group.get("fused"))
            state: dict[str, Any] = dict(facts[name].state)
            for key, value in saved_tensors.get(name, {}).items():
                device = state_device(value, parameter, counts_on_device=on_device)
                state[key] = _copy_like(value, parameter, device)
            if state:
                optimizer.state[parameter] = state


def _copy_like(value: Tensor, parameter: Tensor, device: torch.device) -> Tensor:
    """Return a copy of saved state, with the strides of its parameter if it has its shape.

    A copy, since the optimizers of two copies of a stage in one process (ranks as threads) restore
    the same tensor, and update it in place. Files have no strides, but fused optimizers read
    parameter and state in the order of their memory, such as channels_last.
    """
    if value.shape != parameter.shape:
        return value.to(device, copy=True)
    copy = torch.empty_like(parameter, dtype=value.dtype, device=device, requires_grad=False)
    copy_whole(copy, value)
    return copy


def _plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group that are plain values, scalar tensors as numbers."""
    options = {}
    for key, value in group.items():
        option = value.item() if _is_scalar(value) else value
        if key != "params" and _is_plain(option):
            options[key] = option
    return options


def _restore_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Set those options of a parameter group that it has and that were saved."""
    # Tuples have become lists in JSON; optimizers accept both.
    for key in options.keys() & group.keys() - {"params"}:
        if _is_scalar(group[key]):
            group[key] = torch.full_like(group[key], options[key])
        else:
            group[key] = options[key]


def _is_scalar(value: object) -> bool:
    """Whether a value is a tensor without dimensions."""
    return isinstance(value, Tensor) and value.dim() == 0


def _is_plain(value: object) -> bool:
    """Whether a value is a number, a text, a flag or None, or a list of these."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def rule_state(stage: Stage, weights: StageWeights, prefix: str) -> dict[str, Tensor]:
    """Return the state of a stage's weight rule.

    Returns:
        Tensors by `<prefix>weights/<parameter>/<key>`, and numbers, as tensors, by
        `<prefix>weights/<key>`.
    """
    names = names_of(stage)
    tensors: dict[str, Tensor] = {}
    for key, row in weights.state().items():
        for parameter, tensor in zip(stage.update.parameters, row, strict=True):
            if tensor is not None:
                path = f"{prefix}weights/{names[parameter]}/{key}"
                tensors[path] = tensor.detach().to("cpu", copy=True).contiguous()
    for key, value in weights.facts().items():
        tensors[f"{prefix}weights/{key}"] = torch.tensor(value, dtype=torch.float64)
    return tensors


def restore_rule(stage: Stage, weights: StageWeights, tensors: Mapping[str, Tensor]) -> None:
    """Restore the state of a stage's weight rule.

    Args:
        stage: the stage.
        weights: its weight rule. A rule ignores keys that it does not have.
        tensors: the result of `rule_state` by names without `<prefix>weights/`.
    """
    names = names_of(stage)
    rows: dict[str, list[Tensor | None]] = {}
    for place, parameter in enumerate(stage.update.parameters):
        for path, tensor in tensors.items():
            name, _, key = path.rpartition("/")
            if name == names[parameter]:
                row = rows.setdefault(key, [None] * len(stage.update.parameters))
                row[place] = _copy_like(tensor, parameter, parameter.device)
    weights.load_state(rows)
    weights.load_facts({key: float(value) for key, value in tensors.items() if "/" not in key})
