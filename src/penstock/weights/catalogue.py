"""All weight rules by name: which version of its weights a stage reads, and how many it keeps.

The arithmetic on tensors lives below the line, in optim/; here stands what planning needs to know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from penstock.registry import Registry

#: Versions that a stage keeps, from the most micro-batches that it has in flight.
VersionsKept = Callable[[int], int]

WEIGHT_RULES: Registry[VersionsKept] = Registry("weight rule", "penstock.weights")
register = WEIGHT_RULES.register


@final
@dataclass(frozen=True)
class WeightRule:
    """What is known of a weight rule.

    `versions_kept(in_flight)` is the number of weight versions that a stage holds which has at most `in_flight` micro-batches
    between forward and backward. A `synchronous` rule needs a synchronous schedule, and the other way round.
    """

    name: str
    synchronous: bool
    versions_kept: VersionsKept
    source: str


def weight_rule(name: str) -> WeightRule:
    """The weight rule called `name`.

    >>> weight_rule("flush").versions_kept(4)
    1

    Raises:
        UnknownName: no weight rule has that name.
    """
    entry = WEIGHT_RULES.find(name)
    return WeightRule(entry.name, versions_kept=entry.make, **entry.facts)  # type: ignore[arg-type]  # checked by this call
