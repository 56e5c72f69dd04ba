"""Penstock: pipeline-parallel training for PyTorch.

Measures a model, works out how to cut and schedule it on the cluster at hand, proves the schedule
sound, predicts its time and memory, draws it, and trains with it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from penstock.notebook import Shown

if TYPE_CHECKING:
    from penstock.cluster.cluster import cluster as cluster
    from penstock.draw.draw import draw as draw
    from penstock.errors import PenstockError as PenstockError
    from penstock.errors import ScheduleError as ScheduleError
    from penstock.event import Timeline as Timeline
    from penstock.export.catalogue import export as export
    from penstock.measure.analytic import analytic as analytic
    from penstock.measure.profile import profile as profile
    from penstock.partition.catalogue import partition as partition
    from penstock.profile.profile import Profile as Profile
    from penstock.runtime.launch import launch as launch
    from penstock.runtime.pipe import Pipe as Pipe
    from penstock.runtime.pipeline import Pipeline as Pipeline
    from penstock.schedule.op import Op as Op
    from penstock.schedule.op import Schedule as Schedule
    from penstock.search.catalogue import plan as plan
    from penstock.search.compare import compare as compare
    from penstock.search.schedules import schedule as schedule
    from penstock.search.schedules import schedules as schedules
    from penstock.simulate.costs import Costs as Costs
    from penstock.simulate.front import simulate as simulate
    from penstock.simulate.many import simulate_many as simulate_many
    from penstock.tracing.chain import chain as chain
    from penstock.tracing.side_loss import side_loss as side_loss
    from penstock.tracing.skippable import Namespace as Namespace
    from penstock.tracing.skippable import pop as pop
    from penstock.tracing.skippable import skippable as skippable
    from penstock.tracing.skippable import stash as stash
    from penstock.tracing.skippable import verify_skippables as verify_skippables
    from penstock.verify.front import verify as verify

__version__ = "0.1.0"

_HOMES = {
    "chain": "tracing.chain",
    "profile": "measure.profile",
    "analytic": "measure.analytic",
    "Profile": "profile.profile",
    "cluster": "cluster.cluster",
    "plan": "search.catalogue",
    "compare": "search.compare",
    "Plan": "plan.plan",
    "schedule": "search.schedules",
    "schedules": "search.schedules",
    "Schedule": "schedule.op",
    "Op": "schedule.op",
    "verify": "verify.front",
    "simulate": "simulate.front",
    "simulate_many": "simulate.many",
    "Costs": "simulate.costs",
    "Timeline": "event",
    "draw": "draw.draw",
    "partition": "partition.catalogue",
    "export": "export.catalogue",
    "Pipeline": "runtime.pipeline",
    "Pipe": "runtime.pipe",
    "side_loss": "tracing.side_loss",
    "skippable": "tracing.skippable",
    "stash": "tracing.skippable",
    "pop": "tracing.skippable",
    "Namespace": "tracing.skippable",
    "verify_skippables": "tracing.skippable",
    "launch": "runtime.launch",
    "PenstockError": "errors",
    "ScheduleError": "errors",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605 - one table serves both

# Rooms and functions share their names: `penstock.schedule` is the function, `penstock.schedule.op`
# a module. Python binds a
# sub-package to its parent when it is first loaded, so the (empty) rooms are loaded first, and
# their names given back.
for _room in (
    "profile",
    "cluster",
    "plan",
    "schedule",
    "verify",
    "simulate",
    "draw",
    "partition",
    "export",
):
    importlib.import_module(f"penstock.{_room}")
    del globals()[_room]


def _picture(value: object) -> str | None:
    shown: str | None = importlib.import_module("penstock.draw.draw").picture(value)
    return shown


Shown.drawn_by = staticmethod(
    _picture
)  # whoever imports anything of the package has come through here


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"penstock has no {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(f"penstock.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
