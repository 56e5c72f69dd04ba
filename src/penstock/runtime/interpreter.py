"""The interpreter, which runs the lowered program of one rank.

It knows ops and transfers only, and nothing about particular schedules.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.batches.batch import Batch
from penstock.batches.in_flight import BatchesInFlight
from penstock.errors import DeadlineExceeded, NonFinite, PeerFailed, RunError, StageFailed
from penstock.optim.stage_weights import StageWeights
from penstock.ranks.clock import Clock, HostClock, Mark
from penstock.ranks.peer_guard import PeerGuard
from penstock.ranks.status_board import Board
from penstock.runtime.out_of_memory import MemoryUse, is_out_of_memory, out_of_memory
from penstock.runtime.program_steps import Step, steps_of
from penstock.runtime.transfer_record import TransferRecord
from penstock.schedule.lower import Action, Message
from penstock.schedule.op import ACTIVATION_MOVES, Kind, Op
from penstock.stage.activation_meter import ActivationMeter, optimizer_bytes
from penstock.stage.finite_check import FiniteCheck
from penstock.stage.replicas import ReplicaGroup
from penstock.stage.stage import Stage
from penstock.transport.payload import Payload
from penstock.transport.transport import Arrival, Transport, TransportLost, TransportTimeout
from penstock.transport.wire import is_lost
from penstock.values.sharded import local_part

if TYPE_CHECKING:
    from penstock.stage.parallel.parallel_stage import ParallelStage

#: Size of the cache of programs. Small batches and evaluation have other programs than training.
_MAX_PROGRAMS = 64


@dataclass(frozen=True, slots=True)
class RunContext:
    """Batches, weight versions and callbacks of one run of a program.

    Attributes:
        batches: the batches in flight.
        updates: whether a U updates the weights; otherwise it only sums the gradients of replicas.
        weights: in a stream, by stage, its weight rule, which provides the weight version that each
            op reads; empty outside a stream, where ops read the parameters.
        on_loss: called when the loss of a micro-batch has been computed.
    """

    batches: BatchesInFlight
    updates: bool = True
    weights: Mapping[int, StageWeights] = field(default_factory=dict)
    on_loss: Callable[[Batch], None] | None = None


@dataclass
class Interpreter:
    """One rank of this process.

    Attributes:
        rank: its number.
        stages: its stages, by index.
        stage_count: number of stages of the whole model.
        transport: its end of the links to other ranks.
        board: where it publishes its status.
        clock: measures the times of ops.
        replicas: by stage, its group of replicas, for stages that average gradients at every U.
        activation_meter: counts the bytes of saved activations of the stages.
        finite: checks losses and gradients; None where nothing is trained.
        predicted_bytes: the rank's peak memory that the plan predicted; None without a plan.
        parallel: by stage, its layers that processes share, if they do.
        marks: by op, the clock marks of its start and end.
    """

    rank: int
    stages: Mapping[int, Stage]
    stage_count: int
    transport: Transport
    board: Board
    clock: Clock
    replicas: Mapping[int, ReplicaGroup]
    activation_meter: ActivationMeter
    finite: FiniteCheck | None = None
    predicted_bytes: int | None = None
    parallel: Mapping[int, ParallelStage] = field(default_factory=dict)
    marks: dict[Op, tuple[Mark, Mark]] = field(default_factory=dict)
    _arrivals: dict[Message, Arrival] = field(default_factory=dict)
    _values: dict[Message, Payload] = field(default_factory=dict)
    # Activations that other ranks have evicted to this one, by stage and micro-batch.
    _stored_activations: dict[tuple[int, int], Payload] = field(default_factory=dict)
    _batch_step: int = 0
    _computing: bool = False
    _op_start: Mark = None
    # The rank, or an op of one, that this rank waits for, and since when.
    _waits_for: int | str = ""
    _waits_since: float = 0.0
    _programs: dict[int, tuple[Sequence[Action], tuple[Step, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.guard = PeerGuard(self.rank, self.board)
        self.transfers = TransferRecord(self.clock, self.transport.arrives_at_once)
        self._on_host = isinstance(self.clock, HostClock)

    def play(self, program: Sequence[Action], batch: Batch, *, update: bool = True) -> None:
        """Run a program on one batch.

        Args:
            program: the ops and transfers of this rank.
            batch: the batch.
            update: whether a U updates the weights; otherwise it only sums the gradients of
                replicas.

        Raises:
            StageFailed: an op raised.
            PeerFailed: another rank failed, so that a message for an op will never arrive.
            DeadlineExceeded: a message did not arrive in time.
        """
        self.begin()
        for parallel in self.parallel.values():
            parallel.begin()
        self._run(self._cached_steps(program), RunContext(BatchesInFlight.alone(batch), update))
        self.finish()
        for parallel in self.parallel.values():
            parallel.end()

    def _cached_steps(self, program: Sequence[Action]) -> Sequence[Step]:
        """Return the steps of a program, which are computed once."""
        cached_program, steps = self._programs.get(id(program), (None, ()))
        # The id may have been reused by another program: compare the object, too.
        if cached_program is not program:
            if len(self._programs) >= _MAX_PROGRAMS:
                self._programs.clear()
            steps = steps_of(program, self.stage_count)
            self._programs[id(program)] = program, steps
        return steps

    def begin(self) -> None:
        """Reset times and memory counters, before a batch or a stream."""
        self.marks.clear()
        self.transfers.clear()
        self.clock.begin()
        self.activation_meter.begin()

    def run_actions(self, actions: Sequence[Action], context: RunContext) -> None:
        """Run the next part of the program of a stream. Raises as `play`.

        Args:
            actions: ops and transfers.
            context: its batches include all that the actions refer to.
        """
        self.clock.begin()
        self._run(steps_of(actions, self.stage_count), context)

    def _run(self, steps: Sequence[Step], context: RunContext) -> None:
        step: Step | None = None
        try:
            for step in steps:
                self.run_step(step, context)
        except BaseException as error:
            # Before the activations are dropped, which the error of a full memory counts.
            translated = self._translate_error(error, step, context)
            self.forget()
            if translated is error:
                raise
            raise translated from error
        self.board.doing("is between batches")

    def release(self, before: int) -> None:
        """Free the send buffers of micro-batches below `before` (see `Transport.release`).

        Raises as `play`.
        """
        self.guard.during("its sends to leave", lambda: self.transport.release(before))

    def finish(self) -> None:
        """Wait until all messages that this rank sends have left. Raises as `play`."""
        try:
            self.guard.during("its sends to leave", self.transport.drain)
        except BaseException:
            self.forget()
            raise

    def forget(self) -> None:
        """Drop all state of unfinished batches."""
        for state in (self._arrivals, self._values, self._stored_activations):
            state.clear()
        for stage in self.stages.values():
            stage.forget()
        for replicas in self.replicas.values():
            replicas.forget()

    def peak_bytes(self, weights: Mapping[int, StageWeights]) -> int:
        """Return the peak memory of the rank in bytes, without workspace.

        Counted are weights in all their versions, gradients, the memory in which those of replicas
        are summed, optimizer state, and activations.

        Args:
            weights: in a stream, by stage, its weight rule.
        """
        total = self.activation_meter.peak
        total += sum(replicas.sum_bytes for replicas in self.replicas.values())
        # By id of the tensor: a weight that several stages of the rank use counts once.
        tensor_bytes: dict[int, int] = {}
        gradient_bytes: dict[int, int] = {}
        for index, stage in self.stages.items():
            update, rule = stage.update, weights.get(index)
            for tensor in stage.tensors():
                tensor_bytes[id(tensor)] = local_part(tensor).nbytes
            for parameter in (*update.parameters, *update.borrowed):
                gradient_bytes[id(parameter)] = local_part(parameter).nbytes
            if index in self.parallel:
                total += self.parallel[index].gathered_bytes
            total += optimizer_bytes(update.optimizer)
            if rule is not None:
                # The newest version is the parameters, which are counted above.
                total += rule.held_bytes()
                total -= sum(parameter.nbytes for parameter in update.parameters)
                total += sum(map(optimizer_bytes, rule.more_optimizers()))
        return total + sum(tensor_bytes.values()) + sum(gradient_bytes.values())

    def seconds(self, ops: Sequence[Op]) -> list[tuple[float, float]]:
        """Return start and end of ops that have been run, in seconds of the rank's clock."""
        return [
            (self.clock.seconds(start), self.clock.seconds(end))
            for start, end in map(self.marks.__getitem__, ops)
        ]

    def run_step(self, step: Step, context: RunContext) -> None:
        """Run one op with its receives and sends; note in `_waits_for` what they wait for.

        Called from outside where one thread runs several ranks in turn. Exceptions are those of the
        op or the transport, unconverted.
        """
        find = context.batches.find
        # Receives are posted before the op computes, so that messages arrive meanwhile.
        # `find` returns None for micro-batches that a small batch does not have; their transfers
        # and ops are left out.
        for peer, message in step.posts:
            if (entry := find(message.micro_batch)) is not None:
                batch, number = entry
                self._waits_for, self._waits_since = peer, time.monotonic()
                self._arrivals[message] = self.transport.post(peer, message, batch.forms[number])
        op = step.op
        if op is not None and step.kind is Kind.U:
            self._start_op(step)
            self._update(op, context)
            self._end_op(op)
        elif op is not None and (entry := find(step.number)) is not None:
            self._run_op(step, op, entry, context)
        for peer, message in step.sends:
            if (entry := find(message.micro_batch)) is not None:
                batch, number = entry
                self._send(peer, message, batch.forms[number])
        # After the sends, since other stages wait for these.
        if step.completes and step.stage in self.replicas:
            self.replicas[step.stage].start()

    def _run_op(self, step: Step, op: Op, entry: tuple[Batch, int], context: RunContext) -> None:
        """Receive the input of an op other than a U, run it, and store its output for the sends.

        Args:
            step: the step of the op.
            op: the op.
            entry: its batch, and its number in the batch.
            context: that of the program.
        """
        batch, _ = entry
        self._batch_step = batch.step
        arrived = None if step.input_message is None else self._receive(step, batch)
        # Sums of other stages have a second round, which runs beside this op.
        for replicas in self.replicas.values():
            replicas.poll()
        if step.completes and step.stage in self.replicas:
            # Before the backward, in which its hooks see the last gradients.
            self.replicas[step.stage].watch()
        self._start_op(step)
        result = self._compute(op, entry, arrived, context)
        self._end_op(op)
        if result is not None and step.output_message is not None:
            self._values[step.output_message] = result

    def _start_op(self, step: Step) -> None:
        # The board reads the host's clock anyway: an op on the host pays for one reading less.
        begun_s = self.board.doing(step.text)
        self._computing = True
        self._op_start = begun_s if self._on_host else self.clock.mark()

    def _end_op(self, op: Op) -> None:
        end = time.monotonic() if self._on_host else self.clock.mark()
        self.marks[op] = self._op_start, end
        self._computing = False

    def _send(self, peer: int, message: Message, signature: str) -> None:
        """Send a value to another rank."""
        self._waits_for, self._waits_since = peer, time.monotonic()
        size = self.transport.send(peer, message, self._values.pop(message), signature)
        self.transfers.end_send(message, peer, size)

    def _receive(self, step: Step, batch: Batch) -> Payload | None:
        """Return the input of an op, which this rank has or another one sends; wait for it."""
        message = step.input_message
        assert message is not None
        if (local_value := self._values.pop(message, None)) is not None:
            return local_value
        arrival = self._arrivals.pop(message, None)
        if arrival is None and step.kind in ACTIVATION_MOVES:
            # This rank is the sender of the evict or load op, see `_move_activations`.
            return None
        assert arrival is not None
        if batch.pending_check is not None:  # the first message of the batch is on its way
            batch.checksum()
            self.stages[step.stage].prepare(batch)
        self._waits_for, self._waits_since = step.maker, self.board.doing(step.waits)
        self.transfers.begin_wait(message, self._waits_since)
        return arrival.wait()

    def _translate_error(
        self, error: BaseException, step: Step | None, context: RunContext
    ) -> BaseException:
        """Convert an exception in a step into the RunError that is reported to other ranks."""
        computing, self._computing = self._computing, False
        if self.parallel and isinstance(error, RuntimeError) and is_lost(error):
            # A collective operation in shared layers was lost: another process failed, not this op.
            error = TransportLost(str(error))
            self._waits_for = "the processes that share its layers"
        if isinstance(error, (TransportTimeout, TransportLost)):
            peer = self._waits_for
            waits_for = peer if isinstance(peer, str) else f"rank {peer}"
            return self.guard.error(error, waits_for, time.monotonic() - self._waits_since)
        # Only an error of the op itself is this stage's failure: the others name their cause already.
        if (
            not computing
            or step is None
            or isinstance(error, (PeerFailed, DeadlineExceeded, NonFinite))
            or not isinstance(error, Exception)
        ):
            return error
        place = self.rank, step.stage, str(step.op), self._batch_step
        if is_out_of_memory(error):
            peak = self.peak_bytes(context.weights)
            use = MemoryUse(self.activation_meter.now, peak, self.predicted_bytes)
            return out_of_memory(error, place, use)
        return StageFailed(*place, f"{type(error).__name__}: {error}")

    def _compute(
        self, op: Op, entry: tuple[Batch, int], arrived: Payload | None, context: RunContext
    ) -> Payload | None:
        """Run a computing op (F, B, I, W) or an op that moves activations; return its result.

        Args:
            op: the op.
            entry: its batch, and its number in the batch.
            arrived: its input from another stage or rank.
            context: what ops read and change beside the stages.
        """
        batch, number = entry
        kind, index, micro_batch = op
        if kind in ACTIVATION_MOVES:
            return self._move_activations(op, batch, number, arrived)
        stage = self.stages[index]
        weights = context.weights.get(index) if context.weights else None
        if kind is Kind.F:
            if weights is not None:
                weights.before_forward(micro_batch)
            output = stage.forward(batch, number, arrived)
            if stage.loss is not None:
                if self.finite is not None:
                    self.finite.after_loss(stage, batch, number, op)
                if (on_loss := context.on_loss) is not None:
                    self.guard.during("its loss to leave", lambda: on_loss(batch))
            return output
        if weights is not None:
            weights.before_backward(micro_batch)
        result: Payload | None = None
        if kind is Kind.B:
            result = stage.backward(batch, number, arrived)
        elif kind is Kind.I:
            # Its W still reads the weights, and completes the gradients that are checked below.
            return stage.input_grad(batch, number, arrived)
        else:
            stage.weight_grad(batch, number)
        if self.finite is not None:
            self.finite.after_backward(stage, batch, number)
        if weights is not None:
            weights.finished(micro_batch)
        return result

    def _check_gradients(self, finite: FiniteCheck, op: Op, context: RunContext) -> None:
        """Check the gradients of a stage at its U.

        If another rank has failed, its failure is raised in place of the error of this check.
        """
        stage = self.stages[op.stage]
        try:
            finite.before_update(stage, op, streaming=bool(context.weights))
        except RunError as error:
            # On an accelerator NCCL's abort leaves garbage in received messages, without an error.
            cause = None if stage.device.type == "cpu" else self.guard.cause(f"gradients for {op}")
            if cause is None:
                raise
            raise cause from error

    def _update(self, op: Op, context: RunContext) -> None:
        """Run a U: sum the gradients of replicas, and update the weights."""
        if op.stage in self.parallel:
            self.parallel[op.stage].reduce()
        if self.finite is not None:
            self._check_gradients(self.finite, op, context)
        if op.stage in self.replicas:
            self.board.doing(f"waits for the other replicas at {op}")
            self.replicas[op.stage].all_reduce(updates=context.updates)
        if not context.updates:
            return
        weights = context.weights.get(op.stage)
        if weights is not None:
            weights.update(op.micro_batch)
            return
        self.stages[op.stage].update.step()
        if op.stage in self.replicas:
            self.replicas[op.stage].send_updates()
            self.replicas[op.stage].receive_updates()

    def _move_activations(
        self, op: Op, batch: Batch, number: int, arrived: Payload | None
    ) -> Payload | None:
        """Run an evict (E) or load (L) op on its sender (nothing arrived) or its receiver.

        Returns:
            On the sender, the activations to send.
        """
        key = op.stage, op.micro_batch
        if op.kind is Kind.E:
            if arrived is None:
                return self.stages[op.stage].evict(batch, number)
            self._stored_activations[key] = arrived
            self.activation_meter.take(arrived.nbytes)
        elif arrived is None:
            activations = self._stored_activations.pop(key)
            self.activation_meter.give(activations.nbytes)
            return activations
        else:
            self.stages[op.stage].load(batch, number, arrived)
        return None
