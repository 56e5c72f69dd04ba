"""`simulate`, the public entry point: a schedule with costs, or a plan with profile and cluster."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.cluster.cluster import Cluster
from penstock.errors import SettingError
from penstock.event import Timeline
from penstock.plan.plan import Plan
from penstock.profile.device_profiles import Profiles
from penstock.profile.profile import Profile
from penstock.schedule.op import Schedule
from penstock.schedule.recompute import Recompute
from penstock.simulate.costs import Costs
from penstock.simulate.plan_costs import simulate_plan
from penstock.simulate.simulate import simulate_schedule


def simulate(
    what: Schedule | Plan,
    costs_or_profile: Costs | Profiles | None = None,
    cluster: Cluster | None = None,
    *,
    overlap: bool = True,
    recompute: str | None = None,
) -> Timeline:
    """Compute when every op and transfer of one step starts and ends.

    >>> from penstock.schedule.op import Schedule
    >>> simulate(Schedule.parse("0F0 0B0 0U1"), Costs(forward=1)).makespan
    3.0

    Args:
        what: a schedule, with costs; or a plan, with profile and cluster.
        costs_or_profile: Costs for a schedule (1 s forward and 2 s backward by default); for a plan
            its Profile, or one per kind of device by name.
        cluster: for a plan.
        overlap: for a schedule; see `simulate_schedule`.
        recompute: for a schedule, "never" by default; a plan has its own.

    Raises:
        SettingError: the arguments do not go together.
        PlanError: the profile is of a different model, or the cluster has too few ranks.
        ScheduleError: the schedule misses an op.
    """
    if isinstance(what, Plan):
        if not isinstance(costs_or_profile, (Profile, Mapping)) or cluster is None:
            raise SettingError(
                "a plan is simulated with its profile and a cluster: "
                "simulate(plan, profile, cluster)"
            )
        if recompute is not None or not overlap:
            raise SettingError(
                "a plan is simulated as it will run: "
                "leave out recompute and overlap, or simulate plan.schedule"
            )
        return simulate_plan(what, costs_or_profile, cluster)
    if not isinstance(what, Schedule):
        raise SettingError(f"simulate takes a Schedule or a Plan, not {type(what).__name__}")
    costs = Costs() if costs_or_profile is None else costs_or_profile
    if not isinstance(costs, Costs) or cluster is not None:
        raise SettingError(
            "a schedule is simulated with costs: simulate(schedule, costs); "
            "profile and cluster go with a plan"
        )
    return simulate_schedule(what, costs, overlap=overlap, recompute=recompute or Recompute.NEVER)
