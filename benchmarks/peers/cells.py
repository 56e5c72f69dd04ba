"""What is compared: a workload, cut into stages and micro-batches. Plain values, which travel to
the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """One comparison. All systems train the same model on the same batch, on the same number of ranks."""

    workload: str
    stages: int
    micro_batches: int

    def __str__(self) -> str:
        return f"{self.workload} S={self.stages} M={self.micro_batches}"


@dataclass(frozen=True)
class Cuts:
    """Where the model is cut.

    Attributes:
        lengths: layers per stage, for everybody.
        halves: layers per stage with two stages on every rank, for interleaved schedules; None
            where the model has too few layers.
        plan: file of the plan that Penstock found by itself, and how many ranks it takes; None
            where it was not asked.
    """

    lengths: tuple[int, ...]
    halves: tuple[int, ...] | None
    plan: str | None = None
    plan_ranks: int = 1


@dataclass(frozen=True)
class Spec:
    """What a rank is to do: a system by its name, and the files with the first weights and with
    plain training's gradients.
    """

    system: str
    cell: Cell
    cuts: Cuts
    rank: int
    ranks: int
    threads: int
    port: int
    folder: str
    weights: str
    gradients: str | None
