"""The rule table: what must have finished before an op may start.

Everybody who needs a predecessor asks here: verify, simulate, draw, lower. Nobody else may mention
one.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.schedule.op import Kind, Op
from penstock.schedule.slicing import Slicing

#: For the same micro-batch: (kinds of which one must have finished, stage offset). A whole B also
#: counts as an I.
#: A stage offset beyond either end of the chain asks for nothing.
RULES: dict[Kind, tuple[tuple[tuple[Kind, ...], int], ...]] = {
    Kind.F: (((Kind.F,), -1),),  # the activation comes from the stage before
    Kind.B: (
        ((Kind.F,), 0),
        ((Kind.B, Kind.I), +1),
    ),  # own activation kept, gradient from the stage after
    Kind.I: (
        ((Kind.F,), 0),
        ((Kind.B, Kind.I), +1),
    ),  # as B, input gradient only (Qi et al. 2024, section 2)
    Kind.W: (((Kind.I,), 0),),  # may be late; nobody downstream waits for it
    # These go by their places in the programs, which verify checks: U after the stage's gradients,
    # E after its F,
    # L after its E and before the backward. What a partner's E and an owner's L wait for is a
    # message: see `lower`.
    Kind.U: (),
    Kind.E: (),
    Kind.L: (),
}

#: With slices of sequences, for the same stage: (kinds of which one must have finished, slice
#: offset).
SLICE_RULES: dict[Kind, tuple[tuple[Kind, ...], int]] = {
    Kind.F: ((Kind.F,), -1),  # attention reads the keys and values of earlier tokens
    Kind.B: (
        (Kind.B, Kind.I),
        +1,
    ),  # and later tokens send gradients back to them (Li et al. 2021, TeraPipe, section 3)
    Kind.I: ((Kind.B, Kind.I), +1),
}


def needs(op: Op, stages: int, slicing: Slicing | None = None) -> Iterator[tuple[Op, ...]]:
    """What `op` waits for: of each yielded group exactly one op exists in a sound schedule of
    `stages` stages.
    """
    for kinds, offset in RULES[op.kind]:
        stage = op.stage + offset
        if 0 <= stage < stages:
            yield tuple(Op(kind, stage, op.micro_batch) for kind in kinds)
    if slicing is not None and slicing.along == "tokens" and op.kind in SLICE_RULES:
        kinds, offset = SLICE_RULES[op.kind]
        other = slicing.neighbour(op.micro_batch, offset)
        if other is not None:
            yield tuple(Op(kind, op.stage, other) for kind in kinds)


def feeds(op: Op, stages: int) -> tuple[Kind, int] | None:
    """What leaves the stage when `op` ends: the kind of value and the stage that takes it, if any.

    A forward's activation goes up (`Kind.F`), an input gradient goes down (`Kind.B`).
    """
    if op.kind is Kind.F and op.stage + 1 < stages:
        return Kind.F, op.stage + 1
    if op.kind in (Kind.B, Kind.I) and op.stage > 0:
        return Kind.B, op.stage - 1
    return None


def takes(op: Op, stages: int) -> tuple[Kind, int] | None:
    """What `op` takes from another stage: the kind of value and the stage that makes it, if any.
    The inverse of `feeds`.
    """
    if op.kind is Kind.F and op.stage > 0:
        return Kind.F, op.stage - 1
    if op.kind in (Kind.B, Kind.I) and op.stage + 1 < stages:
        return Kind.B, op.stage + 1
    return None
