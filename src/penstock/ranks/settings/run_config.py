"""The configuration of a run, from a plan or from the arguments of `Pipeline`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from penstock.errors import PlanError, ScheduleError, SettingError
from penstock.plan.plan import Plan
from penstock.schedule.catalogue import schedule as make_schedule
from penstock.schedule.op import ACTIVATION_MOVES, Op, Schedule
from penstock.schedule.recompute import Recompute
from penstock.tracing.traced_chain import TracedChain
from penstock.verify.verify import verify
from penstock.weights.catalogue import WeightRule, weight_rule
from penstock.weights.compatibility import rule_of, schedule_for


@dataclass(frozen=True)
class RunConfig:
    """The configuration of a run.

    Attributes:
        lengths: number of layers of each stage.
        schedule: the schedule.
        recompute: which micro-batches are recomputed: "never", "except_last" or "always"; or
            "selective" for the layers in `recomputed`.
        rule: the weight rule.
        weights_options: options of the weight rule.
        recomputed: indices of recomputed layers.
        segment_starts: indices of recomputed layers that start a new segment.
        devices: by rank, its device in the cluster of the plan; empty if rank r is device r.
        cluster_ranks: number of devices of the cluster of the plan; 0 without a plan.
        cluster_devices: host and kind of every device of the cluster; empty if it names no hosts.
        planned_busy_s: by program, the seconds per step in which its rank computes according to the
            plan; empty if that is not known.
        predicted_bytes: by rank, the peak memory that the plan predicts; empty without a plan.
    """

    lengths: tuple[int, ...]
    schedule: Schedule
    recompute: Recompute
    rule: WeightRule
    weights_options: Mapping[str, float] = field(default_factory=dict)
    recomputed: frozenset[int] = frozenset()
    segment_starts: frozenset[int] = frozenset()
    devices: tuple[int, ...] = ()
    cluster_ranks: int = 0
    cluster_devices: tuple[tuple[str, str], ...] = ()
    planned_busy_s: Mapping[tuple[Op, ...], float] = field(default_factory=dict, compare=False)
    predicted_bytes: tuple[int, ...] = ()

    @classmethod
    def of_plan(cls, plan: Plan, traced: TracedChain) -> RunConfig:
        """Return the configuration of a plan.

        Rank r of the run is the r-th of the plan's devices in ascending order, and runs the program
        that the plan has for that device.

        Raises:
            PlanError: the plan is for another model, or names a device twice or one that its
                cluster does not have.
        """
        plan.check_fits(traced.fingerprint, plan.ranks, torch.__version__)
        schedule = _on_devices(plan)
        peaks = plan.predicted.peak_memory
        devices = plan.devices or range(len(peaks))
        return cls(
            lengths=tuple(plan.lengths),
            schedule=schedule,
            recompute=plan.recompute,
            rule=plan.rule,
            weights_options=dict(plan.weights_options),
            recomputed=frozenset(plan.recomputed),
            segment_starts=frozenset(plan.segment_starts),
            devices=tuple(sorted(plan.devices)),
            cluster_ranks=plan.cluster_ranks,
            cluster_devices=plan.cluster_devices,
            planned_busy_s=dict(zip(plan.schedule.programs, plan.predicted.busy_s, strict=False)),
            # In ascending order of devices, as `_on_devices` numbers the ranks.
            predicted_bytes=tuple(peak for _, peak in sorted(zip(devices, peaks, strict=True))),
        )


def _on_devices(plan: Plan) -> Schedule:
    """Return the plan's schedule, renumbered so that ranks are in ascending order of devices.

    Raises:
        PlanError: the plan's devices are not distinct devices of its cluster.
    """
    devices = plan.devices
    if not devices:
        return plan.schedule
    cluster_devices = set(range(plan.cluster_ranks))
    distinct = set(devices)
    if len(devices) != plan.ranks or len(distinct) != plan.ranks or not distinct <= cluster_devices:
        raise PlanError(
            f"the plan puts its {plan.ranks} ranks on devices {list(devices)}; they must be "
            f"{plan.ranks} different ones of the {plan.cluster_ranks} of {plan.cluster}, numbered "
            "from 0: make the plan again"
        )
    rank_of = {device: rank for rank, device in enumerate(sorted(devices))}
    return plan.schedule.on_ranks([rank_of[device] for device in devices])


@dataclass(frozen=True)
class Overrides:
    """Arguments of `Pipeline` that replace a plan; see there."""

    balance: Sequence[int] | None = None
    schedule: str | Schedule | None = None
    micro_batches: int | None = None
    recompute: str | Collection[int | str] | None = None
    weights: str | WeightRule | None = None
    weights_options: Mapping[str, float] | None = None


def make_run_config(traced: TracedChain, plan: Plan | None, overrides: Overrides) -> RunConfig:
    """Return the configuration of a plan or of the arguments that replace one.

    The default schedule is that of the weight rule; the default weight rule that of the schedule.

    Args:
        traced: the model.
        plan: the plan, if any.
        overrides: arguments that replace a plan.

    Raises:
        SettingError: both or neither are given, or an argument is invalid.
        PlanError: the plan is for another model.
    """
    if plan is not None:
        duplicates = [name for name, value in vars(overrides).items() if value is not None]
        if duplicates:
            raise SettingError(
                f"the plan already says {', '.join(duplicates)}: give a plan, or these, not both"
            )
        return RunConfig.of_plan(plan, traced)
    if overrides.balance is None:
        raise SettingError(
            "a Pipeline needs a plan (ps.plan), or balance=[layers of each stage, …]"
        )
    lengths = tuple(int(length) for length in overrides.balance)
    schedule = _make_schedule(overrides, len(lengths))
    weights = overrides.weights
    if not weights:
        weights = "flush" if schedule.stream is None else schedule.stream.weights
    recompute, recomputed = _parse_recompute(traced, overrides.recompute)
    options = dict(overrides.weights_options or {})
    return RunConfig(lengths, schedule, recompute, weight_rule(weights), options, recomputed)


def _make_schedule(overrides: Overrides, stages: int) -> Schedule:
    """Return the schedule of the arguments, made by name if necessary.

    Raises:
        SettingError: `micro_batches` differs from that of the schedule.
    """
    schedule, micro_batches = overrides.schedule, overrides.micro_batches
    if not isinstance(schedule, Schedule):
        name = schedule or schedule_for(overrides.weights or "flush")
        return make_schedule(name, stages, 1 if micro_batches is None else micro_batches)
    if micro_batches not in (None, schedule.micro_batches):
        raise SettingError(
            f"the schedule has {schedule.micro_batches} micro-batches, which differs from "
            f"micro_batches={micro_batches}"
        )
    return schedule


def _parse_recompute(
    traced: TracedChain, recompute: str | Collection[int | str] | None
) -> tuple[Recompute, frozenset[int]]:
    """Return the recompute mode, and the indices of recomputed layers for "selective".

    Args:
        traced: the model.
        recompute: a mode, or names or indices of layers, or None for "never".

    Raises:
        SettingError: the model has no layer of that name or index, or no layers are named.
    """
    if recompute == Recompute.SELECTIVE:
        raise SettingError(
            'recompute="selective" needs the layers: name them, recompute=["blocks.0", …], or use '
            'ps.plan(recompute="selective"), which chooses them'
        )
    if recompute is None or isinstance(recompute, str):
        return Recompute.parse(recompute or Recompute.NEVER), frozenset()
    indices = {layer.name: index for index, layer in enumerate(traced.layers)}
    for layer in recompute:
        if layer not in indices and layer not in indices.values():
            raise SettingError(
                f"recompute names layer {layer!r}, which the model does not have: it has "
                f"{len(traced)} layers, numbered from 0, such as "
                f"{', '.join(map(repr, list(indices)[:4]))}"
            )
    layers = frozenset(indices.get(layer, layer) for layer in recompute)  # type: ignore[arg-type]
    return Recompute.SELECTIVE, layers


def check(setting: RunConfig) -> None:
    """Reject a configuration that cannot run, before ranks are started.

    Raises:
        ScheduleError, SettingError, PlanError: the schedule is invalid, or does not match the rest
            of the configuration.
    """
    schedule = setting.schedule
    if not schedule.synchronous and schedule.stream is None:
        raise ScheduleError(
            f"{schedule.name} is asynchronous and does not say how it continues from batch to "
            "batch: give it a stream, such as "
            "Schedule(programs, synchronous=False, stream=Stream(batches=8))"
        )
    if schedule.stream is not None:
        _check_stream(schedule)
    rule_of(schedule, setting.rule, setting.weights_options)
    if schedule.stream is None:
        verify(schedule)
    else:
        verify(schedule, weights=setting.rule)
    if setting.recomputed and schedule.slicing is not None and schedule.slicing.along == "tokens":
        raise SettingError(
            f"{schedule.name} cuts sequences, and single layers cannot be recomputed then, because "
            "slices pass state to each other: recompute whole micro-batches (always, except_last), "
            "or none"
        )
    if schedule.stages != len(setting.lengths):
        raise PlanError(
            f"the schedule has {schedule.stages} stages, the balance {list(setting.lengths)} has "
            f"{len(setting.lengths)}"
        )


def _check_stream(schedule: Schedule) -> None:
    """Reject slices and evictions in a schedule with a stream.

    Raises:
        ScheduleError: the schedule has one of them.
    """
    moves_activations = any(op.kind in ACTIVATION_MOVES for op in schedule.ops)
    if schedule.slicing is not None or moves_activations:
        raise ScheduleError(
            f"{schedule.name} slices micro-batches or moves activations to other ranks, which "
            "streams do not support yet"
        )
