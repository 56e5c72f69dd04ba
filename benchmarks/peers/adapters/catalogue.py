"""All systems by name. A peer may have several: its schedules, or its settings."""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cells import Cell, Cuts

if TYPE_CHECKING:
    from job import Job

Step = Callable[[], object]
Make = Callable[["Job"], Step]


def _always(cell: Cell, cuts: Cuts) -> str | None:
    del cell, cuts
    return None


@dataclass(frozen=True)
class System:
    """A way to train.

    Attributes:
        name: "torch 1f1b".
        peer: whose it is; peers have environments of their own.
        make: called in every rank; returns what takes one step.
        imports: modules that are loaded before any rank begins, so that they count for no system.
        packages: what pip installs for it, beside torch; none for those that need nothing else.
        processes: "ranks"; "plan", as many as Penstock's own plan takes; or one process: "alone"
        with one thread, "threads" with one
            for each rank, though not more than cores, or "one", which is the same where layers are
            large enough to be shared.
        refuses: why it does not take a cell, or None.
        variables: of its processes' environment.
    """

    name: str
    peer: str
    make: Make
    imports: tuple[str, ...] = ("torch",)
    packages: tuple[str, ...] = ()
    processes: str = "ranks"
    refuses: Callable[[Cell, Cuts], str | None] = _always
    variables: tuple[tuple[str, str], ...] = ()

    def ranks(self, cell: Cell, cuts: Cuts) -> int:
        """Processes that it takes."""
        if self.processes == "plan":
            return cuts.plan_ranks
        return cell.stages if self.processes == "ranks" else 1

    def threads(self, cell: Cell) -> int:
        """Threads of torch in each of them."""
        several = self.processes == "threads" or (
            self.processes == "one" and cell.workload not in SMALL
        )
        return min(cell.stages, len(os.sched_getaffinity(0))) if several else 1


#: Workloads that one thread does sooner than several: teams of threads wait for each other longer
#: than a layer takes.
SMALL = ("mlp",)

SYSTEMS: dict[str, System] = {}


def register(name: str, **facts: object) -> Callable[[Make], Make]:
    """Enter a system. `facts` are the fields of `System`."""

    def enter(make: Make) -> Make:
        SYSTEMS[name] = System(name, make=make, **facts)  # type: ignore[arg-type]
        return make

    return enter


def systems() -> dict[str, System]:
    """All of them, in the order of the files' names."""
    package = importlib.import_module("adapters")
    for module in sorted(entry.name for entry in pkgutil.iter_modules(package.__path__)):
        importlib.import_module(f"adapters.{module}")
    return SYSTEMS
