"""Dependency rules: what must have finished before an op may start.

This table is the only place that defines predecessors; verify, simulate, draw and lower read it.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.schedule.op import Kind, Op
from penstock.schedule.slicing import Slicing

#: Per kind, the required inputs: (kinds of which one must have finished, stage offset), for the
#: same micro-batch. A B counts as an I too. An offset beyond either end of the chain requires
#: nothing.
RULES: dict[Kind, tuple[tuple[tuple[Kind, ...], int], ...]] = {
    # The activation comes from the previous stage.
    Kind.F: (((Kind.F,), -1),),
    # The stage's own saved activations, and the gradient from the next stage.
    Kind.B: (
        ((Kind.F,), 0),
        ((Kind.B, Kind.I), +1),
    ),
    # As B, but for the input gradient only (Qi et al. 2024, section 2).
    Kind.I: (
        ((Kind.F,), 0),
        ((Kind.B, Kind.I), +1),
    ),
    # May run late: no other stage waits for it.
    Kind.W: (((Kind.I,), 0),),
    # The place in the program matters for these, which verify checks: U after the stage's
    # gradients, E after its F, L after its E and before the backward. The E of the partner and the
    # L of the owner wait for a message: see `lower`.
    Kind.U: (),
    Kind.E: (),
    Kind.L: (),
}

#: Required inputs within the same stage if sequences are cut into slices: (kinds of which one must
#: have finished, slice offset).
SLICE_RULES: dict[Kind, tuple[tuple[Kind, ...], int]] = {
    # Attention reads the keys and values of earlier tokens,
    Kind.F: ((Kind.F,), -1),
    # and later tokens send gradients back to them (Li et al. 2021, TeraPipe, section 3).
    Kind.B: (
        (Kind.B, Kind.I),
        +1,
    ),
    Kind.I: ((Kind.B, Kind.I), +1),
}


def needs(op: Op, stages: int, slicing: Slicing | None = None) -> Iterator[tuple[Op, ...]]:
    """Yield the inputs of `op`, each as a tuple of alternatives.

    Exactly one op of each tuple exists in a sound schedule.

    Args:
        op: the op.
        stages: number of stages of the schedule.
        slicing: how micro-batches are cut into slices, if they are.
    """
    for kinds, offset in RULES[op.kind]:
        stage = op.stage + offset
        if 0 <= stage < stages:
            yield tuple(Op(kind, stage, op.micro_batch) for kind in kinds)
    if slicing is not None and slicing.along == "tokens" and op.kind in SLICE_RULES:
        kinds, offset = SLICE_RULES[op.kind]
        neighbour = slicing.neighbour(op.micro_batch, offset)
        if neighbour is not None:
            yield tuple(Op(kind, op.stage, neighbour) for kind in kinds)


def feeds(op: Op, stages: int) -> tuple[Kind, int] | None:
    """Return what `op` sends to another stage: the kind of value and the receiving stage.

    An activation (`Kind.F`) goes to the next stage, an input gradient (`Kind.B`) to the previous
    one. None if the op has no such output.
    """
    if op.kind is Kind.F and op.stage + 1 < stages:
        return Kind.F, op.stage + 1
    if op.kind in (Kind.B, Kind.I) and op.stage > 0:
        return Kind.B, op.stage - 1
    return None


def takes(op: Op, stages: int) -> tuple[Kind, int] | None:
    """Return what `op` receives from another stage: the kind of value and the producing stage.

    The inverse of `feeds`. None if the op has no such input.
    """
    if op.kind is Kind.F and op.stage > 0:
        return Kind.F, op.stage - 1
    if op.kind in (Kind.B, Kind.I) and op.stage + 1 < stages:
        return Kind.B, op.stage + 1
    return None
