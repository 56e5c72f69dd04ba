"""Compare all planners on one profile and cluster, scored by one simulator."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from penstock.cluster.cluster import Cluster
from penstock.errors import PenstockError
from penstock.plan.plan import Plan
from penstock.profile.device_profiles import Profiles
from penstock.search.catalogue import PLANNERS, make_request


@final
@dataclass(frozen=True)
class PlannerResult:
    """The result of one planner.

    Attributes:
        planner: its name.
        plan: its plan; None if it has none.
        refusal: why it has no plan; empty if it has one.
        seconds: seconds that it took to plan.
    """

    planner: str
    plan: Plan | None
    refusal: str
    seconds: float

    @property
    def step_s(self) -> float:
        """Predicted seconds per step; infinite if there is no plan."""
        return float("inf") if self.plan is None else self.plan.predicted.step_s


def compare(
    profile: Profiles,
    cluster: Cluster,
    batch: int,
    *,
    planners: Sequence[str] | None = None,
    **options: Any,
) -> tuple[PlannerResult, ...]:
    """Return the results of several planners for the same model, cluster and batch, fastest plan
    first; those without a plan come last.

    Args:
        profile, cluster, batch, options: as `plan` takes them.
        planners: names; None is all.

    Raises:
        UnknownName: there is no planner of such a name.
        PlanError, SettingError, UnknownName: the request is invalid for every planner, as `plan`
            says.

    Examples:
        >>> import penstock as ps
        >>> profile = ps.Profile.load("docs/funnel.profile.json")
        >>> planners = ["gpipe", "megatron"]
        >>> results = compare(profile, ps.cluster("local:2"), batch=64, planners=planners)
        >>> sorted(result.planner for result in results)
        ['gpipe', 'megatron']
    """
    if planners is None:
        names = list(PLANNERS.entries())
    else:
        names = [PLANNERS.find(name).name for name in planners]
    request = make_request(profile, cluster, batch, **options)
    results = []
    for name in names:
        start = time.perf_counter()
        plan, refusal = None, ""
        try:
            plan = replace(PLANNERS.find(name).make(request), planner=name)
        except PenstockError as error:
            # A planner that refuses the request has a row of the comparison too.
            refusal = str(error)
        results.append(PlannerResult(name, plan, refusal, time.perf_counter() - start))
    return tuple(sorted(results, key=lambda result: (result.step_s, result.planner)))
