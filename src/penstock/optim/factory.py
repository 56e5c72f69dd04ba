"""Optimizer factories: the call that makes a stage's optimizer, and what is refused about it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from penstock.errors import SettingError

#: From a list of parameters, or of torch's parameter groups, to an optimizer.
OptimizerFactory = Callable[[Any], Optimizer]

#: What torch says of an optimizer over no parameters at all.
_EMPTY = "empty parameter list"

_REQUIRED_KINDS = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)


def check_factory(optimizer: object) -> None:
    """Refuse an `optimizer=` that is no function from parameters to an optimizer.

    Raises:
        SettingError: it is an optimizer, or something that cannot be called; the message has the
        function to write.
    """
    if isinstance(optimizer, Optimizer):
        raise SettingError(_instance_message(optimizer))
    if optimizer is not None and not callable(optimizer):
        raise SettingError(
            "optimizer= is a function from a stage's parameters to an optimizer, such as lambda params: "
            f"torch.optim.AdamW(params, lr=1e-3), not {optimizer!r}"
        )


def make_optimizer(
    factory: OptimizerFactory, parameters: list[nn.Parameter], place: str
) -> Optimizer | None:
    """Call the factory, and check that the optimizer is over the parameters that it was called
    with.

    Args:
        factory: the user's.
        parameters: of the stage, trainable and frozen ones.
        place: where, for messages, such as "stage 1".

    Returns:
        The optimizer. It may leave some of the parameters out, which then stay untrained. None
        where it leaves out all of them, of which torch's optimizers say that their list of
        parameters is empty.

    Raises:
        SettingError: the factory returned something else than an optimizer, one over other
        parameters, or one whose
            `step` needs an argument.
    """
    try:
        optimizer = factory(list(parameters))
    except ValueError as error:
        if _EMPTY in str(error):
            return None
        raise
    if not isinstance(optimizer, Optimizer):
        raise SettingError(
            "optimizer= is a function from parameters to a torch.optim.Optimizer; this one returned "
            f"{type(optimizer).__name__}"
        )
    _check_closure(optimizer)
    _check_parameters(optimizer, parameters, place)
    return optimizer


def check_alike(stage: int, copies: Sequence[Mapping[str, int | None]]) -> None:
    """Refuse copies of a stage whose optimizers differ in which parameters they have, and in which
    groups.

    Args:
        stage: which one.
        copies: of each copy, the number of every parameter's group, by name; None for what the
        optimizer leaves out. Tied
            parameters are steered by one of the copies alone, and are missing from the others.

    Raises:
        SettingError: they differ.
    """
    first = copies[0]
    if any(each[name] != first[name] for each in copies[1:] for name in each.keys() & first):
        raise SettingError(
            f"optimizer= chose other parameters, or other groups, for one copy of stage {stage} than for another: it chooses by "
            "the identity of the model's parameters, and copies of a stage have parameters of their own. Choose by what a "
            "parameter is, such as p.ndim, or by its name, with parameter_groups="
        )


def group_numbers(optimizer: Optimizer | None) -> dict[int, int]:
    """The number of the group of each parameter of an optimizer, by the parameter's `id`."""
    groups = [] if optimizer is None else optimizer.param_groups
    return {id(each): number for number, group in enumerate(groups) for each in group["params"]}


def _check_parameters(optimizer: Optimizer, parameters: Sequence[nn.Parameter], place: str) -> None:
    known = set(map(id, parameters))
    members = [each for group in optimizer.param_groups for each in group["params"]]
    foreign = [each for each in members if id(each) not in known]
    if not foreign:
        return
    kind = type(optimizer).__name__
    raise SettingError(
        f"optimizer= was called with the {_count(len(known))} of {place} and returned {kind} over "
        f"{_count(len(foreign))} besides these, the first of shape {tuple(foreign[0].shape)}. It is called once for every "
        "stage, and the optimizer must be a new one over the parameters that it is called with, or some of them: "
        f"optimizer=lambda params: {_class_path(optimizer)}(params, ...), not model.parameters() and not one optimizer for all "
        "stages"
    )


def _check_closure(optimizer: Optimizer) -> None:
    needed = _required_arguments(optimizer)
    if not needed:
        return
    raise SettingError(
        f"{type(optimizer).__name__} cannot step a pipeline: its step() needs {needed[0]}=, by which it runs the model "
        "several times for one step, and a stage steps once, with the gradients of the batch. Take an optimizer whose step() "
        "needs no argument, such as torch.optim.AdamW"
    )


def _required_arguments(optimizer: Optimizer) -> list[str]:
    """The arguments without which `step` cannot be called."""
    try:
        signature = inspect.signature(optimizer.step)
    except (TypeError, ValueError):
        return []
    return [
        name
        for name, argument in signature.parameters.items()
        if argument.default is argument.empty and argument.kind in _REQUIRED_KINDS
    ]


def _instance_message(optimizer: Optimizer) -> str:
    groups = len(optimizer.param_groups)
    call = f"optimizer=lambda params: {_class_path(optimizer)}(params{_options_text(optimizer)})"
    by_group = (
        f". Its {groups} parameter groups go into parameter_groups=, a function from a parameter's name and the parameter to "
        'the options of its group, such as {"weight_decay": 0.0}'
        if groups > 1
        else ""
    )
    state = (
        ". Its state is taken over by pipe.load_optimizer_state_dict(optimizer.state_dict())"
        if optimizer.state
        else ""
    )
    return (
        f"optimizer= is a function that makes an optimizer, since every stage has one of its own; this "
        f"{type(optimizer).__name__} is an optimizer. Write {call}{by_group}{state}"
    )


def _options_text(optimizer: Optimizer) -> str:
    """The options that differ from those of the class, as arguments of a call."""
    try:
        arguments = inspect.signature(type(optimizer)).parameters
    except (TypeError, ValueError):
        return ", ..."
    shown = [
        f", {name}={value!r}"
        for name, value in optimizer.defaults.items()
        if name in arguments and _differs(value, arguments[name].default)
    ]
    return "".join(shown)


def _differs(value: object, default: object) -> bool:
    return type(value) is not type(default) or repr(value) != repr(default)


def _class_path(optimizer: Optimizer) -> str:
    kind = type(optimizer)
    return (
        f"torch.optim.{kind.__name__}"
        if kind.__module__.startswith("torch.optim")
        else kind.__name__
    )


def _count(number: int) -> str:
    return f"{number} parameter{'s' * (number != 1)}"
