"""What a run does, from a plan or from the caller's own words."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from penstock.errors import PlanError, ScheduleError, SettingError
from penstock.plan.plan import Plan
from penstock.schedule.catalogue import schedule as make_schedule
from penstock.schedule.op import HANDING, Schedule
from penstock.simulate.simulate import recomputes
from penstock.tracing.chain import TracedChain
from penstock.verify.verify import verify
from penstock.weights.choice import rule_of, schedule_for


@dataclass(frozen=True)
class Setting:
    """What a run does, whether a plan or the caller said it.

    `devices`: of the cluster that a plan was made for, the device that each rank must be; empty
    where nothing is said, which is that rank r is device r.
    """

    lengths: tuple[int, ...]
    schedule: Schedule
    recompute: str
    weights: str
    weights_options: Mapping[str, float] = field(default_factory=dict)
    recomputed: frozenset[int] = frozenset()
    segment_starts: frozenset[int] = frozenset()
    devices: tuple[int, ...] = ()

    @classmethod
    def of_plan(cls, plan: Plan, traced: TracedChain) -> Setting:
        """What the plan says, once it fits the model. Rank r of the run is the r-th of the plan's
        devices, ascending, and plays the program that the plan has for that device.

        Raises:
            PlanError: the plan is for another model, or names a device twice, or one that its
            cluster does not have.
        """
        plan.check_fits(traced.fingerprint, plan.ranks, torch.__version__)
        return cls(
            tuple(plan.lengths),
            _on_devices(plan),
            plan.recompute,
            plan.weights,
            dict(plan.weights_options),
            frozenset(plan.recomputed),
            frozenset(plan.segment_starts),
            tuple(sorted(plan.devices)),
        )


def _on_devices(plan: Plan) -> Schedule:
    """The plan's schedule by the ranks of a run, which stand on the plan's devices in ascending
    order.
    """
    devices = plan.devices
    if not devices:
        return plan.schedule
    there = set(range(plan.cluster_ranks))
    if len(devices) != plan.ranks or len(set(devices)) != plan.ranks or not set(devices) <= there:
        raise PlanError(
            f"the plan puts its {plan.ranks} ranks on devices {list(devices)}; they must be {plan.ranks} different ones of the "
            f"{plan.cluster_ranks} of {plan.cluster}, numbered from 0: plan anew"
        )
    rank_of = {device: rank for rank, device in enumerate(sorted(devices))}
    return plan.schedule.on_ranks([rank_of[device] for device in devices])


@dataclass(frozen=True)
class Words:
    """What a caller may say instead of giving a plan."""

    balance: Sequence[int] | None = None
    schedule: str | Schedule | None = None
    micro_batches: int | None = None
    recompute: str | Collection[int | str] | None = None
    weights: str | None = None
    weights_options: Mapping[str, float] | None = None


def setting_of(traced: TracedChain, plan: Plan | None, words: Words) -> Setting:
    """What to do, from a plan or from the caller's own words, never from a mix of both. Where
    nothing is said of the schedule, it is the one made for the weight rule; where nothing is said
    of the rule, it is the one that the schedule is made for.

    Raises:
        SettingError: both are given, or neither.
        PlanError: the plan is for another model.
    """
    if plan is not None:
        doubled = [name for name, value in vars(words).items() if value is not None]
        if doubled:
            raise SettingError(
                f"the plan already says {', '.join(doubled)}: give a plan, or these, not both"
            )
        return Setting.of_plan(plan, traced)
    if words.balance is None:
        raise SettingError(
            "a Pipeline needs a plan (ps.plan), or balance=[layers of each stage, …]"
        )
    lengths = tuple(int(length) for length in words.balance)
    schedule, micro_batches = words.schedule, words.micro_batches
    if not isinstance(schedule, Schedule):
        name = schedule or schedule_for(words.weights or "flush")
        schedule = make_schedule(name, len(lengths), 1 if micro_batches is None else micro_batches)
    elif micro_batches not in (None, schedule.micro_batches):
        raise SettingError(
            f"the schedule has {schedule.micro_batches} micro-batches, micro_batches={micro_batches} says otherwise"
        )
    weights = words.weights or ("flush" if schedule.stream is None else schedule.stream.weights)
    recompute, recomputed = _recompute(traced, words.recompute)
    return Setting(
        lengths, schedule, recompute, weights, dict(words.weights_options or {}), recomputed
    )


def _recompute(
    traced: TracedChain, wish: str | Collection[int | str] | None
) -> tuple[str, frozenset[int]]:
    """When micro-batches run again, or, of layers by name or place, that these do."""
    if wish == "selective":
        raise SettingError(
            'which layers run again? Name them: recompute=["blocks.0", …], or let ps.plan(recompute="selective") choose'
        )
    if wish is None or isinstance(wish, str):
        return wish or "never", frozenset()
    places = {layer.name: index for index, layer in enumerate(traced.layers)}
    for layer in wish:
        if layer not in places and layer not in places.values():
            raise SettingError(
                f"recompute names layer {layer!r}, which the model has not: it has {len(traced)} layers, numbered from 0, such "
                f"as {', '.join(map(repr, list(places)[:4]))}"
            )
    return "selective", frozenset(places.get(layer, layer) for layer in wish)  # type: ignore[arg-type]


def check(setting: Setting) -> None:
    """Refuse what cannot run, before anything starts.

    Raises:
        ScheduleError, SettingError, PlanError: the schedule is not sound, or does not go with the
        rest.
    """
    schedule = setting.schedule
    if not schedule.synchronous and schedule.stream is None:
        raise ScheduleError(
            f"{schedule.name} is asynchronous and does not say how it goes on from batch to batch: give it a stream, "
            "such as Schedule(programs, synchronous=False, stream=Stream(batches=8))"
        )
    if schedule.stream is not None and (
        schedule.slicing is not None or any(op.kind in HANDING for op in schedule.ops)
    ):
        raise ScheduleError(
            f"{schedule.name} cuts micro-batches or hands them to other ranks, which streams cannot do yet"
        )
    rule_of(schedule, setting.weights, setting.weights_options)
    verify(schedule) if schedule.stream is None else verify(schedule, weights=setting.weights)
    recomputes(setting.recompute, 0, 1)
    if setting.recomputed and schedule.slicing is not None and schedule.slicing.along == "tokens":
        raise SettingError(
            f"{schedule.name} cuts sequences, and single layers cannot run again then, since slices hand on to each other "
            "what they have found: recompute whole micro-batches (always, except_last), or none"
        )
    if schedule.stages != len(setting.lengths):
        raise PlanError(
            f"the schedule has {schedule.stages} stages, the balance {list(setting.lengths)} has {len(setting.lengths)}"
        )
