"""The interpreter: plays one rank's lowered program. It knows ops and transfers, never a schedule's name."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from penstock.errors import DeadlineExceeded, PeerFailed, StageFailed
from penstock.optim.stage_weights import StageWeights
from penstock.runtime.batch import Batch
from penstock.runtime.board import Board
from penstock.runtime.clock import Clock, Mark
from penstock.runtime.copies import Copies
from penstock.runtime.held import Held, optimizer_bytes
from penstock.runtime.stage import Stage
from penstock.runtime.under_way import UnderWay
from penstock.schedule.lower import Action, Direction, Message, Transfer
from penstock.schedule.op import HANDING, Kind, Op
from penstock.schedule.rules import feeds, takes
from penstock.transport.payload import Payload
from penstock.transport.transport import Arrival, Transport, TransportLost, TransportTimeout

T = TypeVar("T")


@dataclass
class Interpreter:
    """One rank: its stages, its end of the links, its place on the board.

    `copies`: those of its stages that others hold too and that meet them at every U. `weights`: in a stream, what lets its stages
    read the versions that they should. `told`: called when a micro-batch's loss is there.
    """

    rank: int
    stages: Mapping[int, Stage]
    stage_count: int
    transport: Transport
    board: Board
    clock: Clock
    copies: Mapping[int, Copies] = field(default_factory=dict)
    weights: Mapping[int, StageWeights] = field(default_factory=dict)
    told: Callable[[Batch], None] | None = None
    held: Held = field(default_factory=Held)
    marks: dict[Op, tuple[Mark, Mark]] = field(default_factory=dict)
    _arrivals: dict[Message, Arrival] = field(default_factory=dict)
    _values: dict[Message, Payload] = field(default_factory=dict)
    _taken_in: dict[tuple[int, int], Payload] = field(default_factory=dict)
    _updating: bool = True
    _streaming: bool = True
    _step: int = 0

    def play(self, program: Sequence[Action], batch: Batch, *, update: bool = True) -> None:
        """Run the program on one batch; without `update`, a U adds up the gradients of copies and leaves the weights.

        Raises:
            StageFailed: an op raised.
            PeerFailed: what an op needs will never come, because another rank failed.
            DeadlineExceeded: it did not come in time.
        """
        self.begin()
        self._updating, self._streaming = update, False
        self.go_on(program, UnderWay.alone(batch))
        self.finish()

    def begin(self) -> None:
        """Nothing has happened yet, as far as anybody will ask; what comes is a stream, which updates."""
        self._updating = self._streaming = True
        self.marks.clear()
        self.held.begin()

    def go_on(self, actions: Sequence[Action], batches: UnderWay) -> None:
        """Run some more of a program, of which all batches that it names have come. Raises as `play`."""
        try:
            for action in actions:
                if isinstance(action, Transfer):
                    self._transfer(action, batches)
                else:
                    self._op(action, batches)
        except BaseException:
            self.forget()
            raise
        self.board.doing("is between batches")

    def release(self, before: int) -> None:
        """Let go of what was sent of micro-batches below `before` (see `Transport.release`). Raises as `play`."""
        self._guard("its sends to leave", lambda: self.transport.release(before))

    def finish(self) -> None:
        """Stand until all that was sent has left: nothing is under way any more. Raises as `play`."""
        try:
            self._guard("its sends to leave", self.transport.drain)
        except BaseException:
            self.forget()
            raise

    def forget(self) -> None:
        """Drop what unfinished batches have left."""
        for held in (self._arrivals, self._values, self._taken_in):
            held.clear()
        for stage in self.stages.values():
            stage.forget()
        for copies in self.copies.values():
            copies.forget()

    def guard(self, rank: int, action: Callable[[], T]) -> T:
        """Do what may wait for `rank`.

        Raises:
            PeerFailed, DeadlineExceeded: see `play`.
        """
        return self._guard(f"rank {rank}", action)

    def peak_bytes(self) -> int:
        """The most that the rank has held: weights in all their versions, their gradients, optimizer state, and activations."""
        fixed = 0
        for index, stage in self.stages.items():
            weights = self.weights.get(index)
            trained = sum(parameter.nbytes for parameter in stage.update.parameters)
            versions = trained if weights is None else weights.held_bytes()
            optimizers = [stage.update.optimizer, *(() if weights is None else weights.more_optimizers())]
            untrained, gradients = stage.weight_bytes() - trained, trained
            fixed += untrained + versions + gradients + sum(map(optimizer_bytes, optimizers))
        return fixed + self.held.peak

    def seconds(self, ops: Sequence[Op]) -> list[tuple[float, float]]:
        """Start and end of some ops that have been run."""
        return [(self.clock.seconds(start), self.clock.seconds(end)) for start, end in map(self.marks.__getitem__, ops)]

    def _transfer(self, action: Transfer, batches: UnderWay) -> None:
        message, peer = action.message, action.peer
        found = batches.find(message.micro_batch)
        if found is None:
            return
        batch, number = found
        form = batch.forms[number]
        if action.direction is Direction.RECV:
            self._arrivals[message] = self._guard(f"rank {peer}", lambda: self.transport.post(peer, message, form))
        else:
            payload = self._values.pop(message)
            self._guard(f"rank {peer}", lambda: self.transport.send(peer, message, payload, form))

    def _op(self, op: Op, batches: UnderWay) -> None:
        if op.kind is Kind.U:
            self._timed(op, lambda: self._update(op))
            return
        found = batches.find(op.micro_batch)
        if found is None:
            return
        batch, number = found
        self._step = batch.step
        arrived = self._arrived(op)
        made = self._timed(op, lambda: self._compute(op, batch, number, arrived))
        if made is None:
            return
        fed = (op.kind, op.stage) if op.kind in HANDING else feeds(op, self.stage_count)
        if fed is not None:
            self._values[Message(fed[0], op.stage, op.micro_batch)] = made

    def _arrived(self, op: Op) -> Payload | None:
        """What the op takes from another stage or rank, waited for."""
        taken = (op.kind, op.stage) if op.kind in HANDING else takes(op, self.stage_count)
        if taken is None:
            return None
        message = Message(*taken, op.micro_batch)
        if message in self._values:
            return self._values.pop(message)
        if op.kind in HANDING and message not in self._arrivals:
            return None
        maker = f"{taken[1]}{taken[0].value}{op.micro_batch}"
        self.board.doing(f"waits for {maker}")
        return self._guard(maker, self._arrivals.pop(message).wait)

    def _timed(self, op: Op, action: Callable[[], T]) -> T:
        self.board.doing(f"is at {op}")
        start = self.clock.mark()
        try:
            made = action()
        except (PeerFailed, DeadlineExceeded):
            raise
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            raise StageFailed(self.rank, op.stage, str(op), self._step, cause) from error
        self.marks[op] = start, self.clock.mark()
        return made

    def _compute(self, op: Op, batch: Batch, number: int, arrived: Payload | None) -> Payload | None:
        if op.kind in HANDING:
            return self._hand(op, batch, number, arrived)
        stage, weights = self.stages[op.stage], self._weights(op.stage)
        if op.kind is Kind.F:
            if weights is not None:
                weights.before_forward(op.micro_batch)
            made = stage.forward(batch, number, arrived)
            if self.told is not None and stage.loss is not None:
                told = self.told
                self._guard("its loss to leave", lambda: told(batch))
            return made
        if weights is not None:
            weights.before_backward(op.micro_batch)
        result: Payload | None = None
        if op.kind is Kind.B:
            result = stage.backward(batch, number, arrived)
        elif op.kind is Kind.I:
            result = stage.input_grad(batch, number, arrived)
        else:
            stage.weight_grad(batch, number)
        if weights is not None and op.kind is not Kind.I:
            weights.finished(op.micro_batch)
        return result

    def _weights(self, stage: int) -> StageWeights | None:
        """What decides what a stage's ops read: outside the stream they read the parameters as these are."""
        return self.weights.get(stage) if self._streaming else None

    def _update(self, op: Op) -> None:
        if op.stage in self.copies:
            self.board.doing(f"waits for the other copies at {op}")
            self.copies[op.stage].meet()
        if not self._updating:
            return
        weights = self._weights(op.stage)
        if weights is not None:
            weights.update(op.micro_batch)
        else:
            self.stages[op.stage].update.step()

    def _hand(self, op: Op, batch: Batch, number: int, arrived: Payload | None) -> Payload | None:
        """Evict and load, on either side: who gets nothing gives."""
        place = op.stage, op.micro_batch
        if op.kind is Kind.E:
            if arrived is None:
                return self.stages[op.stage].evict(batch, number)
            self._taken_in[place] = arrived
            self.held.take(arrived.nbytes)
        elif arrived is None:
            given = self._taken_in.pop(place)
            self.held.give(given.nbytes)
            return given
        else:
            self.stages[op.stage].load(batch, number, arrived)
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
