"""All weight rules by name: which version of its weights a stage reads, and how many it keeps.

The arithmetic on tensors lives below the line, in optim/; here stands what planning needs to know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import final

from penstock.errors import ScheduleError, SettingError
from penstock.registry import Registry
from penstock.schedule.op import Schedule
from penstock.weights.reads import Place, Reads

#: From where a micro-batch stands to the versions that it reads.
Rule = Callable[[Place], Reads]

WEIGHT_RULES: Registry[Rule] = Registry("weight rule", "penstock.weights")
register = WEIGHT_RULES.register


def takes_plain_streams(schedule: Schedule) -> None:
    """Refuse streams with several copies of the weights, which only rules that say so know how to
    bring together.

    Raises:
        ScheduleError: copies of the weights take turns, or tell each other only now and then.
    """
    stream = schedule.stream
    if stream is not None and stream.pipelines > 1:
        raise ScheduleError(
            f"{schedule.name} has {stream.pipelines} copies of the weights that take turns: that goes with rules "
            "which average them, such as 'avgpipe'"
        )
    if stream is not None and stream.waves is not None:
        raise ScheduleError(
            f"in {schedule.name} copies of a stage do not meet at every U: that goes with rules which exchange what "
            "waves have changed, such as 'hetpipe'"
        )


@final
@dataclass(frozen=True)
class WeightRule:
    """What is known of a weight rule.

    Attributes:
        name: as it is asked for.
        reads: which versions a micro-batch reads.
        synchronous: whether it goes with schedules that flush at every batch, and with no others.
        source: where it is published.
        arithmetic: the entry of optim/ that does it on tensors. "versions": a backward finds the
        version that it reads as it was.
            "newest": there is one version, which updates change in place, whatever is in flight.
        one_version: whether it holds the newest version alone. What it reads further ahead is a
        prediction; what it reads of
            earlier versions, a prediction that it has kept.
        extra: tensors of the size of the weights that a stage holds besides its versions.
        optimizers: names of the torch optimizers that its paper has formulas for; empty for all.
        `because` says why. options: the numbers that it takes, with their defaults. check: raises
        ScheduleError for a schedule that it cannot go with. `reads` does, too, for a place that it
        cannot.
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
    check: Callable[[Schedule], None] = takes_plain_streams

    def with_defaults(self, options: Mapping[str, float]) -> dict[str, float]:
        """The rule's options, those given in place of the defaults.

        Raises:
            SettingError: it takes no option of that name.
        """
        strange = [name for name in options if name not in self.options]
        if strange:
            takes = f"takes {', '.join(self.options)}" if self.options else "takes none"
            raise SettingError(
                f"weight rule {self.name!r} has no option {', '.join(strange)}: it {takes}"
            )
        return {**self.options, **options}


def weight_rule(name: str) -> WeightRule:
    """The weight rule called `name`.

    >>> weight_rule("flush").synchronous
    True

    Raises:
        UnknownName: no weight rule has that name.
    """
    entry = WEIGHT_RULES.find(name)
    return WeightRule(entry.name, reads=entry.make, **entry.facts)  # type: ignore[arg-type]  # checked by this call
