"""Rules of ops: what must have finished before an op may start, and what it then holds.

These tables are the only place that defines predecessors, the values that go from stage to stage,
and the life of activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from penstock.schedule.op import BACKWARD_ENDS, BACKWARD_STARTS, Kind, Op
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
        (BACKWARD_STARTS, +1),
    ),
    # As B, but for the input gradient only (Qi et al. 2024, section 2).
    Kind.I: (
        ((Kind.F,), 0),
        (BACKWARD_STARTS, +1),
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
    Kind.B: (BACKWARD_STARTS, +1),
    Kind.I: (BACKWARD_STARTS, +1),
}


class Flow(NamedTuple):
    """A kind of value that goes from stage to stage.

    Attributes:
        offset: from the stage that produces the value to the one that consumes it.
        producers: the kinds of op that produce it.
        consumers: the kinds of op that consume it.
    """

    offset: int
    producers: tuple[Kind, ...]
    consumers: tuple[Kind, ...]


def _flows() -> dict[Kind, Flow]:
    """Return the flows that `RULES` imply, by the first kind of op that produces them."""
    flows: dict[Kind, Flow] = {}
    for consumer, inputs in RULES.items():
        for producers, offset in inputs:
            if offset:
                value = producers[0]
                others = flows[value].consumers if value in flows else ()
                flows[value] = Flow(-offset, producers, (*others, consumer))
    return flows


#: Values that go from stage to stage: activations (F), and gradients of a stage's input (B).
FLOWS = _flows()

_PRODUCED = {kind: value for value, flow in FLOWS.items() for kind in flow.producers}
_CONSUMED = {kind: value for value, flow in FLOWS.items() for kind in flow.consumers}

#: By how many micro-batches an op changes what its rank holds the activations of. A micro-batch
#: is *in flight* from its forward to the end of its backward. While it is evicted, the partner
#: holds its activations: for E and L in the partner's program the sign is the opposite.
ACTIVATION_CHANGE = dict.fromkeys(Kind, 0) | {
    Kind.F: 1,
    Kind.E: -1,
    Kind.L: 1,
    **dict.fromkeys(BACKWARD_ENDS, -1),
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
    value = _PRODUCED.get(op.kind)
    if value is None:
        return None
    stage = op.stage + FLOWS[value].offset
    return (value, stage) if 0 <= stage < stages else None


def takes(op: Op, stages: int) -> tuple[Kind, int] | None:
    """Return what `op` receives from another stage: the kind of value and the producing stage.

    The inverse of `feeds`. None if the op has no such input.
    """
    value = _CONSUMED.get(op.kind)
    if value is None:
        return None
    stage = op.stage - FLOWS[value].offset
    return (value, stage) if 0 <= stage < stages else None
