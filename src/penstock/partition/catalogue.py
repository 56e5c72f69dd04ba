"""All partitioners by name."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence

from penstock.errors import PartitionError
from penstock.partition.checks import refuse_unknown
from penstock.profile.profile import Profile
from penstock.registry import Registered, Registry

PARTITIONERS: Registry[Callable[..., list[int]]] = Registry(
    "partition method", "penstock.partition"
)
register = PARTITIONERS.register


def partition(
    profile: Profile,
    stages: int | None = None,
    by: str | Sequence[int] = "bottleneck",
    **options: object,
) -> list[int]:
    """Cut the profiled model into stages.

    Args:
        profile: costs of the layers, in order.
        stages: number of stages; may be left out when `by` is a list.
        by: a method's name (`penstock partition --list` shows all), `"type:<regex>"`, or the stage
        lengths themselves. options: what the method takes besides; its own docstring says.

    Returns:
        The number of layers in every stage; all at least 1, their sum the number of layers.

    Raises:
        UnknownName: no method has that name.
        PartitionError: more stages than layers, fewer than 1, lengths that do not fit, or an option
        that the method does
            not take.
    """
    if not isinstance(by, str):
        refuse_unknown("a list of stage lengths", options, ())
        return check_lengths(by, len(profile), stages)
    name, _, argument = by.partition(":")
    entry = PARTITIONERS.find(name)
    if stages is None:
        raise PartitionError(f"{by!r} needs to know how many stages to make")
    stages = check_stages(len(profile), stages)
    if argument and not entry.facts.get("takes_argument"):
        raise PartitionError(
            f"{name} takes nothing after a colon, and {by!r} has {argument!r} there"
        )
    if argument and "pattern" in options:
        raise PartitionError(
            f"{by!r} has its pattern already; leave out pattern={options['pattern']!r}"
        )
    if entry.facts.get("takes_argument"):
        options = {"pattern": argument, **options}
    refuse_unknown(entry.name, options, option_names(entry))
    return check_lengths(entry.make(profile, stages, **options), len(profile), stages)


def option_names(entry: Registered[Callable[..., list[int]]]) -> tuple[str, ...]:
    """What a method takes besides the profile and the number of stages: its fact `options`, or else
    its own arguments.
    """
    named = entry.facts.get("options")
    return (
        named if isinstance(named, tuple) else tuple(inspect.signature(entry.make).parameters)[2:]
    )


def check_stages(layers: int, stages: int) -> int:
    """The number of stages as an int, once `layers` layers can make so many.

    Raises:
        PartitionError: it is no whole number, below 1, or above the number of layers.
    """
    count = _whole(stages)
    if count is None:
        raise PartitionError(f"the number of stages must be a whole number, and is {stages!r}")
    if count < 1:
        raise PartitionError(f"a model is cut into 1 stage or more, not {count}")
    if count > layers:
        raise PartitionError(
            f"cannot make {count} stages from {layers} layers: every stage needs at least one. "
            f"Ask for at most {layers} stages, or give the model in smaller layers"
        )
    return count


def check_lengths(lengths: Sequence[int], layers: int, stages: int | None) -> list[int]:
    """The lengths as a list of ints, once they fit. NumPy's integers will do; floats and bools will
    not, whatever their value.

    Raises:
        PartitionError: they are not whole numbers of 1 or more that sum to `layers`, or not
        `stages` many.
    """
    try:
        given = list(lengths)
    except TypeError as error:
        raise PartitionError(
            f"by is {lengths!r}: give a method's name, or a list of stage lengths"
        ) from error
    listed = [_whole(length) for length in given]
    whole = [length for length in listed if length is not None]
    if len(whole) < len(listed):
        stage = listed.index(None)
        raise PartitionError(
            f"stage {stage} of {given} has the length {given[stage]!r}, which is not a whole number of layers"
        )
    empty = [stage for stage, length in enumerate(whole) if length < 1]
    if empty:
        raise PartitionError(
            f"stage {empty[0]} of {whole} is empty: every stage needs at least one layer"
        )
    if stages is not None and len(whole) != stages:
        raise PartitionError(f"{whole} has {len(whole)} stages, but {stages} are asked for")
    if not whole or sum(whole) != layers:
        raise PartitionError(f"{whole} sums to {sum(whole)}, but the model has {layers} layers")
    return whole


def _whole(number: object) -> int | None:
    """An int from an int of any library; None from a bool and from anything else."""
    if isinstance(number, bool):
        return None
    try:
        return operator.index(number)  # type: ignore[arg-type]  # whether it has __index__ is the question
    except TypeError:
        return None
