"""DeepSpeed's partition by layer kind: equal numbers of matching layers in all stages."""

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
    """Balance the number of layers whose kind matches a pattern with `partition_balanced`.

    Options:
        pattern: a regular expression, searched for anywhere in the layer's class name, regardless
            of case; `"type:<regex>"` passes it.

    Raises:
        PartitionError: the expression is empty, is not valid, or matches no layer.
    """
    kinds = list(dict.fromkeys(layer.kind for layer in profile))
    if not isinstance(pattern, str) or not pattern:
        raise PartitionError(
            f"type needs a regular expression for the kinds of layers, such as 'type:conv', "
            f"and got {pattern!r}. Kinds in this profile: {', '.join(kinds)}"
        )
    try:
        expression = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise PartitionError(f"type:{pattern} is not a regular expression: {error}") from error
    weights = [int(expression.search(layer.kind) is not None) for layer in profile]
    if not any(weights):
        raise PartitionError(
            f"type:{pattern} matches no layer. Kinds in this profile: {', '.join(kinds)}"
        )
    return partition_balanced(weights, stages)
