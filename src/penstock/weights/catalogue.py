"""Catalogue of weight rules: which versions of its weights a stage reads, and how many it keeps.

This package has what planning needs; the arithmetic on tensors is in optim/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import final

from penstock.errors import ScheduleError, SettingError
from penstock.registry import Registry
from penstock.schedule.op import Schedule
from penstock.weights.rule_types import Place, Reads

#: Returns the versions that a micro-batch reads.
Rule = Callable[[Place], Reads]

WEIGHT_RULES: Registry[Rule] = Registry("weight rule", "penstock.weights")
register = WEIGHT_RULES.register


def check_synchronised_copies(schedule: Schedule) -> None:
    """Check that all copies of a stage synchronise at every U.

    This is the default check of a weight rule: only some rules can combine several copies of the
    weights.

    Raises:
        ScheduleError: copies of the weights take turns, or exchange updates only once per wave.
    """
    stream = schedule.stream
    if stream is not None and stream.pipelines > 1:
        raise ScheduleError(
            f"{schedule.name} has {stream.pipelines} copies of the weights that take turns: it "
            "needs a rule that averages them, such as 'avgpipe'"
        )
    if stream is not None and stream.waves is not None:
        raise ScheduleError(
            f"in {schedule.name} copies of a stage do not synchronise at every U: it needs a rule "
            "that exchanges the updates of waves, such as 'hetpipe'"
        )


@final
@dataclass(frozen=True)
class WeightRule:
    """A weight rule.

    Attributes:
        name: name of the rule.
        reads: returns which versions a micro-batch reads; raises ScheduleError for a place that the
            rule does not support.
        synchronous: True if it fits only schedules that flush at every batch, False if only others.
        source: publication that it is taken from.
        arithmetic: the entry of optim/ that implements it on tensors. "versions": a backward finds
            the version that it reads unchanged. "newest": there is one version, which updates
            change in place, whatever is in flight.
        one_version: whether only the newest version is stored. Versions that it reads further ahead
            are predicted; earlier versions are predictions that it has stored.
        extra: number of tensors of the size of the weights that a stage holds besides its versions.
        optimizers: names of the torch optimizers that its paper has formulas for; empty for all.
        because: reason for that restriction.
        options: numeric options of the rule, with their defaults.
        check: raises ScheduleError for a schedule that the rule does not support.
    """

    name: str
    reads: Rule
    synchronous: bool
    source: str
    arithmetic: str = "versions"
    one_version: bool = False
    extra: float = 0.0
    optimizers: tuple[str, ...] = ()
    because: str = ""
    options: Mapping[str, float] = field(default_factory=dict)
    check: Callable[[Schedule], None] = check_synchronised_copies

    def with_defaults(self, options: Mapping[str, float]) -> dict[str, float]:
        """Return the rule's options: the given values, and the defaults of the others.

        Raises:
            SettingError: it has no option of that name.
        """
        unknown = [name for name in options if name not in self.options]
        if unknown:
            takes = f"takes {', '.join(self.options)}" if self.options else "takes none"
            raise SettingError(
                f"weight rule {self.name!r} has no option {', '.join(unknown)}: it {takes}"
            )
        return {**self.options, **options}


def weight_rule(name: str | WeightRule) -> WeightRule:
    """Return the weight rule called `name`; a rule is returned as it is.

    >>> weight_rule("flush").synchronous
    True

    Raises:
        UnknownName: no weight rule has that name.
    """
    if isinstance(name, WeightRule):
        return name
    entry = WEIGHT_RULES.find(name)
    # The constructor checks the names of the registered facts.
    return WeightRule(entry.name, reads=entry.make, **entry.facts)  # type: ignore[arg-type]
