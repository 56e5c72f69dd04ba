"""Parameter groups of several stages' optimizers, read and written like those of one optimizer."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.errors import SettingError


@final
class ParameterGroup(MutableMapping[str, Any]):
    """A parameter group of all local stages: reads that of the first stage, writes to all.

    A number written to an option that is a tensor, such as `lr` with `capturable=True`, is written
    into the tensor.
    """

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self._groups = groups

    def __getitem__(self, key: str) -> Any:
        if key == "params":
            return [parameter for group in self._groups for parameter in group["params"]]
        return self._groups[0][key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":
            raise SettingError(
                "the parameters of a group belong to the stages and cannot be replaced: make a new "
                "Pipeline"
            )
        for group in self._groups:
            _set(group, key, value)

    def __delitem__(self, key: str) -> None:
        for group in self._groups:
            del group[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups[0])

    def __len__(self) -> int:
        return len(self._groups[0])

    def __repr__(self) -> str:
        options = {key: value for key, value in self.items() if key != "params"}
        return f"ParameterGroup({options})"


def parameter_groups_of(optimizers: Sequence[Optimizer]) -> list[ParameterGroup]:
    """Return the parameter groups that all these optimizers have in common.

    Raises:
        SettingError: they have different numbers of groups.
    """
    counts = sorted({len(optimizer.param_groups) for optimizer in optimizers})
    if len(counts) > 1:
        raise SettingError(
            f"the stages' optimizers have {' and '.join(map(str, counts))} parameter groups, so "
            "their groups do not correspond: give the groups by parameter_groups=, which makes the "
            "same ones on every stage"
        )
    columns = zip(*(optimizer.param_groups for optimizer in optimizers), strict=True)
    return [ParameterGroup(list(column)) for column in columns]


def set_learning_rates(groups: Sequence[ParameterGroup], rates: float | Sequence[float]) -> None:
    """Set `lr` of all groups to one value, or to one value for each group.

    Raises:
        SettingError: there is not one learning rate for each group, one is negative or not finite,
            or a group has none.
    """
    rate_by_group = list(rates) if isinstance(rates, Sequence) else [rates] * len(groups)
    if len(rate_by_group) != len(groups):
        raise SettingError(
            f"{len(rate_by_group)} learning rates for {len(groups)} parameter groups"
        )
    for rate in rate_by_group:
        if not 0 <= float(rate) < float("inf"):
            raise SettingError(f"a learning rate is 0 or above and finite, not {rate}")
    if any("lr" not in group for group in groups):
        raise SettingError("the optimizer has no option lr: set its own by pipe.param_groups")
    for group, rate in zip(groups, rate_by_group, strict=True):
        group["lr"] = rate


def separate_tensors(optimizers: Sequence[Optimizer]) -> None:
    """Clone options that are tensors and shared by several optimizers.

    Otherwise a scheduler for each of them would change the tensor once for every stage.
    """
    owners: dict[int, Optimizer] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for key, value in group.items():
                is_tensor = isinstance(value, Tensor)
                if is_tensor and owners.setdefault(id(value), optimizer) is not optimizer:
                    group[key] = value.clone()


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    """Set an option of a group; a tensor keeps its memory, which others may read."""
    current = group.get(key)
    if not isinstance(current, Tensor):
        group[key] = value.clone() if isinstance(value, Tensor) else value
    else:
        with torch.no_grad():
            current.copy_(torch.as_tensor(value))
