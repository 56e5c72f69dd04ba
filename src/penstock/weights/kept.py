"""Kept: which versions of its weights every rank keeps, op by op; and whether all that is read is
there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.errors import Finding
from penstock.schedule.op import HANDING, Kind, Op
from penstock.weights.catalogue import WeightRule
from penstock.weights.reads import Reads
from penstock.weights.walk import Row, Walk


@dataclass
class _Copy:
    """One copy of a stage's weights on a rank: the versions kept, how often what is in flight reads
    them, what the next F reads.

    What is in flight holds what its forward has read, too, even if its backward reads another:
    saved activations refer to it.
    """

    newest: int = 0
    kept: set[int] = field(default_factory=lambda: {0})
    reading: Counter[int] = field(default_factory=Counter)
    next_forward: float = 0

    def let_go(self) -> None:
        """Keep the newest, what something in flight reads, and what the next F reads and all after
        that.
        """
        if len(self.kept) > 1:
            self.kept = {
                v
                for v in self.kept
                if v == self.newest or v >= self.next_forward or self.reading[v]
            }


@dataclass(frozen=True)
class _Count:
    """The count, and what it needs to know."""

    walk: Walk
    reads: Sequence[Mapping[int, Reads]]
    rule: WeightRule
    findings: list[Finding] = field(default_factory=list)

    def run(self, rank: int, op: Op, copy: _Copy) -> None:
        """Move one copy of the weights on by an op."""
        kind, stage, number = op
        if kind is Kind.U:
            copy.newest += 1
            copy.kept.add(copy.newest)
        elif number not in self.reads[stage]:
            return  # the rule has refused its place
        elif kind is Kind.F:
            read = self.reads[stage][number]
            self._check(rank, op, copy, read.forward)
            if read.backward <= copy.newest and read.backward != read.forward:
                self._check(rank, op, copy, read.backward)
            copy.reading.update((read.forward, read.backward))
            after = self.walk.standings[stage][number].after
            following = None if after is None else self.reads[stage].get(after)
            copy.next_forward = math.inf if following is None else following.forward
        else:
            read = self.reads[stage][number]
            if (
                kind is not Kind.W and read.backward > copy.newest
            ):  # what was gone at its F is told there
                self._check(rank, op, copy, read.backward)
            if kind is not Kind.I:
                copy.reading.subtract((read.forward, read.backward))
        if self.rule.one_version:
            copy.kept = {copy.newest}
        else:
            copy.let_go()

    def _check(self, rank: int, op: Op, copy: _Copy, version: int) -> None:
        """Note it if a version that an op reads is not there, nor a prediction that was made of it."""
        if version in copy.kept or (self.rule.one_version and self._predicted(op, version)):
            return
        what = f"{op} on rank {rank} reads version {version} of stage {op.stage}"
        if version > copy.newest:
            why = f"where the newest is {copy.newest}: another update has to come before it"
        else:
            kept = ", ".join(map(str, sorted(copy.kept)))
            why = f"which is gone: kept is {kept}; a version goes when nothing in flight reads it, and the next F reads a newer one"
        self.findings.append(Finding("weights", f"{self.rule.name}: {what}, {why}", rank, str(op)))

    def _predicted(self, op: Op, version: int) -> bool:
        read, share = (
            self.reads[op.stage][op.micro_batch],
            self.walk.share(op.stage, op.micro_batch),
        )
        ahead, at = (
            (read.forward_ahead, share.at_forward)
            if op.kind is Kind.F
            else (read.backward_ahead, share.at_backward)
        )
        return ahead > 0 and version == at


def versions_held(
    rows: Sequence[Row],
    walk: Walk,
    reads: Sequence[Mapping[int, Reads]],
    rule: WeightRule,
    pipelines: int = 1,
) -> tuple[list[int], list[Finding]]:
    """Per stage, the most versions that any of its ranks keeps at once, over all its copies of the
    weights, counted after each op.

    A U lets go of what nothing in flight and no later F reads, and then makes the new version.
    `rule.one_version` has one only.

    Args:
        rows, walk, pipelines: programs, and what was found out about them.
        reads: per stage, what the micro-batches read.
        rule: theirs.

    Returns:
        The numbers, and a finding for every op that reads a version which is not there.
    """
    most = [pipelines] * len(walk.standings)
    count = _Count(walk, reads, rule)
    for rank, row in enumerate(rows):
        copies: dict[int, list[_Copy]] = {}
        for op, batch in row:
            if op.kind in HANDING:
                continue
            stage = op.stage
            if stage not in copies:
                copies[stage] = [_Copy() for _ in range(pipelines)]
            count.run(rank, op, copies[stage][batch % pipelines])
            if op.kind is Kind.U:  # nothing else makes one
                most[stage] = max(most[stage], sum(len(copy.kept) for copy in copies[stage]))
    return most, count.findings
