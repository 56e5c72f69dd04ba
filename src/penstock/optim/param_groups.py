"""Parameter groups of the optimizers of several stages, read and written as those of one optimizer."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.errors import SettingError


@final
class ParameterGroup(MutableMapping[str, Any]):
    """One parameter group of every stage that is held here: reading asks the first one, writing
    changes all.

    A number written to an option that is a tensor, such as `lr` with `capturable=True`, goes into
    the tensor.
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
                "the parameters of a group belong to the stages and cannot be replaced: make a new Pipeline"
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
    """The groups that all of these optimizers have.

    Raises:
        SettingError: they have different numbers of groups.
    """
    counts = sorted({len(optimizer.param_groups) for optimizer in optimizers})
    if len(counts) > 1:
        raise SettingError(
            f"the stages' optimizers have {' and '.join(map(str, counts))} parameter groups, so a group of one is none of "
            "another: give the groups by parameter_groups=, which makes the same ones on every stage"
        )
    columns = zip(*(optimizer.param_groups for optimizer in optimizers), strict=True)
    return [ParameterGroup(list(column)) for column in columns]


def set_learning_rates(groups: Sequence[ParameterGroup], rates: float | Sequence[float]) -> None:
    """Set `lr`, of all groups, or one for each.

    Raises:
        SettingError: there is not one learning rate for each group, one is below 0 or not finite,
        or a group has none.
    """
    each = list(rates) if isinstance(rates, Sequence) else [rates] * len(groups)
    if len(each) != len(groups):
        raise SettingError(f"{len(each)} learning rates for {len(groups)} parameter groups")
    for rate in each:
        if not 0 <= float(rate) < float("inf"):
            raise SettingError(f"a learning rate is 0 or above and finite, not {rate}")
    if any("lr" not in group for group in groups):
        raise SettingError("the optimizer has no option lr: set its own by pipe.param_groups")
    for group, rate in zip(groups, each, strict=True):
        group["lr"] = rate


def separate_tensors(optimizers: Sequence[Optimizer]) -> None:
    """Let no two optimizers share an option that is a tensor: a scheduler for each would change it
    once for every stage.
    """
    seen: dict[int, Optimizer] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for key, value in group.items():
                if not isinstance(value, Tensor):
                    continue
                if seen.setdefault(id(value), optimizer) is not optimizer:
                    group[key] = value.clone()


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    current = group.get(key)
    if not isinstance(current, Tensor):
        group[key] = value.clone() if isinstance(value, Tensor) else value
    elif current is not value:
        with torch.no_grad():
            current.copy_(torch.as_tensor(value))
