"""The interpreter: plays one rank's lowered program. It knows ops and transfers, never a schedule's name."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from penstock.errors import DeadlineExceeded, PeerFailed, StageFailed
from penstock.runtime.batch import Batch
from penstock.runtime.board import Board
from penstock.runtime.clock import Clock, Mark
from penstock.runtime.copies import Copies
from penstock.runtime.stage import Stage
from penstock.schedule.lower import Action, Direction, Message, Transfer
from penstock.schedule.op import HANDING, Kind, Op
from penstock.schedule.rules import feeds, takes
from penstock.transport.payload import Payload
from penstock.transport.transport import Arrival, Transport, TransportLost, TransportTimeout

T = TypeVar("T")


@dataclass
class Interpreter:
    """One rank: its stages, its end of the links, its place on the board. `copies`: those of its stages that others hold too."""

    rank: int
    stages: Mapping[int, Stage]
    stage_count: int
    transport: Transport
    board: Board
    clock: Clock
    copies: Mapping[int, Copies] = field(default_factory=dict)
    marks: list[tuple[Op, Mark, Mark]] = field(default_factory=list)
    _taken_in: dict[tuple[int, int], Payload] = field(default_factory=dict)
    _updating: bool = True

    def play(self, program: Sequence[Action], batch: Batch, *, update: bool = True) -> None:
        """Run the program on a batch; without `update`, a U adds up the gradients of copies and leaves the weights.

        Raises:
            StageFailed: an op raised.
            PeerFailed: what an op needs will never come, because another rank failed.
            DeadlineExceeded: it did not come in time.
        """
        self.marks.clear()
        self._taken_in.clear()
        arrivals: dict[Message, Arrival] = {}
        values: dict[Message, Payload] = {}
        self._updating = update
        try:
            for action in program:
                if isinstance(action, Transfer):
                    self._transfer(action, batch, arrivals, values)
                else:
                    self._op(action, batch, arrivals, values)
            self._guard("its sends to leave", self.transport.drain)
        except BaseException:
            for stage in self.stages.values():
                stage.forget()
            for copies in self.copies.values():
                copies.forget()
            raise
        self.board.doing("is between batches")

    def guard(self, rank: int, action: Callable[[], T]) -> T:
        """Do what may wait for `rank`.

        Raises:
            PeerFailed, DeadlineExceeded: see `play`.
        """
        return self._guard(f"rank {rank}", action)

    def seconds(self) -> list[tuple[float, float]]:
        """Start and end of the ops of the last batch, in program order."""
        return [(self.clock.seconds(start), self.clock.seconds(end)) for _, start, end in self.marks]

    def _transfer(self, action: Transfer, batch: Batch, arrivals: dict[Message, Arrival],
                  values: dict[Message, Payload]) -> None:  # fmt: skip
        message, peer = action.message, action.peer
        if action.direction is Direction.RECV:
            arrivals[message] = self._guard(f"rank {peer}", lambda: self.transport.post(peer, message, batch.signature))
        else:
            payload = values.pop(message)
            self._guard(f"rank {peer}", lambda: self.transport.send(peer, message, payload, batch.signature))

    def _op(self, op: Op, batch: Batch, arrivals: dict[Message, Arrival], values: dict[Message, Payload]) -> None:
        arrived: Payload | None = None
        taken = (op.kind, op.stage) if op.kind in HANDING else takes(op, self.stage_count)
        if taken is not None:
            message = Message(*taken, op.micro_batch)
            if message in values:
                arrived = values.pop(message)
            elif op.kind not in HANDING or message in arrivals:
                maker = f"{taken[1]}{taken[0].value}{op.micro_batch}"
                self.board.doing(f"waits for {maker}")
                arrived = self._guard(maker, arrivals.pop(message).wait)
        self.board.doing(f"is at {op}")
        start = self.clock.mark()
        try:
            made = self._compute(op, batch, arrived)
        except (PeerFailed, DeadlineExceeded):
            raise
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            raise StageFailed(self.rank, op.stage, str(op), batch.step, cause) from error
        self.marks.append((op, start, self.clock.mark()))
        if made is None:
            return
        fed = (op.kind, op.stage) if op.kind in HANDING else feeds(op, self.stage_count)
        if fed is not None:
            values[Message(fed[0], op.stage, op.micro_batch)] = made

    def _compute(self, op: Op, batch: Batch, arrived: Payload | None) -> Payload | None:
        if op.kind in HANDING:
            return self._hand(op, arrived)
        stage = self.stages[op.stage]
        match op.kind:
            case Kind.F:
                return stage.forward(batch, op.micro_batch, arrived)
            case Kind.B:
                return stage.backward(batch, op.micro_batch, arrived)
            case Kind.I:
                return stage.input_grad(batch, op.micro_batch, arrived)
            case Kind.W:
                stage.weight_grad(op.micro_batch)
            case Kind.U:
                if op.stage in self.copies:
                    self.board.doing(f"waits for the other copies at {op}")
                    self.copies[op.stage].meet(batch.signature)
                if self._updating:
                    stage.update.step()
        return None

    def _hand(self, op: Op, arrived: Payload | None) -> Payload | None:
        """Evict and load, on either side: who gets nothing gives."""
        place = op.stage, op.micro_batch
        if op.kind is Kind.E:
            if arrived is None:
                return self.stages[op.stage].evict(op.micro_batch)
            self._taken_in[place] = arrived
        elif arrived is None:
            return self._taken_in.pop(place)
        else:
            self.stages[op.stage].load(op.micro_batch, arrived)
        return None

    def _guard(self, waited_for: str, action: Callable[[], T]) -> T:
        """Turn what a transport raises into what happened."""
        started = time.monotonic()
        try:
            return action()
        except TransportTimeout as error:
            waited = time.monotonic() - started
            raise DeadlineExceeded(self.rank, waited_for, waited, self.board.elsewhere()) from error
        except TransportLost as error:
            reason = self.board.failure(patience_s=2.0)
            raise PeerFailed(self.rank, waited_for, reason or "the rank that was to send it is gone without a word") from error
