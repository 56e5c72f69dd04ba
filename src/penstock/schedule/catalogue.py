"""All schedules by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from penstock.errors import ScheduleError
from penstock.registry import Registry
from penstock.schedule.op import Schedule

FAMILIES: Registry[Callable[..., Schedule]] = Registry("schedule", "penstock.schedule.families")
register = FAMILIES.register


@dataclass(frozen=True)
class ScheduleFacts:
    """What is known of a schedule before it is made."""

    name: str
    synchronous: bool
    stages_per_rank: str
    splits_backward: bool
    source: str
    aliases: tuple[str, ...] = ()


def schedules() -> dict[str, ScheduleFacts]:
    """Every schedule's name and short facts."""
    return {
        name: ScheduleFacts(name=name, **entry.facts)  # type: ignore[arg-type]  # facts are checked by this call
        for name, entry in FAMILIES.entries().items()
    }


def schedule(name: str, stages: int, micro_batches: int = 1, **options: object) -> Schedule:
    """Make the schedule called `name` (or by an alias).

    Args:
        name: one of `schedules()`.
        stages: number of stages, at least 1.
        micro_batches: micro-batches per batch, at least 1.
        options: what this schedule takes besides; its own docstring says.

    Raises:
        UnknownName: no schedule has that name.
        ScheduleError: this schedule does not take these numbers or options.
    """
    entry = FAMILIES.find(name)
    for word, number in (("stages", stages), ("micro-batches", micro_batches)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ScheduleError(f"{entry.name} needs at least 1 of {word} and got {number!r}")
    try:
        made = entry.make(stages, micro_batches, **options)
    except TypeError as error:
        if not options:
            raise
        raise ScheduleError(f"{entry.name} does not take {', '.join(options)}: {error}") from error
    plain = {option: tuple(value) if isinstance(value, list) else value for option, value in options.items()}
    return replace(made, name=entry.name, options=tuple(plain.items()))
