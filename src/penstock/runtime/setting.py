"""What a run does, from a plan or from the caller's own words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import PlanError, SettingError
from penstock.plan import Plan
from penstock.schedule.catalogue import schedule as make_schedule
from penstock.schedule.op import Schedule
from penstock.simulate.simulate import recomputes
from penstock.tracing.chain import TracedChain
from penstock.verify.verify import verify
from penstock.weights.catalogue import weight_rule


@dataclass(frozen=True)
class Setting:
    """What a run does, whether a plan or the caller said it."""

    lengths: tuple[int, ...]
    schedule: Schedule
    recompute: str
    weights: str

    @classmethod
    def of_plan(cls, plan: Plan, traced: TracedChain) -> Setting:
        """What the plan says, once it fits the model."""
        plan.check_fits(traced.fingerprint, plan.ranks)
        return cls(tuple(plan.lengths), plan.schedule, plan.recompute, plan.weights)


def setting_of(traced: TracedChain, plan: Plan | None, balance: Sequence[int] | None, schedule: str | Schedule | None,
               micro_batches: int | None, recompute: str | None, weights: str | None) -> Setting:  # fmt: skip
    """What to do, from a plan or from the caller's own words, never from a mix of both.

    Raises:
        SettingError: both are given, or neither.
        PlanError: the plan is for another model.
    """
    own = {"balance": balance, "schedule": schedule, "micro_batches": micro_batches, "recompute": recompute, "weights": weights}
    if plan is not None:
        doubled = [name for name, value in own.items() if value is not None]
        if doubled:
            raise SettingError(f"the plan already says {', '.join(doubled)}: give a plan, or these, not both")
        return Setting.of_plan(plan, traced)
    if balance is None:
        raise SettingError("a Pipeline needs a plan (ps.plan), or balance=[layers of each stage, …]")
    lengths = tuple(int(length) for length in balance)
    if not isinstance(schedule, Schedule):
        schedule = make_schedule(schedule or "1f1b", len(lengths), 1 if micro_batches is None else micro_batches)
    elif micro_batches not in (None, schedule.micro_batches):
        raise SettingError(
            f"the schedule has {schedule.micro_batches} micro-batches, micro_batches={micro_batches} says otherwise"
        )
    return Setting(lengths, schedule, recompute or "never", weights or "flush")


def check(setting: Setting) -> None:
    """Refuse what cannot run, before anything starts.

    Raises:
        ScheduleError, SettingError, PlanError: the schedule is not sound, or does not go with the rest.
    """
    schedule = setting.schedule
    verify(schedule)
    recomputes(setting.recompute, 0, 1)
    rule = weight_rule(setting.weights)
    if schedule.stages != len(setting.lengths):
        raise PlanError(
            f"the schedule has {schedule.stages} stages, the balance {list(setting.lengths)} has {len(setting.lengths)}"
        )
    if not (schedule.synchronous and rule.synchronous):
        raise PlanError(f"{schedule.name} with weights={setting.weights!r} is asynchronous, which cannot be run yet")
