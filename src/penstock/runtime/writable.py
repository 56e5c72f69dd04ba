"""Whether a checkpoint can hold an optimizer's state: what it cannot write, it refuses before
anything is written.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.errors import SettingError

#: What every torch optimizer has besides its state.
_COMMON = ("param_groups", "defaults", "state")


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer that keeps anything outside of `.state`, or something there that no file
    can hold.

    Raises:
        SettingError: it does; the message says what and where.
    """
    name = type(optimizer).__name__
    parameters = {
        id(parameter) for group in optimizer.param_groups for parameter in group["params"]
    }
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        raise SettingError(
            "a checkpoint cannot hold the state of a ZeroRedundancyOptimizer: it is divided over the ranks, and lies in "
            "another optimizer. Give optimizer= the class that it divides, such as torch.optim.Adam, or save the weights "
            "alone, by pipe.state_dict()"
        )
    # 8-bit optimizers have tables of constants there, and their state where it should be.
    constants = any(kind.__module__.startswith("bitsandbytes") for kind in type(optimizer).__mro__)
    for attribute, value in vars(optimizer).items():
        if attribute in _COMMON or attribute.startswith("_optimizer_"):
            continue
        if _is_another(value, optimizer):
            raise SettingError(
                f"a checkpoint cannot hold the state of {name}: part of it lies in another optimizer, the "
                f"{type(_first(value)).__name__} in its attribute {attribute!r}, and not in {name}.state. Give optimizer= an "
                "optimizer that keeps all of its state itself, or save the weights alone, by pipe.state_dict()"
            )
        if not constants and any(
            isinstance(item, Tensor) and id(item) not in parameters for item in _items(value)
        ):
            raise SettingError(
                f"a checkpoint cannot hold the state of {name}: it keeps tensors in its attribute {attribute!r}, and not in "
                f"{name}.state[parameter]. Keep them there, or save the weights alone, by pipe.state_dict()"
            )
    for key, held in optimizer.state.items():
        if not isinstance(key, Tensor) or id(key) not in parameters:
            what = f"the key {key!r}" if not isinstance(key, Tensor) else "a tensor"
            raise SettingError(
                f"a checkpoint cannot hold the state of {name}: {name}.state has {what}, which is no parameter of its groups. "
                "Keep state by parameter, or save the weights alone, by pipe.state_dict()"
            )
        _check_tensors(name, held)
    _check_own_state_dict(optimizer)


def _check_tensors(name: str, held: Any) -> None:
    """Tensors of a class of their own (quantised, sharded) and sparse ones would be written as
    something else.
    """
    for key, value in held.items() if hasattr(held, "items") else ():
        if isinstance(value, Tensor) and (
            type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided
        ):
            what = (
                type(value).__name__ if value.layout is torch.strided else f"{value.layout} tensor"
            )
            raise SettingError(
                f"a checkpoint cannot hold the state of {name}: it keeps a {what} as {key!r}; a file can hold dense tensors of "
                "torch's own class"
            )


def _check_own_state_dict(optimizer: Optimizer) -> None:
    """Where the class has a `state_dict` of its own, it must give what `.state` and the groups
    have, and nothing else.
    """
    if getattr(type(optimizer), "state_dict", None) in (None, Optimizer.state_dict):
        return
    name = type(optimizer).__name__
    try:
        whole = optimizer.state_dict()
        more = sorted(map(str, whole.keys() - {"state", "param_groups"}))
        entries = len(whole.get("state", {}))
    except Exception as error:
        raise SettingError(
            f"a checkpoint cannot hold the state of {name}: its own state_dict() failed with {error!r}"
        ) from error
    if more or entries != len(optimizer.state):
        what = (
            f"has {', '.join(more)} besides"
            if more
            else f"has {entries} entries of state, where {name}.state has {len(optimizer.state)}"
        )
        raise SettingError(
            f"a checkpoint cannot hold the state of {name}: its own state_dict() {what}. Give optimizer= an optimizer whose "
            f"state is in {name}.state, or save the weights alone, by pipe.state_dict()"
        )


def _is_another(value: object, optimizer: Optimizer) -> bool:
    inner = _first(value)
    return inner is not None and inner is not optimizer and inner.state is not optimizer.state


def _first(value: object) -> Any:
    """The first optimizer in an attribute, if there is one."""
    return next((item for item in _items(value) if isinstance(item, Optimizer)), None)


def _items(value: object) -> Iterable[object]:
    if isinstance(value, (list, tuple)):
        return value
    return value.values() if isinstance(value, dict) else (value,)
