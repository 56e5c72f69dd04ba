"""About the same number of layers of one kind in every stage."""

from __future__ import annotations

import re

from penstock.errors import PartitionError
from penstock.partition.balanced import partition_balanced
from penstock.partition.catalogue import register
from penstock.profile.profile import Profile


@register(
    "type",
    takes_argument=True,
    source="DeepSpeed 2025, runtime/pipe/module.py, partition_method='type:<regex>'",
)
def by_type(profile: Profile, stages: int, pattern: str = "") -> list[int]:
    """Stage lengths that `partition_balanced` finds where a layer weighs 1 if its kind matches,
    else 0.

    Options:
        pattern: a regular expression, searched for anywhere in the layer's class name, upper and
        lower case alike;
            `"type:<regex>"` gives it.

    Raises:
        PartitionError: the expression is empty, cannot be read, or matches no layer.
    """
    kinds = list(dict.fromkeys(layer.kind for layer in profile))
    if not isinstance(pattern, str) or not pattern:
        raise PartitionError(
            f"type needs a regular expression for the kinds of layers, such as 'type:conv', "
            f"and got {pattern!r}. Kinds here: {', '.join(kinds)}"
        )
    try:
        wanted = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise PartitionError(f"type:{pattern} is not a regular expression: {error}") from error
    weights = [int(wanted.search(layer.kind) is not None) for layer in profile]
    if not any(weights):
        raise PartitionError(f"type:{pattern} matches no layer. Kinds here: {', '.join(kinds)}")
    return partition_balanced(weights, stages)
