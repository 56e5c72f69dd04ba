"""Identify an optimizer and its memory, from a name, a number, an optimizer, or a factory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from penstock.errors import SettingError, did_you_mean

#: Names of torch's optimizers: (name of the class, numbers that it keeps per parameter with its
#: default options).
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

#: Options that each make torch's optimizers keep one more number per parameter.
_EXTRA_STATE_OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "SGD": ("momentum",),
    "Adam": ("amsgrad",),
    "AdamW": ("amsgrad",),
    "RMSprop": ("momentum", "centered"),
}

#: Rows and columns of the parameter with which the optimizer of a factory is measured.
_SIDE: Final = 256


@final
@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer as planners know it.

    Attributes:
        name: of its torch class or nearest torch base class, or else of its own class. Empty if
            only a number is known.
        states: numbers that it keeps per parameter, in the precision of the parameter.
        fused: whether its step is one kernel, which is several times as fast on a CPU.
    """

    name: str
    states: float
    fused: bool = False


def optimizer_kind(optimizer: object) -> OptimizerKind:
    """Return the name of an optimizer and the numbers that it keeps per parameter.

    Args:
        optimizer: a name ("sgd", "momentum", "adam", "AdamW"); the count of numbers that it keeps
            per parameter; a torch optimizer; or a function from parameters to an optimizer, which
            is called once, with one small parameter.

    Raises:
        SettingError: there is no such name, or the numbers cannot be determined.
    """
    if isinstance(optimizer, str):
        return _named(optimizer)
    if isinstance(optimizer, (int, float)) and not isinstance(optimizer, bool):
        if not 0 <= optimizer < float("inf"):
            raise SettingError(
                f"optimizer={optimizer!r} is how many numbers it keeps for each parameter: it must "
                "be 0 or more"
            )
        return OptimizerKind("", float(optimizer))
    if _is_optimizer(optimizer):
        return _of_instance(optimizer)
    if callable(optimizer):
        return _of_factory(optimizer)
    raise SettingError(
        "optimizer is a name, a number of states, an optimizer or a function that makes one, not "
        f"{type(optimizer).__name__}"
    )


def _named(name: str) -> OptimizerKind:
    """Return the kind of an optimizer from its name, in upper or lower case."""
    class_and_states = _STATES.get(name.lower())
    if class_and_states is None:
        hint = did_you_mean(name.lower(), _STATES)
        raise SettingError(
            f"how much memory optimizer {name!r} takes is not known.{hint} Known: "
            f"{', '.join(_STATES)}; or give how many numbers it keeps for each parameter, such as "
            "optimizer=2, or the function that makes it"
        )
    return OptimizerKind(*class_and_states)


def _is_optimizer(value: object) -> bool:
    """Return whether a value has the attributes of a torch optimizer; torch is not imported."""
    return not isinstance(value, type) and all(
        hasattr(value, name) for name in ("param_groups", "state", "defaults", "step")
    )


def _class_name(optimizer: Any) -> str:
    """Return the name of an optimizer's torch class or nearest torch base class, or else of its own
    class.
    """
    kinds = (
        kind.__name__
        for kind in type(optimizer).__mro__
        if kind.__module__.startswith("torch.optim.") and kind.__name__ != "Optimizer"
    )
    return next(kinds, type(optimizer).__name__)


def _of_instance(optimizer: Any) -> OptimizerKind:
    """Return the kind of an optimizer, from its states if it has stepped, else from its class and
    options.
    """
    name = _class_name(optimizer)
    fused = any(group.get("fused") for group in optimizer.param_groups)
    weights = sum(parameter.nbytes for parameter in optimizer.state)
    if weights:
        return OptimizerKind(name, _rounded(_state_bytes(optimizer) / weights), fused)
    if name.lower() not in _STATES:
        raise SettingError(
            f"how much memory {name} takes is not known before it has stepped: give how many "
            "numbers it keeps for each parameter, such as optimizer=2, or the function that makes "
            "it"
        )
    _, states = _STATES[name.lower()]
    for option in _EXTRA_STATE_OPTIONS.get(name, ()):
        values = [group.get(option) or 0 for group in optimizer.param_groups]
        states += bool(max(values, default=0))
    return OptimizerKind(name, states, fused)


def _of_factory(make: Callable[..., Any]) -> OptimizerKind:
    """Return the kind of a factory's optimizer, from the states after one step with one parameter.

    torch is not imported here, since planning works without it: a caller with such a function has
    imported it already.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        raise SettingError(
            "optimizer is a function, and torch is not loaded, so that it cannot make a torch "
            "optimizer: give a name, such as optimizer='adam', or how many numbers it keeps for "
            "each parameter"
        )
    parameter = torch.nn.Parameter(torch.zeros(_SIDE, _SIDE))
    try:
        optimizer = make([parameter])
        parameter.grad = torch.zeros_like(parameter)
        # torch's SparseAdam refuses dense gradients.
        if "Sparse" in type(optimizer).__name__:
            parameter.grad = parameter.grad.to_sparse()
        optimizer.step()
    except Exception as error:
        raise SettingError(
            "the function given as optimizer= could not make and step an optimizer over one "
            f"parameter ({type(error).__name__}: {error}): give a name, such as optimizer='adam', "
            "or how many numbers it keeps for each parameter"
        ) from error
    if not _is_optimizer(optimizer):
        raise SettingError(
            f"the function given as optimizer= returned {type(optimizer).__name__}, which is not a "
            "torch optimizer"
        )
    fused = any(group.get("fused") for group in optimizer.param_groups)
    states = _rounded(_state_bytes(optimizer) / parameter.nbytes)
    return OptimizerKind(_class_name(optimizer), states, fused)


def _state_bytes(optimizer: Any) -> int:
    """Return the bytes of all tensors among an optimizer's states."""
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if hasattr(value, "nbytes")
    )


def _rounded(states: float) -> float:
    """Round off states whose size does not depend on the parameter, such as a step count."""
    return round(states, 2)
