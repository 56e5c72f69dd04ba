"""Rules on completeness: every op that a schedule must have, once, on one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from penstock.errors import Finding
from penstock.schedule.op import ACTIVATION_MOVES, Kind, Op, Schedule


def completeness_findings(schedule: Schedule) -> Iterator[Finding]:
    """Check that each (stage, micro-batch) has one F, and one B or one I and one W, on one rank."""
    ranks_of = _ranks_of_ops(schedule)
    if not any(op.kind is Kind.F for op in ranks_of):
        yield Finding("one forward", "the schedule has no forward at all")
        return
    yield from _numbers_and_duplicates(ranks_of)
    stages = sorted({op.stage for op in ranks_of})
    micro_batches = sorted({op.micro_batch for op in ranks_of if op.kind is not Kind.U})
    # A gap in the numbers is one finding, however large it is; the checks below visit only numbers
    # that an op has.
    yield from _number_gap("stage", stages, "{}F0")
    yield from _number_gap("micro-batch", micro_batches, f"{stages[0]}F{{}}")
    for stage in stages:
        for micro_batch in micro_batches:
            yield from _forward_and_backward(ranks_of, stage, micro_batch)


def _ranks_of_ops(schedule: Schedule) -> dict[Op, list[int]]:
    """Return the ranks of every op except E and L."""
    ranks_of: dict[Op, list[int]] = {}
    for rank, program in enumerate(schedule.programs):
        for op in program:
            if op.kind not in ACTIVATION_MOVES:
                ranks_of.setdefault(op, []).append(rank)
    return ranks_of


def _numbers_and_duplicates(ranks_of: Mapping[Op, Sequence[int]]) -> Iterator[Finding]:
    """Check that no number is negative, and that no op but U occurs twice."""
    for op, ranks in ranks_of.items():
        if op.stage < 0 or op.micro_batch < 0:
            yield Finding(
                "numbers",
                f"{op} on rank {ranks[0]}: stages and micro-batches count from 0",
                ranks[0],
                str(op),
            )
        # Copies of a stage share their U, and nothing else.
        if op.kind is not Kind.U and len(ranks) > 1:
            yield Finding(
                "once",
                f"{op} occurs {len(ranks)} times, on ranks {', '.join(map(str, ranks))}",
                ranks[1],
                str(op),
            )


def _number_gap(quantity: str, numbers: Sequence[int], op_text: str) -> Iterator[Finding]:
    """Report the first missing number of `numbers`, which are sorted.

    Args:
        quantity: "stage" or "micro-batch".
        numbers: the numbers that occur.
        op_text: format string of the missing forward's text.
    """
    for expected, number in enumerate(number for number in numbers if number >= 0):
        if number != expected:
            yield Finding(
                "one forward",
                f"{quantity} {expected} has no op at all, but {quantity} {numbers[-1]} has: they "
                "count from 0 without gaps",
                None,
                op_text.format(expected),
            )
            return


def _forward_and_backward(
    ranks_of: Mapping[Op, Sequence[int]], stage: int, micro_batch: int
) -> Iterator[Finding]:
    """Yield what is wrong with the F, and with the B or the I and W, of one micro-batch."""
    forward, whole, inputs, weights = (
        Op(kind, stage, micro_batch) for kind in (Kind.F, Kind.B, Kind.I, Kind.W)
    )
    if forward not in ranks_of:
        yield Finding(
            "one forward",
            f"{forward} is missing: every stage runs every micro-batch",
            None,
            str(forward),
        )
        return
    forward_rank = ranks_of[forward][0]
    backwards = [op for op in (whole, inputs, weights) if op in ranks_of]
    if whole in backwards and len(backwards) > 1:
        yield Finding(
            "one backward",
            f"stage {stage} has both {whole} and {inputs} or {weights}",
            forward_rank,
            str(whole),
        )
    # What completes the ops that are there; (B,) and (I, W) are complete.
    missing = {(): whole, (inputs,): weights, (weights,): inputs}.get(tuple(backwards))
    if missing is not None:
        yield Finding(
            "one backward",
            f"{missing} is missing for {forward} on rank {forward_rank}",
            forward_rank,
            str(missing),
        )
    for op in backwards:
        if ranks_of[op][0] != forward_rank:
            yield Finding(
                "one rank",
                f"{op} is on rank {ranks_of[op][0]}, but {forward} on rank {forward_rank} "
                "holds its activations",
                ranks_of[op][0],
                str(op),
            )
