"""Check that the state of an optimizer can be written to a checkpoint, before writing starts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.errors import SettingError
from penstock.values.sharded import is_sharded

#: Attributes of every torch optimizer.
_COMMON = ("param_groups", "defaults", "state")


def check_optimizer(optimizer: Optimizer) -> None:
    """Reject an optimizer with state outside of `.state`, or with state that cannot be written.

    Raises:
        SettingError: there is such state; the message names it.
    """
    name = type(optimizer).__name__
    parameters = {
        id(parameter) for group in optimizer.param_groups for parameter in group["params"]
    }
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        raise SettingError(
            "a checkpoint cannot hold the state of a ZeroRedundancyOptimizer: it is divided over "
            "the ranks, and lies in another optimizer. Give optimizer= the class that it divides, "
            "such as torch.optim.Adam, or save the weights alone, by pipe.state_dict()"
        )
    _check_attributes(optimizer, parameters)
    for key, state in optimizer.state.items():
        if not isinstance(key, Tensor) or id(key) not in parameters:
            entry = f"the key {key!r}" if not isinstance(key, Tensor) else "a tensor"
            raise SettingError(
                f"a checkpoint cannot hold the state of {name}: {name}.state has {entry}, which is "
                "no parameter of its groups. Store state by parameter, or save the weights alone, "
                "by pipe.state_dict()"
            )
        _check_tensors(name, state, shared=is_sharded(key))
    _check_overridden_state_dict(optimizer)


def _check_attributes(optimizer: Optimizer, parameters: set[int]) -> None:
    """Reject state in attributes of the optimizer: another optimizer, or tensors.

    Args:
        optimizer: the optimizer.
        parameters: ids of its parameters, which may be in attributes.
    """
    name = type(optimizer).__name__
    # 8-bit optimizers have tables of constants in attributes; their state is in `.state`.
    constants = any(kind.__module__.startswith("bitsandbytes") for kind in type(optimizer).__mro__)
    for attribute, value in vars(optimizer).items():
        # torch keeps the hooks of an optimizer under this prefix.
        if attribute in _COMMON or attribute.startswith("_optimizer_"):
            continue
        if _has_other_optimizer(value, optimizer):
            raise SettingError(
                f"a checkpoint cannot hold the state of {name}: part of it lies in another "
                f"optimizer, the {type(_first_optimizer(value)).__name__} in its attribute "
                f"{attribute!r}, and not in {name}.state. Give optimizer= an optimizer that stores "
                "all of its state itself, or save the weights alone, by pipe.state_dict()"
            )
        if not constants and any(
            isinstance(item, Tensor) and id(item) not in parameters for item in _items(value)
        ):
            raise SettingError(
                f"a checkpoint cannot hold the state of {name}: it keeps tensors in its attribute "
                f"{attribute!r}, and not in {name}.state[parameter]. Store them there, or save the "
                "weights alone, by pipe.state_dict()"
            )


def _check_tensors(name: str, state: Any, *, shared: bool) -> None:
    """Reject sparse tensors and tensor subclasses (quantised), which files cannot hold.

    Args:
        name: class of the optimizer.
        state: state of one parameter.
        shared: whether processes share the parameter; its state is then shared alike.
    """
    for key, value in state.items() if hasattr(state, "items") else ():
        if not isinstance(value, Tensor) or (shared and is_sharded(value)):
            continue
        if shared and value.dim():
            raise SettingError(
                f"a checkpoint cannot hold the state of {name}: {key!r} of a parameter that "
                "processes share is of this process alone. Use an optimizer whose state has the "
                "form of the parameter, such as torch.optim.AdamW, or save the weights alone, by "
                "pipe.state_dict()"
            )
        is_dense = value.layout is torch.strided
        if type(value) not in (Tensor, nn.Parameter) or not is_dense:
            kind = type(value).__name__ if is_dense else f"{value.layout} tensor"
            raise SettingError(
                f"a checkpoint cannot hold the state of {name}: it keeps a {kind} as {key!r}; a "
                "file can hold dense tensors of torch's own class"
            )


def _check_overridden_state_dict(optimizer: Optimizer) -> None:
    """Reject an overridden `state_dict` that returns anything besides `.state` and the groups."""
    if getattr(type(optimizer), "state_dict", None) in (None, Optimizer.state_dict):
        return
    name = type(optimizer).__name__
    try:
        state_dict = optimizer.state_dict()
        extra_keys = sorted(map(str, state_dict.keys() - {"state", "param_groups"}))
        entries = len(state_dict.get("state", {}))
    # It is code of the user, which may raise anything.
    except Exception as error:
        raise SettingError(
            f"a checkpoint cannot hold the state of {name}: its own state_dict() failed with "
            f"{error!r}"
        ) from error
    if extra_keys or entries != len(optimizer.state):
        difference = (
            f"has {', '.join(extra_keys)} besides"
            if extra_keys
            else f"has {entries} entries of state, where {name}.state has {len(optimizer.state)}"
        )
        raise SettingError(
            f"a checkpoint cannot hold the state of {name}: its own state_dict() {difference}. "
            f"Give optimizer= an optimizer whose state is in {name}.state, or save the weights "
            "alone, by pipe.state_dict()"
        )


def _has_other_optimizer(value: object, optimizer: Optimizer) -> bool:
    """Return whether an attribute has another optimizer, which does not share the state."""
    inner = _first_optimizer(value)
    return inner is not None and inner is not optimizer and inner.state is not optimizer.state


def _first_optimizer(value: object) -> Any:
    """Return the first optimizer in the value of an attribute, None if there is none."""
    return next((item for item in _items(value) if isinstance(item, Optimizer)), None)


def _items(value: object) -> Iterable[object]:
    """Return the items of a list, tuple or dict, or the value itself."""
    if isinstance(value, (list, tuple)):
        return value
    return value.values() if isinstance(value, dict) else (value,)
