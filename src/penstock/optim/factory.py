"""Optimizer factories: functions that create a stage's optimizer, and their checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from penstock.errors import SettingError
from penstock.units import format_count

#: Takes a list of parameters, or of torch's parameter groups, and returns an optimizer.
OptimizerFactory = Callable[[Any], Optimizer]

#: Part of torch's message for an optimizer without parameters.
_EMPTY = "empty parameter list"

_REQUIRED_KINDS = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)


def check_factory(optimizer: object) -> None:
    """Raise an error if `optimizer=` is not a function from parameters to an optimizer.

    Raises:
        SettingError: it is an optimizer, or not callable; the message says which function to write.
    """
    if isinstance(optimizer, Optimizer):
        raise SettingError(_instance_message(optimizer))
    if optimizer is not None and not callable(optimizer):
        raise SettingError(
            "optimizer= is a function from a stage's parameters to an optimizer, such as lambda "
            f"params: torch.optim.AdamW(params, lr=1e-3), not {optimizer!r}"
        )


def make_optimizer(
    factory: OptimizerFactory, parameters: list[nn.Parameter], place: str
) -> Optimizer | None:
    """Call the factory, and check that the optimizer is over the parameters passed to it.

    Args:
        factory: the user's factory.
        parameters: all parameters of the stage, trainable and frozen.
        place: location for messages, such as "stage 1".

    Returns:
        The optimizer. It may omit some parameters, which then stay untrained. None if it omits all
        of them, which torch's optimizers report as an empty parameter list.

    Raises:
        SettingError: the result is not an optimizer, is over other parameters, or its `step`
            requires an argument.
    """
    try:
        optimizer = factory(list(parameters))
    except ValueError as error:
        if _EMPTY in str(error):
            return None
        raise
    if not isinstance(optimizer, Optimizer):
        raise SettingError(
            "optimizer= is a function from parameters to a torch.optim.Optimizer; this one "
            f"returned {type(optimizer).__name__}"
        )
    _check_closure(optimizer)
    _check_parameters(optimizer, parameters, place)
    return optimizer


def check_alike(stage: int, copies: Sequence[Mapping[str, int | None]]) -> None:
    """Raise an error if the optimizers of a stage's replicas differ in their parameter groups.

    Args:
        stage: index of the stage.
        copies: for each replica, the index of every parameter's group by parameter name; None for
            a parameter that the optimizer omits. A tied parameter is stepped by one replica alone
            and does not occur in the others.

    Raises:
        SettingError: they differ.
    """
    first, *others = copies
    for groups in others:
        if any(groups[name] != first[name] for name in groups.keys() & first):
            raise SettingError(
                "optimizer= chose other parameters, or other groups, for one copy of stage "
                f"{stage} than for another: it chooses by the identity of the model's parameters, "
                "and copies of a stage have parameters of their own. Choose by what a parameter "
                "is, such as p.ndim, or by its name, with parameter_groups="
            )


def group_numbers(optimizer: Optimizer | None) -> dict[int, int]:
    """Return the index of the parameter group by the parameter's `id`."""
    groups = [] if optimizer is None else optimizer.param_groups
    numbers = {}
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            numbers[id(parameter)] = number
    return numbers


def _check_parameters(optimizer: Optimizer, parameters: Sequence[nn.Parameter], place: str) -> None:
    """Reject an optimizer over parameters other than those that it was made for."""
    stage_ids = set(map(id, parameters))
    foreign = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) not in stage_ids
    ]
    if not foreign:
        return
    raise SettingError(
        f"optimizer= was called with the {_count(len(stage_ids))} of {place} and returned "
        f"{type(optimizer).__name__} over {_count(len(foreign))} besides these, the first of shape "
        f"{tuple(foreign[0].shape)}. It is called once for every stage, and the optimizer must be "
        "a new one over the parameters that it is called with, or some of them: "
        f"optimizer=lambda params: {_class_path(optimizer)}(params, ...), not model.parameters() "
        "and not one optimizer for all stages"
    )


def _check_closure(optimizer: Optimizer) -> None:
    """Reject an optimizer whose step() must be given a closure."""
    required = _required_arguments(optimizer)
    if not required:
        return
    raise SettingError(
        f"{type(optimizer).__name__} cannot step a pipeline: its step() needs {required[0]}=, by "
        "which it runs the model several times for one step, and a stage steps once, with the "
        "gradients of the batch. Take an optimizer whose step() needs no argument, such as "
        "torch.optim.AdamW"
    )


def _required_arguments(optimizer: Optimizer) -> list[str]:
    """Return the names of the required arguments of `step`."""
    try:
        signature = inspect.signature(optimizer.step)
    except (TypeError, ValueError):
        # Compiled functions may have no signature: then nothing is known to be required.
        return []
    return [
        name
        for name, argument in signature.parameters.items()
        if argument.default is argument.empty and argument.kind in _REQUIRED_KINDS
    ]


def _instance_message(optimizer: Optimizer) -> str:
    """Return the message for an optimizer given in place of a factory."""
    groups = len(optimizer.param_groups)
    call = f"optimizer=lambda params: {_class_path(optimizer)}(params{_options_text(optimizer)})"
    by_group = ""
    if groups > 1:
        by_group = (
            f". Its {groups} parameter groups go into parameter_groups=, a function from a "
            "parameter's name and the parameter to the options of its group, such as "
            '{"weight_decay": 0.0}'
        )
    state = ""
    if optimizer.state:
        state = ". Load its state by pipe.load_optimizer_state_dict(optimizer.state_dict())"
    return (
        "optimizer= is a function that creates an optimizer, since every stage has its own; this "
        f"{type(optimizer).__name__} is an optimizer. Write {call}{by_group}{state}"
    )


def _options_text(optimizer: Optimizer) -> str:
    """Return the options that differ from the defaults of the class, as arguments of a call."""
    try:
        signature_parameters = inspect.signature(type(optimizer)).parameters
    except (TypeError, ValueError):
        # A class whose constructor is compiled may have no signature.
        return ", ..."
    arguments_text = [
        f", {name}={value!r}"
        for name, value in optimizer.defaults.items()
        if name in signature_parameters and _differs(value, signature_parameters[name].default)
    ]
    return "".join(arguments_text)


def _differs(value: object, default: object) -> bool:
    return type(value) is not type(default) or repr(value) != repr(default)


def _class_path(optimizer: Optimizer) -> str:
    """Return the name of an optimizer's class as users write it."""
    kind = type(optimizer)
    return (
        f"torch.optim.{kind.__name__}"
        if kind.__module__.startswith("torch.optim")
        else kind.__name__
    )


def _count(number: int) -> str:
    return format_count(number, "parameter")
