"""All planners by name, and `plan`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from penstock.cluster.cluster import Cluster
from penstock.plan.plan import Plan, Recompute
from penstock.profile.paced import Profiles
from penstock.registry import Registry
from penstock.search.check import checked_plan
from penstock.search.optimizer_kind import optimizer_kind
from penstock.search.request import PlanRequest
from penstock.units import parse_bytes

PLANNERS: Registry[Callable[[PlanRequest], Plan]] = Registry("planner", "penstock.search.planners")
register = PLANNERS.register


def plan(
    profile: Profiles,
    cluster: Cluster,
    batch: int,
    *,
    planner: str = "auto",
    schedules: Sequence[str] | str | None = None,
    asynchronous: bool = False,
    memory_limit: int | str | None = None,
    max_replicas: int | None = None,
    recompute: Recompute | Literal["auto"] = "auto",
    budget_s: float = 10.0,
    stages: int | None = None,
    micro_batches: int | None = None,
    partition: str | Sequence[int] = "bottleneck",
    weights: str | None = None,
    weights_options: Mapping[str, float] | None = None,
    optimizer: object = None,
) -> Plan:
    """The best plan that the planner finds; print it to see what it weighed.

    Args:
        profile: costs of the model's layers; or of each kind of device by its name, where there are
        several. From one profile those of
            other kinds are reckoned by their peaks.
        cluster: what to run on. The plan may use fewer ranks than it has.
        batch: samples in a batch.
        planner: name of a planner.
        schedules: names of the schedules to weigh; None is all synchronous ones but those with
        slices of sequences, which are weighed
            when they are named.
        asynchronous: weigh asynchronous schedules too, which train by other rules: an update may
        use gradients of older weights.
            They count by their seconds per batch between filling and draining. Not needed for those
            that are named.
        memory_limit: bytes that every rank may hold, or a text such as "2 GiB", besides the limit
        of its device. max_replicas: most copies of a stage; None leaves it to the planner.
        recompute: "never", "except_last", "always"; "selective": only some layers run again before
        their backward, those that free
            enough memory in the least time; or "auto": only where memory does not suffice without,
            and then what is fastest.
        budget_s: seconds after which the search ends with the best plan so far. It goes on while
        nothing has been found
            that fits. A search that ends before its budget always gives the same plan.
        stages: number of stages; None leaves it to the planner.
        micro_batches: parts of a batch; None leaves it to the planner.
        partition: how to cut: a method's name, or the number of layers in every stage.
        weights: name of the weight rule; by default each schedule's own. Where no schedule is
        named, an asynchronous rule brings the
            schedule that is made for it.
        weights_options: numbers that the weight rule takes.
        optimizer: what will be used, so that memory is planned for what it keeps, and weight rules
        that have no formula for it are left
            out, or refused if they are named. A name ("sgd", "momentum", "adam", "adamw",
            "adagrad", …), the numbers that it keeps for each parameter (2 for Adam), an optimizer,
            or the function from parameters to one, which is called once. Without it memory is that
            of SGD with momentum: one number.

    Raises:
        PlanError: nothing fits the memory, a number is out of its range, the weight rule does not
        go with a schedule, something is asked
            that no planner can do yet, or the planner returned a plan that is not what was asked.
        UnknownName: no planner, schedule or weight rule has such a name.
        SettingError: `memory_limit` is a text that is no amount of bytes, or the weight rule has no
        such option or no formula
            for the optimizer, or how much that keeps is not known.
    """
    entry = PLANNERS.find(planner)
    request = asked(
        profile,
        cluster,
        batch,
        schedules=schedules,
        asynchronous=asynchronous,
        memory_limit=memory_limit,
        max_replicas=max_replicas,
        recompute=recompute,
        budget_s=budget_s,
        stages=stages,
        micro_batches=micro_batches,
        partition=partition,
        weights=weights,
        weights_options=weights_options,
        optimizer=optimizer,
    )
    return checked_plan(entry.make(request), request, entry.name)


def asked(
    profile: Profiles,
    cluster: Cluster,
    batch: int,
    *,
    schedules: Sequence[str] | str | None = None,
    **options: Any,
) -> PlanRequest:
    """What `plan` asks a planner, from the same arguments.

    Raises:
        PlanError, UnknownName, SettingError: as `plan`, but for what planners find.
    """
    limit, by, weights_options, optimizer = (
        options.pop(name, None)
        for name in ("memory_limit", "partition", "weights_options", "optimizer")
    )
    kind = None if optimizer is None else optimizer_kind(optimizer)
    return PlanRequest(
        profile,
        cluster,
        batch,
        schedules=(schedules,)
        if isinstance(schedules, str)
        else None
        if schedules is None
        else tuple(schedules),
        memory_limit=None if limit is None else parse_bytes(limit),
        by="bottleneck" if by is None else by if isinstance(by, str) else tuple(by),
        weights_options=tuple(
            (name, float(value)) for name, value in (weights_options or {}).items()
        ),
        optimizer=None if kind is None else kind.name or None,
        optimizer_states=None if kind is None else kind.states,
        **options,
    )
