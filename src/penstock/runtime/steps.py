"""A rank's lowered program as the interpreter takes it: every op with what it waits for and who
gets what it makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.schedule.lower import Action, Direction, Message, Transfer
from penstock.schedule.op import HANDING, Kind, Op
from penstock.schedule.rules import feeds, takes


@dataclass(frozen=True, slots=True)
class Step:
    """One op, the receives that are posted before it and the sends after it; without an op,
    transfers alone.

    Attributes:
        op, kind, stage, number: the op, and its parts.
        text: what the rank is at.
        taken: the message that the op takes, if it takes one; waits: what the rank waits for until
        it is there. fed: under which name what the op makes is kept, if somebody takes it. posts,
        sends: peers and messages.
    """

    op: Op | None
    kind: Kind
    stage: int
    number: int
    text: str
    taken: Message | None
    maker: str
    waits: str
    fed: Message | None
    posts: tuple[tuple[int, Message], ...]
    sends: tuple[tuple[int, Message], ...]


def steps_of(actions: Sequence[Action], stages: int) -> tuple[Step, ...]:
    """The steps of a program, or of a part of one."""
    return tuple(_steps(actions, stages))


def _steps(actions: Sequence[Action], stages: int) -> Iterator[Step]:
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
    if posts or op is not None or sends:
        yield _step(posts, op, sends, stages)


def _step(posts: Sequence[Transfer], op: Op | None, sends: Sequence[Transfer], stages: int) -> Step:
    taken = fed = None
    if op is not None and op.kind is not Kind.U:
        whence = (op.kind, op.stage) if op.kind in HANDING else takes(op, stages)
        taken = None if whence is None else Message(*whence, op.micro_batch)
        whither = (op.kind, op.stage) if op.kind in HANDING else feeds(op, stages)
        fed = None if whither is None else Message(whither[0], op.stage, op.micro_batch)
    maker = "" if taken is None else f"{taken.stage}{taken.kind.value}{taken.micro_batch}"
    kind, stage, number = (Kind.U, -1, -1) if op is None else op
    return Step(
        op,
        kind,
        stage,
        number,
        f"is at {op}",
        taken,
        maker,
        f"waits for {maker}",
        fed,
        tuple((post.peer, post.message) for post in posts),
        tuple((send.peer, send.message) for send in sends),
    )
