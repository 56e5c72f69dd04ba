"""A rank's lowered program as steps: each op with its receives, its input and its sends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.schedule.lower import Action, Direction, Message, Transfer
from penstock.schedule.op import ACTIVATION_MOVES, Kind, Op
from penstock.schedule.rules import feeds, takes


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


def steps_of(actions: Sequence[Action], stages: int) -> tuple[Step, ...]:
    """Return the steps of a program, or of a part of one.

    Args:
        actions: ops and transfers, in order.
        stages: the number of stages.
    """
    return tuple(_steps(actions, stages))


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
    input_message, output_message = (None, None) if op is None else _messages(op, stages)
    maker = ""
    if input_message is not None:
        maker = f"{input_message.stage}{input_message.kind.value}{input_message.micro_batch}"
    kind, stage, number = (Kind.U, -1, -1) if op is None else op
    return Step(
        op,
        kind,
        stage,
        number,
        f"is at {op}",
        input_message,
        maker,
        f"waits for {maker}",
        output_message,
        tuple((post.peer, post.message) for post in posts),
        tuple((send.peer, send.message) for send in sends),
    )


def _messages(op: Op, stages: int) -> tuple[Message | None, Message | None]:
    """Return the messages that an op consumes and produces; None for those that it does not."""
    if op.kind is Kind.U:
        return None, None
    if op.kind in ACTIVATION_MOVES:
        # An op that moves activations consumes and produces a message of its own kind.
        message = Message(op.kind, op.stage, op.micro_batch)
        return message, message
    source = takes(op, stages)
    consumer = feeds(op, stages)
    return (
        None if source is None else Message(*source, op.micro_batch),
        None if consumer is None else Message(consumer[0], op.stage, op.micro_batch),
    )
