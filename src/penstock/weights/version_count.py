"""Count the weight versions that every rank keeps, and check that each op finds what it reads."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.errors import Finding
from penstock.schedule.op import BACKWARD_ENDS, BACKWARD_STARTS, Kind, Op
from penstock.weights.catalogue import WeightRule
from penstock.weights.rule_types import Reads
from penstock.weights.version_trace import BatchedOps, VersionTrace


@dataclass
class _WeightCopy:
    """The versions of one copy of a stage's weights on a rank.

    A micro-batch in flight holds the version that its forward has read, even if its backward reads
    another: saved activations refer to it.

    Attributes:
        newest: the newest version.
        versions: the versions that are kept.
        reads_in_flight: number of reads by micro-batches in flight, per version.
        next_forward: the version that the next F reads; infinity if no F follows.
    """

    newest: int = 0
    versions: set[int] = field(default_factory=lambda: {0})
    reads_in_flight: Counter[int] = field(default_factory=Counter)
    next_forward: float = 0

    def drop_unused(self) -> None:
        """Drop the versions that are not needed any more.

        Kept are the newest, those that a micro-batch in flight reads, and those from the version
        of the next F on.
        """
        if len(self.versions) > 1:
            self.versions = {
                version
                for version in self.versions
                if version == self.newest
                or version >= self.next_forward
                or self.reads_in_flight[version]
            }


@dataclass(frozen=True)
class _VersionCounter:
    """Replays ops on copies of the weights, and collects findings.

    Attributes:
        trace: the trace of the programs.
        reads: per stage, what the micro-batches read.
        rule: the weight rule.
        findings: one for every op that reads a version which does not exist.
    """

    trace: VersionTrace
    reads: Sequence[Mapping[int, Reads]]
    rule: WeightRule
    findings: list[Finding] = field(default_factory=list)

    def apply(self, rank: int, op: Op, copy: _WeightCopy) -> None:
        """Update one copy of the weights by an op."""
        if op.kind is Kind.U:
            copy.newest += 1
            copy.versions.add(copy.newest)
        elif op.micro_batch not in self.reads[op.stage]:
            return  # the rule has refused this micro-batch
        elif op.kind is Kind.F:
            self._apply_forward(rank, op, copy)
        else:
            self._apply_backward(rank, op, copy)
        if self.rule.one_version:
            copy.versions = {copy.newest}
        else:
            copy.drop_unused()

    def _apply_forward(self, rank: int, op: Op, copy: _WeightCopy) -> None:
        """Check and note the reads of an F."""
        stage_reads = self.reads[op.stage]
        reads = stage_reads[op.micro_batch]
        self._check(rank, op, copy, reads.forward)
        # A version that does not exist yet is checked at the backward.
        if reads.backward <= copy.newest and reads.backward != reads.forward:
            self._check(rank, op, copy, reads.backward)
        copy.reads_in_flight.update((reads.forward, reads.backward))
        next_number = self.trace.stages[op.stage][op.micro_batch].next_number
        next_reads = None if next_number is None else stage_reads.get(next_number)
        copy.next_forward = math.inf if next_reads is None else next_reads.forward

    def _apply_backward(self, rank: int, op: Op, copy: _WeightCopy) -> None:
        """Check and note the reads of a B, I or W; a move of activations reads no weights."""
        reads = self.reads[op.stage][op.micro_batch]
        # A version that was already dropped at the F is reported there.
        if op.kind in BACKWARD_STARTS and reads.backward > copy.newest:
            self._check(rank, op, copy, reads.backward)
        if op.kind in BACKWARD_ENDS:
            copy.reads_in_flight.subtract((reads.forward, reads.backward))

    def _check(self, rank: int, op: Op, copy: _WeightCopy, version: int) -> None:
        """Add a finding if a version that an op reads is neither kept nor predicted."""
        if version in copy.versions or self._is_predicted(op, version):
            return
        if version > copy.newest:
            reason = f"where the newest is {copy.newest}: another update has to come before the op"
        else:
            versions = ", ".join(map(str, sorted(copy.versions)))
            reason = (
                f"which has been dropped (kept: {versions}); a version is dropped when no "
                "micro-batch in flight reads it and the next F reads a newer one"
            )
        message = (
            f"{self.rule.name}: {op} on rank {rank} reads version {version} of stage {op.stage}, "
            f"{reason}"
        )
        self.findings.append(Finding("weights", message, rank, str(op)))

    def _is_predicted(self, op: Op, version: int) -> bool:
        """Return whether a forward reads a prediction that was made from this version."""
        predicts = self.reads[op.stage][op.micro_batch].forward_ahead > 0
        share = self.trace.share(op.stage, op.micro_batch)
        return self.rule.one_version and predicts and version == share.at_forward


def count_versions(
    rows: Sequence[BatchedOps],
    trace: VersionTrace,
    reads: Sequence[Mapping[int, Reads]],
    rule: WeightRule,
    pipelines: int = 1,
) -> tuple[list[int], list[Finding]]:
    """Return the maximum number of versions that a rank keeps, per stage.

    Counted after each op, over all copies of the weights on the rank. A U drops the versions that
    no micro-batch in flight and no later F reads, and then makes the new version. A rule with
    `one_version` keeps only the newest.

    Args:
        rows, trace, pipelines: the programs, and the arguments and result of `trace_versions`.
        reads: per stage, what the micro-batches read.
        rule: the weight rule.

    Returns:
        The numbers, and a finding for every op that reads a version which does not exist.
    """
    maximum = [pipelines] * len(trace.stages)
    counter = _VersionCounter(trace, reads, rule)
    for rank, row in enumerate(rows):
        copies: dict[int, list[_WeightCopy]] = {}
        for op, batch in row:
            stage = op.stage
            if stage not in copies:
                copies[stage] = [_WeightCopy() for _ in range(pipelines)]
            counter.apply(rank, op, copies[stage][batch % pipelines])
            if op.kind is Kind.U:  # no other op adds a version
                version_count = sum(len(copy.versions) for copy in copies[stage])
                maximum[stage] = max(maximum[stage], version_count)
    return maximum, counter.findings
