"""All planners on one profile and cluster, scored by one simulator."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from penstock.cluster.cluster import Cluster
from penstock.errors import PenstockError
from penstock.plan.plan import Plan
from penstock.profile.paced import Profiles
from penstock.search.catalogue import PLANNERS, asked


@final
@dataclass(frozen=True)
class Compared:
    """What one planner found: its plan, or why it has none; and the seconds that it took."""

    planner: str
    plan: Plan | None
    refusal: str
    seconds: float

    @property
    def step_s(self) -> float:
        """Seconds of a step; infinite where there is no plan."""
        return float("inf") if self.plan is None else self.plan.predicted.step_s


def compare(
    profile: Profiles,
    cluster: Cluster,
    batch: int,
    *,
    planners: Sequence[str] | None = None,
    **options: Any,
) -> tuple[Compared, ...]:
    """What every planner makes of the same model, cluster and batch, fastest first; those without a
    plan last.

    Args:
        profile, cluster, batch, options: as `plan` takes them.
        planners: names; None is all.

    Raises:
        UnknownName: there is no planner of such a name.
        PlanError, SettingError, UnknownName: what is asked is refused whatever the planner, as
        `plan` says.
    """
    names = (
        list(PLANNERS.entries())
        if planners is None
        else [PLANNERS.find(name).name for name in planners]
    )
    request = asked(profile, cluster, batch, **options)
    found = []
    for name in names:
        start = time.perf_counter()
        made, refusal = None, ""
        try:
            made = replace(PLANNERS.find(name).make(request), planner=name)
        except PenstockError as error:
            refusal = str(error)
        found.append(Compared(name, made, refusal, time.perf_counter() - start))
    return tuple(sorted(found, key=lambda each: (each.step_s, each.planner)))
