"""The registry of planners, and `plan`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

from penstock.cluster.cluster import Cluster
from penstock.errors import PlanError
from penstock.plan.plan import Plan
from penstock.plan.sharding import Sharding, ShardingOptions
from penstock.profile.device_profiles import Profiles
from penstock.profile.profile import Profile
from penstock.registry import Registry
from penstock.schedule.recompute import Recompute
from penstock.search.check_plan import checked_plan
from penstock.search.optimizer_kind import optimizer_kind
from penstock.search.request import PlanRequest
from penstock.synthesis.deadline import Deadline
from penstock.units import parse_bytes
from penstock.weights.catalogue import WeightRule

#: Seconds after which the clock ends a search if the request sets no limit. The longest search of
#: the benchmarks takes half a minute of one core; a busy machine must not end it, or the plan would
#: depend on what else runs.
TIME_LIMIT_S = 600.0

PLANNERS: Registry[Callable[[PlanRequest], Plan]] = Registry("planner", "penstock.search.planners")
register = PLANNERS.register


class SharingOptions(TypedDict, total=False):
    """Further settings of `plan`, described there."""

    tensor_parallel: int | None
    sequence_parallel: bool | None
    zero: int | None
    time_limit_s: float | None


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
    recompute: str = "auto",
    budget_s: float = 10.0,
    stages: int | None = None,
    micro_batches: int | None = None,
    partition: str | Sequence[int] = "bottleneck",
    weights: str | WeightRule | None = None,
    weights_options: Mapping[str, float] | None = None,
    optimizer: object = None,
    **sharing: Unpack[SharingOptions],
) -> Plan:
    """Return the best plan that a planner finds. Print it to see the candidates.

    Args:
        profile: costs of the model's layers; or a mapping from the name of each kind of device to
            its profile. From one profile, those of other kinds are scaled by their peak rates.
        cluster: the devices to run on. The plan may use fewer ranks than it has.
        batch: samples in a batch.
        planner: name of a planner.
        schedules: names of the schedules to consider. None considers all synchronous schedules but
            those that slice sequences, which must be named.
        asynchronous: consider asynchronous schedules too. They train by other rules: an update may
            use gradients of older weights. Their time is that of a batch in the steady state,
            between filling and draining. Not needed for schedules that are named.
        memory_limit: bytes that every rank may hold, or a text such as "2 GiB", on top of the limit
            of its device.
        max_replicas: maximum number of replicas of a stage; None leaves it to the planner.
        recompute: "never", "except_last", "always"; "selective" recomputes only some layers before
            their backward, those that free enough memory in the least time; "auto" recomputes only
            if memory does not suffice otherwise, and then what is fastest.
        budget_s: budget of the search. The number of its evaluations follows from it, so that the
            same question has the same answer on a busy machine; the plan says so if that ended the
            search early. While nothing fits, the search continues.
        stages: number of stages; None leaves it to the planner.
        micro_batches: number of micro-batches in a batch; None leaves it to the planner.
        partition: how to cut: the name of a method, or the number of layers in every stage.
        weights: name of the weight rule; by default that of each schedule. Where no schedule is
            named, an asynchronous rule selects the schedule that is made for it.
        weights_options: numbers that the weight rule takes.
        optimizer: the optimizer that will be used. Memory is planned for its states, and weight
            rules that have no formula for it are left out, or refused if they are named. A name
            ("sgd", "momentum", "adam", "adamw", "adagrad", …), the count of numbers that it keeps
            per parameter (2 for Adam), an optimizer, or a function from parameters to an optimizer,
            which is called once. Without it memory is that of SGD with momentum: one number per
            parameter.
        tensor_parallel: devices that share every layer; None is every width that the profile has
            (see `penstock.profile.transformer`).
        sequence_parallel: whether they also share what lies between; None where possible.
        zero: level of ZeRO among the replicas of a stage, 0 to 3, 0 by default; None tries all,
            with planners other than "auto" level 0 alone.
            Plans with any of the three are simulated and exported to Megatron and torchtitan.
        time_limit_s: hard limit on the seconds of the search, 600 by default; `math.inf` is none.
            The plan says so if the clock ended the search. Seconds in which Numba compiles kernels
            do not count.

    Raises:
        PlanError: nothing fits the memory, a number is out of its range, the weight rule does not
            go with a schedule, the request is beyond every planner, or the planner returned a plan
            that does not match the request.
        UnknownName: no planner, schedule or weight rule has such a name.
        SettingError: `memory_limit` is a text that is no amount of bytes, or the weight rule has no
            such option or no formula for the optimizer, or the optimizer's memory is unknown.

    Examples:
        >>> import penstock as ps
        >>> profile = ps.Profile.load("docs/funnel.profile.json")
        >>> best = plan(profile, ps.cluster("local:2"), batch=64, stages=2, schedules="1f1b")
        >>> best.schedule_name, best.stages
        ('1f1b', 2)
    """
    entry = PLANNERS.find(planner)
    request = make_request(
        profile,
        cluster,
        batch,
        schedules=schedules,
        asynchronous=asynchronous,
        memory_limit=memory_limit,
        max_replicas=max_replicas,
        recompute=Recompute.parse_or_auto(recompute),
        budget_s=budget_s,
        stages=stages,
        micro_batches=micro_batches,
        partition=partition,
        weights=weights,
        weights_options=weights_options,
        optimizer=optimizer,
        **sharing,
    )
    return checked_plan(entry.make(request), request, entry.name)


def make_request(
    profile: Profiles,
    cluster: Cluster,
    batch: int,
    *,
    schedules: Sequence[str] | str | None = None,
    **options: Any,
) -> PlanRequest:
    """Return the request for a planner, from the arguments of `plan`.

    Raises:
        PlanError, UnknownName, SettingError: as `plan`, except for what planners raise.
    """
    if isinstance(schedules, str):
        schedules = (schedules,)
    memory_limit = options.pop("memory_limit", None)
    partition = options.pop("partition", None)
    if partition is None:
        partition = "bottleneck"
    weights_options = options.pop("weights_options", None) or {}
    optimizer = options.pop("optimizer", None)
    sharding_options = ShardingOptions(
        options.pop("tensor_parallel", None),
        options.pop("sequence_parallel", None),
        options.pop("zero", 0),
    )
    _check_width(profile, sharding_options.tensor_parallel)
    time_limit_s = options.pop("time_limit_s", None)
    if time_limit_s is None:
        time_limit_s = TIME_LIMIT_S
    if not time_limit_s >= 0:
        raise PlanError(f"time_limit_s is {time_limit_s!r}; it must be 0 s or more")
    options.setdefault("deadline", Deadline(time_limit_s))
    kind = None if optimizer is None else optimizer_kind(optimizer)
    return PlanRequest(
        profile,
        cluster,
        batch,
        schedules=None if schedules is None else tuple(schedules),
        memory_limit=None if memory_limit is None else parse_bytes(memory_limit),
        by=partition if isinstance(partition, str) else tuple(partition),
        weights_options=_float_items(weights_options),
        optimizer=None if kind is None else kind.name or None,
        optimizer_states=None if kind is None else kind.states,
        optimizer_fused=kind is not None and kind.fused,
        sharding=Sharding(zero=sharding_options.zero or 0),
        sharding_options=sharding_options,
        **options,
    )


def _check_width(profile: Profiles, tensor_parallel: int | None) -> None:
    """Check the number of devices that share each layer; None leaves it to the planner.

    Raises:
        PlanError: it is below 1, or the profile has no costs for it.
    """
    if tensor_parallel is None:
        return
    if tensor_parallel < 1:
        raise PlanError(f"tensor_parallel is {tensor_parallel}; it must be 1 or more")
    has_widths = isinstance(profile, Profile) and bool(profile.widths)
    if tensor_parallel > 1 and not has_widths:
        raise PlanError(
            f"tensor_parallel is {tensor_parallel}, and the profile has no costs of layers that "
            f"{tensor_parallel} devices share: make it with "
            "penstock.profile.transformer.transformer_profile"
        )


def _float_items(options: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """Return options as a hashable tuple of names and floats."""
    return tuple((name, float(value)) for name, value in options.items())
