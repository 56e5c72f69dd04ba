"""The registry of partition methods, and `partition`, which calls them by name."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence

from penstock.errors import PartitionError
from penstock.partition.validation import refuse_unknown
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
        stages: number of stages; may be omitted when `by` is a list.
        by: a method's name (`penstock partition --list` shows all), `"type:<regex>"`, or the stage
            lengths themselves.
        options: the method's own options; see its docstring.

    Returns:
        The number of layers of every stage; all at least 1, their sum the number of layers.

    Raises:
        UnknownName: there is no method of that name.
        PartitionError: more stages than layers, fewer than 1, invalid lengths, or an option that
            the method does not accept.

    Examples:
        >>> from penstock.profile.profile import Profile
        >>> profile = Profile.load("docs/funnel.profile.json")
        >>> partition(profile, stages=4, by="uniform")
        [3, 3, 3, 2]
    """
    if not isinstance(by, str):
        refuse_unknown("a list of stage lengths", options, ())
        return check_lengths(by, len(profile), stages)
    name, _, argument = by.partition(":")
    entry = PARTITIONERS.find(name)
    if stages is None:
        raise PartitionError(f"{by!r} needs the number of stages; pass stages=")
    stages = check_stages(len(profile), stages)
    if argument and not entry.facts.get("takes_argument"):
        raise PartitionError(f"{name} takes no argument after a colon, but {by!r} has {argument!r}")
    if argument and "pattern" in options:
        raise PartitionError(
            f"{by!r} already contains the pattern; remove pattern={options['pattern']!r}"
        )
    if entry.facts.get("takes_argument"):
        options = {"pattern": argument, **options}
    refuse_unknown(entry.name, options, option_names(entry))
    return check_lengths(entry.make(profile, stages, **options), len(profile), stages)


def option_names(entry: Registered[Callable[..., list[int]]]) -> tuple[str, ...]:
    """Return the names of a method's options: its fact `options`, or else its own arguments.

    The profile and the number of stages are not options.
    """
    declared = entry.facts.get("options")
    if isinstance(declared, tuple):
        return declared
    return tuple(inspect.signature(entry.make).parameters)[2:]


def check_stages(layers: int, stages: int) -> int:
    """Return the number of stages as an int after checking that `layers` layers suffice.

    Raises:
        PartitionError: it is not a whole number, below 1, or above the number of layers.
    """
    count = _whole(stages)
    if count is None:
        raise PartitionError(f"the number of stages must be a whole number, and is {stages!r}")
    if count < 1:
        raise PartitionError(f"a model is cut into 1 stage or more, not {count}")
    if count > layers:
        raise PartitionError(
            f"cannot make {count} stages from {layers} layers: every stage needs at least one. "
            f"Use at most {layers} stages, or split the model into smaller layers"
        )
    return count


def check_lengths(lengths: Sequence[int], layers: int, stages: int | None) -> list[int]:
    """Return the stage lengths as a list of ints after validation.

    Integers of NumPy are accepted; floats and bools are not, whatever their value.

    Args:
        lengths: the number of layers of every stage.
        layers: the number of layers of the model.
        stages: the required number of stages; None is any.

    Raises:
        PartitionError: they are not whole numbers of 1 or more that sum to `layers`, or there are
            not `stages` of them.
    """
    checked = _whole_lengths(lengths)
    for stage, length in enumerate(checked):
        if length < 1:
            raise PartitionError(
                f"stage {stage} of {checked} is empty: every stage needs at least one layer"
            )
    if stages is not None and len(checked) != stages:
        raise PartitionError(f"{checked} has {len(checked)} stages, but {stages} are requested")
    if not checked or sum(checked) != layers:
        raise PartitionError(f"{checked} sums to {sum(checked)}, but the model has {layers} layers")
    return checked


def _whole_lengths(lengths: Sequence[int]) -> list[int]:
    """Return the lengths as a list of ints; raise an error if one is not a whole number."""
    try:
        raw_lengths = list(lengths)
    except TypeError as error:
        raise PartitionError(
            f"by is {lengths!r}: it must be a method's name, or a list of stage lengths"
        ) from error
    checked: list[int] = []
    for stage, raw_length in enumerate(raw_lengths):
        length = _whole(raw_length)
        if length is None:
            raise PartitionError(
                f"stage {stage} of {raw_lengths} has the length {raw_length!r}, "
                f"which is not a whole number of layers"
            )
        checked.append(length)
    return checked


def _whole(number: object) -> int | None:
    """Return an integer of any library as an int; None for a bool or any other type."""
    if isinstance(number, bool):
        return None
    try:
        return operator.index(number)  # type: ignore[arg-type]  # this tests for __index__
    except TypeError:
        return None
