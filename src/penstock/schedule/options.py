"""Messages for options that a schedule does not take, or values that it cannot use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter, signature

from penstock.errors import ScheduleError

#: The arguments of a schedule's function before it are the numbers of stages and micro-batches.
_FIRST_OPTION = 2


def option_names(make: Callable[..., object]) -> tuple[str, ...]:
    """Return the names of the options that a schedule's function takes.

    >>> def gpipe(stages, micro_batches, backward_order="forward"): ...
    >>> option_names(gpipe)
    ('backward_order',)
    """
    parameters = [*signature(make).parameters.values()][_FIRST_OPTION:]
    return tuple(
        parameter.name for parameter in parameters if parameter.kind is not Parameter.VAR_KEYWORD
    )


def option_error(
    name: str, options: Mapping[str, object], valid_names: Iterable[str], error: TypeError
) -> ScheduleError:
    """Return the error for options that a schedule's function refused with a TypeError.

    It names the unknown options alone. If all are known, a value has the wrong type: then it shows
    the values and what Python said.

    Args:
        name: the schedule.
        options: the options that were given, not empty.
        valid_names: the names of the options that it takes.
        error: what the function raised.
    """
    names = tuple(valid_names)
    unknown = [option for option in options if option not in names]
    if unknown:
        takes = f"it takes {', '.join(names)}" if names else "it takes no options"
        return ScheduleError(f"{name} does not take {', '.join(unknown)}: {takes}")
    values = ", ".join(f"{option}={value!r}" for option, value in options.items())
    return ScheduleError(f"{name} cannot use {values}: {error}")
