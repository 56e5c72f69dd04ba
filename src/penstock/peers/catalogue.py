"""All systems by name, one file per library in `systems/`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from penstock.cluster.local import available_cores
from penstock.peers.plain import Plain
from penstock.peers.setup import Setup
from penstock.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.peers.job import Job

#: One training step on inputs and targets of the whole batch; returns the loss on ranks that know
#: it.
Step = Callable[["Tensor", "Tensor"], "Tensor | None"]
Make = Callable[["Job"], Step]

#: Models whose layers take less time than waking a team of threads, and the width below which that
#: holds for the others.
_SMALL_MODELS = ("mlp",)
_SMALL_WIDTH = 32


def _accept(setup: Setup) -> str | None:
    """Refuse nothing."""
    del setup
    return None


@dataclass(frozen=True)
class System:
    """A way to train.

    Attributes:
        name: of the library.
        make: called in every rank; returns the function that takes a step.
        about: what it is, and how it is set up here.
        imports: modules to load before a process is forked, so that loading counts for no run.
        packages: for pip, besides torch; none if it needs no other.
        schedules: names of its schedules; empty if it has no choice.
        two_stages: those of them with two stages on every rank.
        options: values of its options; the first is the default.
        processes: "ranks": one per stage. "plan": as many as Penstock's plan has. One process:
            "alone" with one thread, "threads" with one thread per stage but at most one per core,
            "one": like "threads", but one thread for models whose layers are small.
        refuses: why it cannot run a setup, or None.
        variables: environment variables of its processes.
        pipeline: whether it divides the model into stages.
    """

    name: str
    make: Make
    about: str = ""
    imports: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()
    two_stages: tuple[str, ...] = ()
    options: Mapping[str, tuple[Plain, ...]] = field(default_factory=dict)
    processes: Literal["ranks", "plan", "alone", "threads", "one"] = "ranks"
    refuses: Callable[[Setup], str | None] = _accept
    variables: Mapping[str, str] = field(default_factory=dict)
    pipeline: bool = True

    def ranks(self, setup: Setup) -> int:
        """Return its number of processes."""
        if self.processes == "plan" or (self.name == "penstock" and setup.schedule == "auto"):
            return setup.plan_ranks
        return setup.stages if self.processes == "ranks" else 1

    def threads(self, setup: Setup) -> int:
        """Return the number of threads in each process."""
        several = self.processes == "threads" or (
            self.processes == "one" and not _has_small_layers(setup)
        )
        return min(setup.stages, available_cores()) if several else 1

    def stages_per_rank(self, schedule: str) -> int:
        """Return the stages on every rank: 0 if it is no pipeline or divides by its own plan."""
        if not self.pipeline or schedule == "auto":
            return 0
        return 2 if schedule in self.two_stages else 1

    def reason_to_refuse(self, setup: Setup) -> str | None:
        """Return why it cannot run a setup, or None."""
        if self.schedules and setup.schedule not in self.schedules:
            return (
                f"{self.name} has no schedule {setup.schedule!r}; it has "
                f"{', '.join(self.schedules)}"
            )
        if not self.schedules and setup.schedule:
            return f"{self.name} has no schedules, so not {setup.schedule!r}"
        for name in setup.options:
            if name not in self.options:
                option_names = ", ".join(self.options) or "none"
                return f"{self.name} has no option {name!r}; it has: {option_names}"
        if setup.batch % setup.micro_batches:
            return f"a batch of {setup.batch} has no {setup.micro_batches} equal micro-batches"
        return self.refuses(setup)


def _has_small_layers(setup: Setup) -> bool:
    """Whether one thread runs the layers of a setup's model sooner than several."""
    width = setup.model_options.get("width", _SMALL_WIDTH)
    narrow = isinstance(width, int) and width < _SMALL_WIDTH
    return narrow or setup.model in _SMALL_MODELS


SYSTEMS: Registry[Make] = Registry("system", "penstock.peers.systems")
#: Enter a system. The facts are the fields of `System`.
register = SYSTEMS.register


def systems() -> dict[str, System]:
    """Return all systems by name."""
    return {name: system(name) for name in SYSTEMS.entries()}


def system(name: str) -> System:
    """Return the system called `name`.

    Raises:
        UnknownName: there is none.
    """
    entry = SYSTEMS.find(name)
    facts: dict[str, Any] = dict(entry.facts)
    return System(entry.name, entry.make, **facts)


#: Options of a run that are not the system's.
TRAINING_OPTIONS = ("lr", "momentum", "memory_limit")


def label(name: str, schedule: str, options: Mapping[str, Plain]) -> str:
    """Return the name of a system with its schedule and options, as in tables.

    >>> label("torchgpipe", "gpipe", {"checkpoint": "never"})
    'torchgpipe gpipe checkpoint=never'
    """
    words = [
        name,
        schedule,
        *(
            f"{option}={value}"
            for option, value in options.items()
            if option not in TRAINING_OPTIONS
        ),
    ]
    return " ".join(word for word in words if word)
