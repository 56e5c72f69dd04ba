"""A rank's lowered program as steps: each op with its receives, its input and its sends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.schedule.lower import (
    Action,
    Direction,
    Message,
    Transfer,
    input_message,
    output_message,
)
from penstock.schedule.op import BACKWARD_ENDS, Kind, Op


@dataclass(frozen=True, slots=True)
class Step:
    """One op with the receives posted before it and the sends after it.

    A step without an op has transfers alone.

    Attributes:
        op: the op.
        kind: its kind.
        stage: its stage.
        number: its micro-batch.
        text: the rank's status while it runs the op.
        input_message: the message that the op consumes; None if it consumes none.
        maker: the op that produces this message.
        waits: the rank's status while it waits for the message.
        output_message: the message under which the op's output is stored; None if no op consumes
            it.
        posts: peers and messages of the receives.
        sends: peers and messages of the sends.
        completes: whether it is the last backward of its stage before an update of it, so that the
            gradients are complete.
    """

    op: Op | None
    kind: Kind
    stage: int
    number: int
    text: str
    input_message: Message | None
    maker: str
    waits: str
    output_message: Message | None
    posts: tuple[tuple[int, Message], ...]
    sends: tuple[tuple[int, Message], ...]
    completes: bool = False


def steps_of(actions: Sequence[Action], stages: int) -> tuple[Step, ...]:
    """Return the steps of a program, or of a part of one.

    Args:
        actions: ops and transfers, in order.
        stages: the number of stages.
    """
    steps = list(_steps(actions, stages))
    updated: set[int] = set()
    # From the end: going back from a U, the first backward of its stage is the last before the U.
    for index in range(len(steps) - 1, -1, -1):
        step = steps[index]
        if step.op is None:
            continue
        if step.kind is Kind.U:
            updated.add(step.stage)
        elif step.kind in BACKWARD_ENDS and step.stage in updated:
            updated.discard(step.stage)
            steps[index] = replace(step, completes=True)
    return tuple(steps)


def _steps(actions: Sequence[Action], stages: int) -> Iterator[Step]:
    """Group actions into steps: receives, then at most one op, then sends."""
    posts: list[Transfer] = []
    op: Op | None = None
    sends: list[Transfer] = []
    for action in actions:
        begins = isinstance(action, Op) or action.direction is Direction.RECV
        if begins and (op is not None or sends):
            yield _step(posts, op, sends, stages)
            posts, op, sends = [], None, []
        if isinstance(action, Op):
            op = action
        elif action.direction is Direction.RECV:
            posts.append(action)
        else:
            sends.append(action)
    if actions:  # the last step is still open
        yield _step(posts, op, sends, stages)


def _step(posts: Sequence[Transfer], op: Op | None, sends: Sequence[Transfer], stages: int) -> Step:
    """Build one step."""
    received = None if op is None else input_message(op, stages)
    produced = None if op is None else output_message(op, stages)
    maker = ""
    if received is not None:
        maker = f"{received.stage}{received.kind.value}{received.micro_batch}"
    kind, stage, number = (Kind.U, -1, -1) if op is None else op
    # The texts are made here, once for a program: a rank sets its status at every op.
    return Step(
        op,
        kind,
        stage,
        number,
        f"is at {op}",
        received,
        maker,
        f"waits for {maker}",
        produced,
        tuple((post.peer, post.message) for post in posts),
        tuple((send.peer, send.message) for send in sends),
    )
