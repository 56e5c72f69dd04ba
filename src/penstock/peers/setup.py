"""What a system is asked to train. Plain values, which travel to its processes as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.files.read import validate
from penstock.peers.plain import Plain


@dataclass(frozen=True)
class Setup:
    """One run of one system. All systems that are compared have equal fields but for the schedule
    and the options.

    Attributes:
        model: name in the zoo.
        model_options: of the model.
        data: name of a data set, or "random": one batch of random numbers, used in every step.
        batch: samples per step, on all ranks together.
        stages: number of stages, and of ranks if the system has a process per rank.
        micro_batches: per step.
        lengths: layers per stage.
        halves: layers per stage with two stages on every rank, for interleaved schedules; None if
            the model has too few layers.
        schedule: name of the schedule, one of the system's.
        options: of the system.
        plan: file of Penstock's plan, for its schedule "auto".
        plan_ranks: number of ranks of that plan.
        learning_rate, momentum: of SGD.
        seed: of the initial weights and of the order of the data.
        memory_limit: most bytes of a process above what its imports took, enforced by the kernel;
            0: no limit.
    """

    model: str
    model_options: dict[str, Plain]
    data: str
    batch: int
    stages: int
    micro_batches: int
    lengths: tuple[int, ...] = ()
    halves: tuple[int, ...] | None = None
    schedule: str = ""
    options: dict[str, Plain] = field(default_factory=dict)
    plan: str | None = None
    plan_ranks: int = 1
    learning_rate: float = 1e-3
    momentum: float = 0.9
    seed: int = 0
    memory_limit: int = 0


@dataclass(frozen=True)
class RankSpec:
    """Part of a run that one process has.

    Attributes:
        system: name of the system.
        setup: the run.
        rank, ranks: of the process, and the number of processes.
        threads: of torch.
        port: of the store at 127.0.0.1 that all ranks join.
        folder: a folder that all ranks share.
        gradients: file with the gradients of plain training, to compare with those of the first
            step; None: they are not compared.
    """

    system: str
    setup: Setup
    rank: int
    ranks: int
    threads: int
    port: int
    folder: str
    gradients: str | None = None


def to_message(value: Setup | RankSpec) -> dict[str, Any]:
    """Return a value as a message."""
    return asdict(value)


def setup_of(message: dict[str, Any]) -> Setup:
    """Return the setup in a message."""
    return validate(_text(message), Setup, "a message")


def spec_of(message: dict[str, Any]) -> RankSpec:
    """Return the part of a run in a message."""
    return validate(_text(message), RankSpec, "a message")


def _text(message: dict[str, Any]) -> str:
    """Return a message as one line of JSON."""
    import json

    return json.dumps(message)
