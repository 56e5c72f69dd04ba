"""The interpreter: plays one rank's lowered program. It knows ops and transfers, never a schedule's
name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from penstock.errors import DeadlineExceeded, PeerFailed, RunError, StageFailed
from penstock.optim.stage_weights import StageWeights
from penstock.runtime.batch import Batch
from penstock.runtime.board import Board
from penstock.runtime.clock import Clock, Mark
from penstock.runtime.copies import Copies
from penstock.runtime.held import ActivationMeter, optimizer_bytes
from penstock.runtime.stage import Stage
from penstock.runtime.steps import Step, steps_of
from penstock.runtime.under_way import UnderWay
from penstock.schedule.lower import Action, Message
from penstock.schedule.op import HANDING, Kind, Op
from penstock.transport.payload import Payload
from penstock.transport.transport import Arrival, Transport, TransportLost, TransportTimeout

T = TypeVar("T")

#: Programs whose steps are remembered: those of small batches and of evaluation are others.
_MOST_PROGRAMS = 64


@dataclass
class Interpreter:
    """One rank: its stages, its end of the links, its place on the board.

    `copies`: those of its stages that others hold too and that meet them at every U. `weights`: in
    a stream, what lets its stages read the versions that they should. `told`: called when a
    micro-batch's loss is there.
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
    held: ActivationMeter = field(default_factory=ActivationMeter)
    marks: dict[Op, tuple[Mark, Mark]] = field(default_factory=dict)
    _arrivals: dict[Message, Arrival] = field(default_factory=dict)
    _values: dict[Message, Payload] = field(default_factory=dict)
    _taken_in: dict[tuple[int, int], Payload] = field(default_factory=dict)
    _updating: bool = True
    _streaming: bool = True
    _at_step: int = 0
    _computing: bool = False
    _started: Mark = None
    _stands_at: int | str = ""
    _since: float = 0.0
    _programs: dict[int, tuple[Sequence[Action], tuple[Step, ...]]] = field(default_factory=dict)

    def play(self, program: Sequence[Action], batch: Batch, *, update: bool = True) -> None:
        """Run the program on one batch; without `update`, a U adds up the gradients of copies and
        leaves the weights.

        Raises:
            StageFailed: an op raised.
            PeerFailed: what an op needs will never come, because another rank failed.
            DeadlineExceeded: it did not come in time.
        """
        self.begin()
        self._updating, self._streaming = update, False
        kept = self._programs.get(id(program))
        if kept is None or kept[0] is not program:
            if len(self._programs) > _MOST_PROGRAMS:
                self._programs.clear()
            kept = self._programs[id(program)] = program, steps_of(program, self.stage_count)
        self._run(kept[1], UnderWay.alone(batch))
        self.finish()

    def begin(self) -> None:
        """Nothing has happened yet, as far as anybody will ask; what comes is a stream, which
        updates.
        """
        self._updating = self._streaming = True
        self.marks.clear()
        self.clock.begin()
        self.held.begin()

    def go_on(self, actions: Sequence[Action], batches: UnderWay) -> None:
        """Run some more of a program, of which all batches that it names have come. Raises as
        `play`.
        """
        self.clock.begin()
        self._run(steps_of(actions, self.stage_count), batches)

    def _run(self, steps: Sequence[Step], batches: UnderWay) -> None:
        step: Step | None = None
        try:
            for step in steps:
                self._step(step, batches)
        except BaseException as error:
            self.forget()
            meaning = self._meaning(error, step)
            if meaning is error:
                raise
            raise meaning from error
        self.board.doing("is between batches")

    def release(self, before: int) -> None:
        """Let go of what was sent of micro-batches below `before` (see `Transport.release`). Raises
        as `play`.
        """
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
        """The most that the rank has held: weights in all their versions, their gradients,
        optimizer state, and activations.
        """
        fixed = 0
        whole: dict[int, int] = {}  # stages of a rank that use the same weight hold it once
        gradients: dict[int, int] = {}
        for index, stage in self.stages.items():
            update, weights = stage.update, self.weights.get(index)
            whole |= {id(tensor): tensor.nbytes for tensor in stage.tensors()}
            gradients |= {
                id(parameter): parameter.nbytes
                for parameter in (*update.parameters, *update.borrowed)
            }
            optimizers = [update.optimizer, *(() if weights is None else weights.more_optimizers())]
            more = (
                0
                if weights is None
                else weights.held_bytes() - sum(parameter.nbytes for parameter in update.parameters)
            )
            fixed += more + sum(map(optimizer_bytes, optimizers))
        return fixed + sum(whole.values()) + sum(gradients.values()) + self.held.peak

    def seconds(self, ops: Sequence[Op]) -> list[tuple[float, float]]:
        """Start and end of some ops that have been run."""
        return [
            (self.clock.seconds(start), self.clock.seconds(end))
            for start, end in map(self.marks.__getitem__, ops)
        ]

    def _step(self, step: Step, batches: UnderWay) -> None:
        """One op, with its receives and sends. What goes wrong meanwhile is found in `_stands_at`."""
        for peer, message in step.posts:
            if (expected := batches.find(message.micro_batch)) is not None:
                self._stands_at, self._since = peer, time.monotonic()
                self._arrivals[message] = self.transport.post(
                    peer, message, expected[0].forms[expected[1]]
                )
        op = step.op
        if op is None or step.kind is Kind.U:
            if op is not None:
                self._begun(step)
                self._update(op)
                self._ended(op)
        elif (found := batches.find(step.number)) is not None:
            batch, number = found
            self._at_step = batch.step
            arrived = None if step.input_message is None else self._arrived(step, batch)
            self._begun(step)
            made = self._compute(op, batch, number, arrived)
            self._ended(op)
            if made is not None and step.output_message is not None:
                self._values[step.output_message] = made
        for peer, message in step.sends:
            if (expected := batches.find(message.micro_batch)) is not None:
                self._stands_at, self._since = peer, time.monotonic()
                self.transport.send(
                    peer, message, self._values.pop(message), expected[0].forms[expected[1]]
                )

    def _begun(self, step: Step) -> None:
        self.board.doing(step.text)
        self._computing = True
        self._started = self.clock.mark()

    def _ended(self, op: Op) -> None:
        self.marks[op] = self._started, self.clock.mark()
        self._computing = False

    def _arrived(self, step: Step, batch: Batch) -> Payload | None:
        """What the op takes from another stage or rank, waited for."""
        message = step.input_message
        assert message is not None
        if (here := self._values.pop(message, None)) is not None:
            return here
        arrival = self._arrivals.pop(message, None)
        if arrival is None and step.kind in HANDING:
            return None
        assert arrival is not None
        if batch.pending_check is not None:
            batch.checksum()  # while the message is on its way
        self.board.doing(step.waits)
        self._stands_at, self._since = step.maker, time.monotonic()
        return arrival.wait()

    def _meaning(self, error: BaseException, step: Step | None) -> BaseException:
        """An error in a step, as others have to hear of it."""
        computing, self._computing = self._computing, False
        if isinstance(error, (TransportTimeout, TransportLost)):
            stands_at = (
                self._stands_at if isinstance(self._stands_at, str) else f"rank {self._stands_at}"
            )
            return self._stopped(error, stands_at, time.monotonic() - self._since)
        if (
            not computing
            or step is None
            or isinstance(error, (PeerFailed, DeadlineExceeded))
            or not isinstance(error, Exception)
        ):
            return error
        return StageFailed(
            self.rank, step.stage, str(step.op), self._at_step, f"{type(error).__name__}: {error}"
        )

    def _compute(
        self, op: Op, batch: Batch, number: int, arrived: Payload | None
    ) -> Payload | None:
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
        """What decides what a stage's ops read: outside the stream they read the parameters as
        these are.
        """
        return self.weights.get(stage) if self._streaming else None

    def _update(self, op: Op) -> None:
        if op.stage in self.copies:
            self.board.doing(f"waits for the other copies at {op}")
            self.copies[op.stage].all_reduce()
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
        except (TransportTimeout, TransportLost) as error:
            raise self._stopped(error, waited_for, time.monotonic() - started) from error

    def _stopped(
        self, error: TransportTimeout | TransportLost, waited_for: str, waited_s: float
    ) -> RunError:
        if isinstance(error, TransportTimeout):
            return DeadlineExceeded(self.rank, waited_for, waited_s, self.board.elsewhere())
        reason = self.board.failure(patience_s=2.0)
        return PeerFailed(
            self.rank, waited_for, reason or "the rank that was to send it is gone without a word"
        )
