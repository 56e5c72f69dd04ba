"""Penstock: pipeline-parallel training for PyTorch.

Profiles a model, plans its partition and schedule for a cluster, verifies the schedule, predicts
its time and memory, draws its timeline, and trains with it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from penstock.notebook import NotebookPicture

if TYPE_CHECKING:
    from penstock.checkpoint.weight_files import load_weights as load_weights
    from penstock.checkpoint.weight_files import save_weights as save_weights
    from penstock.cluster.cluster import cluster as cluster
    from penstock.cluster.machines import Cluster as Cluster
    from penstock.draw.draw import draw as draw
    from penstock.errors import ChainError as ChainError
    from penstock.errors import ClusterError as ClusterError
    from penstock.errors import FileError as FileError
    from penstock.errors import MissingExtra as MissingExtra
    from penstock.errors import PartitionError as PartitionError
    from penstock.errors import PenstockError as PenstockError
    from penstock.errors import PlanError as PlanError
    from penstock.errors import RunError as RunError
    from penstock.errors import ScheduleError as ScheduleError
    from penstock.errors import SettingError as SettingError
    from penstock.errors import UnknownName as UnknownName
    from penstock.event import Timeline as Timeline
    from penstock.export.catalogue import export as export
    from penstock.measure.analytic import analytic as analytic
    from penstock.measure.profiler import profile as profile
    from penstock.model.chain import Chain as Chain
    from penstock.modules.side_loss import side_loss as side_loss
    from penstock.modules.skippable import Namespace as Namespace
    from penstock.modules.skippable import pop as pop
    from penstock.modules.skippable import skippable as skippable
    from penstock.modules.skippable import stash as stash
    from penstock.modules.skippable import verify_skippables as verify_skippables
    from penstock.partition.catalogue import partition as partition
    from penstock.pipe.pipe import Pipe as Pipe
    from penstock.plan.plan import Plan as Plan
    from penstock.profile.profile import Profile as Profile
    from penstock.ranks.processes.launch import launch as launch
    from penstock.runtime.pipeline import Pipeline as Pipeline
    from penstock.runtime.state.checkpoints import Checkpoints as Checkpoints
    from penstock.schedule.op import Op as Op
    from penstock.schedule.op import Schedule as Schedule
    from penstock.search.catalogue import plan as plan
    from penstock.search.compare import compare as compare
    from penstock.search.schedules import schedule as schedule
    from penstock.search.schedules import schedules as schedules
    from penstock.simulate.costs import Costs as Costs
    from penstock.simulate.entry import simulate as simulate
    from penstock.simulate.sweep import simulate_many as simulate_many
    from penstock.tracing.traced_chain import chain as chain
    from penstock.verify.front import verify as verify

__version__ = "0.2.0"

#: Module of each public name, below `penstock`; imported when the name is first used.
_MODULES = {
    "chain": "tracing.traced_chain",
    "profile": "measure.profiler",
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
    "simulate": "simulate.entry",
    "simulate_many": "simulate.sweep",
    "Costs": "simulate.costs",
    "Timeline": "event",
    "draw": "draw.draw",
    "partition": "partition.catalogue",
    "export": "export.catalogue",
    "Pipeline": "runtime.pipeline",
    "Checkpoints": "runtime.state.checkpoints",
    "load_weights": "checkpoint.weight_files",
    "save_weights": "checkpoint.weight_files",
    "Pipe": "pipe.pipe",
    "side_loss": "modules.side_loss",
    "skippable": "modules.skippable",
    "stash": "modules.skippable",
    "pop": "modules.skippable",
    "Namespace": "modules.skippable",
    "verify_skippables": "modules.skippable",
    "launch": "ranks.processes.launch",
    "Cluster": "cluster.machines",
    "Chain": "model.chain",
    "PenstockError": "errors",
    "ChainError": "errors",
    "ClusterError": "errors",
    "FileError": "errors",
    "MissingExtra": "errors",
    "PartitionError": "errors",
    "PlanError": "errors",
    "RunError": "errors",
    "ScheduleError": "errors",
    "SettingError": "errors",
    "UnknownName": "errors",
}

__all__ = sorted(_MODULES)  # noqa: PLE0605 - one table serves both

# Some packages and functions have the same name: `penstock.schedule` is the function,
# `penstock.schedule.op` a module. Python binds a sub-package to its parent when it is first
# imported, so these (empty) packages are imported here, and their names removed again.
for _package in (
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
    importlib.import_module(f"penstock.{_package}")
    del globals()[_package]


def _draw_svg(value: object) -> str | None:
    """Draw a value for a notebook; imports `penstock.draw` only now."""
    svg: str | None = importlib.import_module("penstock.draw.draw").notebook_svg(value)
    return svg


# Set here because every import of a module of the package runs this file first.
NotebookPicture.svg_drawer = staticmethod(_draw_svg)


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"penstock has no {name!r}; it has {', '.join(__all__)}")
    try:
        module = importlib.import_module(f"penstock.{_MODULES[name]}")
    except ModuleNotFoundError as error:
        from penstock.errors import missing_torch

        reason = missing_torch(error, f"penstock.{name}")
        if reason is None:
            raise
        raise reason from None  # the chain of imports tells a user nothing
    value: object = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return [*__all__, "__version__"]
