"""Trace weight versions: one pass over programs that notes the version at every op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.errors import ScheduleError
from penstock.schedule.op import BACKWARD_ENDS, BACKWARD_STARTS, Kind, Op
from penstock.weights.rule_types import Place

#: The ops of one rank, each with its batch.
BatchedOps = Sequence[tuple[Op, int]]


@dataclass(slots=True)
class MicroBatchTrace:
    """One micro-batch on one stage.

    Versions are the newest of the copy of the weights that it uses, at that moment.

    Attributes:
        rank: the rank of the stage's copy.
        batch: its batch.
        order: position of its F among those of its batch on its rank.
        at_forward, at_backward, at_gradient: versions at its F, at its B (or I), and at its
            gradient (B or W).
        next_number: number of the micro-batch with the next F on the same copy of the weights,
            None if there is none.
    """

    rank: int
    batch: int
    order: int
    at_forward: int
    at_backward: int = 0
    at_gradient: int = 0
    next_number: int | None = None


@dataclass(slots=True)
class BatchShare:
    """The part of a batch that one rank runs on one stage.

    Attributes:
        count: number of micro-batches.
        at_forward, at_backward: versions at the first F and the first B.
        last_gradient: number of the micro-batch whose gradient comes last.
    """

    count: int
    at_forward: int
    at_backward: int | None = None
    last_gradient: int = 0


@dataclass(frozen=True)
class VersionTrace:
    """The result of the pass.

    Attributes:
        stages: per stage, its micro-batches by number.
        shares: parts of batches by rank, stage and batch.
    """

    stages: tuple[dict[int, MicroBatchTrace], ...]
    shares: dict[tuple[int, int, int], BatchShare] = field(default_factory=dict)

    def share(self, stage: int, number: int) -> BatchShare:
        """Return the part of a batch that a micro-batch belongs to."""
        micro_batch = self.stages[stage][number]
        return self.shares[micro_batch.rank, stage, micro_batch.batch]

    def place(self, stage: int, number: int) -> Place:
        """Return the place of a micro-batch on a stage, the input of weight rules."""
        micro_batch, share = self.stages[stage][number], self.share(stage, number)
        return Place(
            stage,
            len(self.stages),
            micro_batch.batch,
            micro_batch.order,
            share.count,
            micro_batch.at_forward,
            micro_batch.at_backward,
            share.at_forward,
            share.at_backward or 0,
            self.stages[0][number].at_forward,
        )


def trace_versions(rows: Sequence[BatchedOps], stages: int, pipelines: int = 1) -> VersionTrace:
    """Trace the versions in the programs of all ranks.

    Args:
        rows: sound programs, each op with its batch.
        stages: number of stages.
        pipelines: number of copies of the weights that take turns: batch t uses copy t mod
            `pipelines`.

    Raises:
        ScheduleError: a backward has no forward before it.
    """
    trace = VersionTrace(tuple({} for _ in range(stages)))
    for rank, row in enumerate(rows):
        newest: dict[tuple[int, int], int] = {}
        previous: dict[tuple[int, int], MicroBatchTrace] = {}
        for (kind, stage, number), batch in row:
            copy = stage, batch % pipelines
            version = newest.get(copy, 0)
            if kind is Kind.F:
                share = trace.shares.setdefault((rank, stage, batch), BatchShare(0, version))
                micro_batch = MicroBatchTrace(rank, batch, share.count, version)
                share.count += 1
                if copy in previous:
                    previous[copy].next_number = number
                previous[copy] = trace.stages[stage][number] = micro_batch
            elif kind is Kind.U:
                newest[copy] = version + 1
            elif kind in (Kind.B, Kind.I, Kind.W):
                traced = trace.stages[stage].get(number)
                traced_share = trace.shares.get((rank, stage, batch))
                if traced is None or traced_share is None:
                    raise ScheduleError(
                        f"{stage}{kind}{number} on rank {rank} has no forward before it: run "
                        "penstock verify for all that is wrong"
                    )
                _note_backward(kind, number, version, traced, traced_share)
    return trace


def _note_backward(
    kind: Kind, number: int, version: int, micro_batch: MicroBatchTrace, share: BatchShare
) -> None:
    """Note the version at a B, I or W op.

    Args:
        kind, number: the op's kind and micro-batch.
        version: the newest version of its copy of the weights.
        micro_batch, share: the entries to change.
    """
    if kind in BACKWARD_STARTS:
        micro_batch.at_backward = version
        if share.at_backward is None:
            share.at_backward = version
    if kind in BACKWARD_ENDS:
        micro_batch.at_gradient = version
        share.last_gradient = number
