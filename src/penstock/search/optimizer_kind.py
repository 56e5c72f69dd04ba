"""What an optimizer is called and how much it keeps, from a name, a number, an optimizer, or what
makes one.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from penstock.errors import SettingError

#: Numbers that torch's optimizers keep for each parameter, as they are by default: (name of the
#: class, numbers).
_STATES: Final[Mapping[str, tuple[str, float]]] = {
    "sgd": ("SGD", 0.0),
    "momentum": ("SGD", 1.0),
    "nesterov": ("SGD", 1.0),
    "adam": ("Adam", 2.0),
    "adamw": ("AdamW", 2.0),
    "nadam": ("NAdam", 2.0),
    "radam": ("RAdam", 2.0),
    "adamax": ("Adamax", 2.0),
    "sparseadam": ("SparseAdam", 2.0),
    "adagrad": ("Adagrad", 1.0),
    "adadelta": ("Adadelta", 2.0),
    "rmsprop": ("RMSprop", 1.0),
    "rprop": ("Rprop", 2.0),
    "asgd": ("ASGD", 1.0),
    "muon": ("Muon", 1.0),
}

#: Options that make torch's optimizers keep one number more.
_MORE: Final[Mapping[str, tuple[str, ...]]] = {
    "SGD": ("momentum",),
    "Adam": ("amsgrad",),
    "AdamW": ("amsgrad",),
    "RMSprop": ("momentum", "centered"),
}

#: Rows and columns of the parameter by which a factory's optimizer is measured.
_SIDE: Final = 256


@final
@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer as planners know it.

    Attributes:
        name: of torch's class, where it is one of torch's or next of kin to; else of its own. Empty
        where only a number is known. states: numbers that it keeps for each parameter, in the
        parameter's own precision.
    """

    name: str
    states: float


def optimizer_kind(optimizer: object) -> OptimizerKind:
    """What is known of an optimizer.

    Args:
        optimizer: a name ("sgd", "momentum", "adam", "AdamW"); the numbers that it keeps for each
        parameter; an optimizer of torch's;
            or a function from parameters to one, which is called once, for one small parameter of
            its own.

    Raises:
        SettingError: there is no such name, or the numbers cannot be known.
    """
    if isinstance(optimizer, str):
        return _named(optimizer)
    if isinstance(optimizer, (int, float)) and not isinstance(optimizer, bool):
        if not 0 <= optimizer < float("inf"):
            raise SettingError(
                f"optimizer={optimizer!r} is how many numbers it keeps for each parameter: 0 or more"
            )
        return OptimizerKind("", float(optimizer))
    if _is_optimizer(optimizer):
        return _of_instance(optimizer)
    if callable(optimizer):
        return _of_factory(optimizer)
    raise SettingError(
        f"optimizer is a name, a number of states, an optimizer or a function that makes one, not {type(optimizer).__name__}"
    )


def _named(name: str) -> OptimizerKind:
    known = _STATES.get(name.lower())
    if known is None:
        close = difflib.get_close_matches(name.lower(), _STATES, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise SettingError(
            f"how much memory optimizer {name!r} takes is not known.{hint} Known: {', '.join(_STATES)}; or give how many numbers it keeps "
            "for each parameter, such as optimizer=2, or the function that makes it"
        )
    return OptimizerKind(*known)


def _is_optimizer(value: object) -> bool:
    return not isinstance(value, type) and all(
        hasattr(value, name) for name in ("param_groups", "state", "defaults", "step")
    )


def _class_name(optimizer: Any) -> str:
    """The name of torch's class that an optimizer is one of, or the next of kin to; else of its own
    class.
    """
    kinds = (
        kind.__name__
        for kind in type(optimizer).__mro__
        if kind.__module__.startswith("torch.optim.") and kind.__name__ != "Optimizer"
    )
    return next(kinds, type(optimizer).__name__)


def _of_instance(optimizer: Any) -> OptimizerKind:
    """By what it holds, if it has stepped; else by its class and options."""
    name = _class_name(optimizer)
    weights = sum(parameter.nbytes for parameter in optimizer.state)
    if weights:
        return OptimizerKind(name, _rounded(_held_bytes(optimizer) / weights))
    if name.lower() not in _STATES:
        raise SettingError(
            f"how much memory {name} takes is not known before it has stepped: give how many numbers it keeps for each parameter, such as "
            "optimizer=2, or the function that makes it"
        )
    _, states = _STATES[name.lower()]
    for option in _MORE.get(name, ()):
        states += bool(max((group.get(option) or 0 for group in optimizer.param_groups), default=0))
    return OptimizerKind(name, states)


def _of_factory(make: Callable[..., Any]) -> OptimizerKind:
    """By one step of an optimizer over a parameter of its own. Who has such a function has loaded
    torch, which planning does not.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        raise SettingError(
            "optimizer is a function, and torch is not loaded, so that it cannot make an optimizer of torch's: give a name, such as "
            "optimizer='adam', or how many numbers it keeps for each parameter"
        )
    parameter = torch.nn.Parameter(torch.zeros(_SIDE, _SIDE))
    try:
        optimizer = make([parameter])
        parameter.grad = torch.zeros_like(parameter)
        if "Sparse" in type(optimizer).__name__:
            parameter.grad = parameter.grad.to_sparse()
        optimizer.step()
    except Exception as error:
        raise SettingError(
            f"the function given as optimizer= could not make and step an optimizer over one parameter ({type(error).__name__}: {error}): "
            "give a name, such as optimizer='adam', or how many numbers it keeps for each parameter"
        ) from error
    if not _is_optimizer(optimizer):
        raise SettingError(
            f"the function given as optimizer= returned {type(optimizer).__name__}, which is no optimizer of torch's"
        )
    return OptimizerKind(
        _class_name(optimizer), _rounded(_held_bytes(optimizer) / parameter.nbytes)
    )


def _held_bytes(optimizer: Any) -> int:
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if hasattr(value, "nbytes")
    )


def _rounded(states: float) -> float:
    """Without what does not grow with the parameter, such as a count of steps."""
    return round(states, 2)
