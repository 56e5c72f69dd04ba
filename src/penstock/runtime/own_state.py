"""What a stage keeps besides its weights, as a checkpoint has it: by parameters' names, whatever
the cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.errors import SettingError
from penstock.optim.class_names import class_name
from penstock.optim.stage_weights import StageWeights
from penstock.runtime.stage import Stage
from penstock.tracing.names import parameters_of


@dataclass(frozen=True)
class Facts:
    """Of one parameter: the options of its group, and what its optimizer keeps besides tensors.

    `group` is the place of that group in the optimizer that wrote it, `kind` the name of the
    optimizer's class; checkpoints of schema 1 have neither.
    """

    options: dict[str, Any]
    state: dict[str, Any]
    group: int | None = None
    kind: str | None = None


def names_of(stage: Stage) -> dict[Tensor, str]:
    """The parameters that the stage's optimizer may have, frozen ones too, by their first name."""
    names: dict[Tensor, str] = {}
    for layer in stage.layers:
        for name, parameter in parameters_of(layer.name, layer.module):
            names.setdefault(parameter, name)
    return {parameter: names[parameter] for parameter in stage.update.candidates}


def optimizer_state(stage: Stage, prefix: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by `<prefix>optimizer/<parameter>/<key>`; by parameter, plain state and the options
    of its group.
    """
    optimizer = stage.update.optimizer
    if optimizer is None:
        return {}, {}
    tensors: dict[str, Tensor] = {}
    facts: dict[str, Any] = {}
    names = names_of(stage)
    kind = class_name(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        options = {
            key: value.item() if _is_number(value) else value
            for key, value in group.items()
            if key != "params"
        }
        options = {key: value for key, value in options.items() if _plain(value)}
        for parameter in group["params"]:
            name = names[parameter]
            kept: dict[str, Any] = {}
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{prefix}optimizer/{name}/{key}"] = (
                        value.detach().cpu().contiguous().clone()
                    )
                elif _plain(value):
                    kept[key] = value
                else:
                    raise SettingError(
                        f"{type(optimizer).__name__} keeps a {type(value).__name__} as {key!r} of {name}: a "
                        "checkpoint can hold tensors and plain numbers"
                    )
            facts[f"{prefix}{name}"] = {
                "options": options,
                "state": kept,
                "group": number,
                "kind": kind,
            }
    return tensors, facts


def restore_optimizer(
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Facts],
) -> None:
    """Options and state as they were saved, tensors by `<parameter>/<key>`; a parameter that had no
    state then has none.
    """
    kept: dict[str, dict[str, Tensor]] = {}
    for path, tensor in tensors.items():
        name, _, key = path.rpartition("/")
        kept.setdefault(name, {})[key] = tensor
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
            found = facts.get(names[parameter])
            if found is None:
                continue
            # Lists stand where tuples were; an optimizer reads both alike.
            for key in found.options.keys() & group.keys() - {"params"}:
                group[key] = (
                    torch.full_like(group[key], found.options[key])
                    if _is_number(group[key])
                    else found.options[key]
                )
            on_device = group.get("capturable") or group.get("fused")
            held: dict[str, Any] = dict(found.state)
            for key, value in kept.get(names[parameter], {}).items():
                # Counters stay on the CPU, where optimizers keep them; everything shaped like the
                # parameter goes with it.
                held[key] = value.to(parameter.device) if value.dim() or on_device else value
            if held:
                optimizer.state[parameter] = held


def _is_number(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def rule_state(stage: Stage, weights: StageWeights, prefix: str) -> dict[str, Tensor]:
    """Tensors of a stage's weight rule by `<prefix>weights/<parameter>/<key>`; plain numbers by
    `<prefix>weights/facts/<key>`.
    """
    names = names_of(stage)
    tensors = {
        f"{prefix}weights/{names[parameter]}/{key}": tensor.detach().cpu().contiguous().clone()
        for key, row in weights.state().items()
        for parameter, tensor in zip(stage.update.parameters, row, strict=True)
        if tensor is not None
    }
    return tensors | {
        f"{prefix}weights/{key}": torch.tensor(value, dtype=torch.float64)
        for key, value in weights.facts().items()
    }


def restore_rule(stage: Stage, weights: StageWeights, tensors: Mapping[str, Tensor]) -> None:
    """What `rule_state` gave, without its prefix. Of a rule that keeps other things nothing is
    found, and it begins anew.
    """
    names = names_of(stage)
    rows: dict[str, list[Tensor | None]] = {}
    for place, parameter in enumerate(stage.update.parameters):
        for path, tensor in tensors.items():
            name, _, key = path.rpartition("/")
            if name == names[parameter]:
                row = rows.setdefault(key, [None] * len(stage.update.parameters))
                row[place] = tensor.to(parameter.device)
    weights.load_state(rows)
    weights.load_facts({key: float(value) for key, value in tensors.items() if "/" not in key})
