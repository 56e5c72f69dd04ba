"""Execution of an asynchronous schedule as a stream of batches.

The pipeline stays full from one batch to the next, and is drained only on request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from torch import Tensor

from penstock.batches.batch import Batch
from penstock.batches.in_flight import BatchesInFlight
from penstock.errors import RunError
from penstock.ranks.device_results import DeviceStreamLosses, device_losses
from penstock.ranks.results import StreamLosses
from penstock.runtime.assembly import Assembly
from penstock.runtime.interpreter import RunContext
from penstock.runtime.stream_weights import StreamWeights
from penstock.schedule.op import Kind, Op
from penstock.schedule.streaming.increments import StreamIncrements
from penstock.schedule.streaming.period import with_batch_count


@dataclass
class Streaming:
    """The stream of one `Pipeline`.

    Attributes:
        assembly: the ranks of this process; their schedule has a stream.
        increments: the ops that each rank runs when a batch is fed.
        ready: steps and losses of completed batches, in order, until they are taken.
    """

    assembly: Assembly
    increments: StreamIncrements
    ready: deque[tuple[int, Tensor]] = field(default_factory=deque)
    _fed: int = 0
    _done: int = 0
    _drained: bool = True
    _broken: bool = False
    _sizes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.world = self.assembly.world
        self.schedule = self.assembly.setting.schedule
        self.interpreters = self.assembly.interpreters
        self.weights = StreamWeights(self.assembly)
        self._in_flight = BatchesInFlight(self.schedule.micro_batches)
        period_batches = self.increments.period.batches
        one_period = with_batch_count(self.schedule, period_batches)
        losses = device_losses(self.world)
        self._losses: StreamLosses | DeviceStreamLosses = (
            StreamLosses(self.world, one_period)
            if losses is None
            else DeviceStreamLosses(losses, one_period)
        )
        # Times are stored for the batches of a timeline, and for those that ranks may have begun
        # after them.
        longest = with_batch_count(self.schedule, 2 * self.schedule.batches + period_batches)
        self._most_marks = {rank: len(longest.programs[rank]) for rank in self.interpreters}

    def feed(self, batch: Batch) -> None:
        """Feed a batch to the ranks, and run the ops that become possible with it.

        Raises:
            RunError: an op has failed on any rank, now or before.
        """
        self._check()
        if self._drained:
            self._fed = self._done = 0
            self._sizes.clear()
            for interpreter in self.interpreters.values():
                interpreter.begin()
            self._drained = False
        index = self._fed
        self._in_flight.add(index, batch)
        self._sizes.append(len(batch.inputs))
        # Broken until the batch is complete: an exception anywhere leaves it so.
        self._broken = True
        self._losses.expect(index, batch)
        self.world.run(lambda rank: self._play(rank, index))
        self._fed += 1
        self._collect(self.increments.completed_batches(index))
        self._broken = False
        # T3 of PipeMare: its first batches train synchronously, with a flush after each.
        if batch.step < self.assembly.setting.weights_options.get("warm_up", 0):
            self.flush()

    def take_losses(self, first: int) -> Iterator[Tensor]:
        """Yield and drop the ready losses of batches from step `first` on.

        Earlier losses are dropped: the iterator that they belong to has been abandoned.
        """
        while self.ready:
            step, loss = self.ready.popleft()
            if step >= first:
                yield loss

    def flush(self) -> None:
        """Complete all batches in flight; the parameters are then of the newest version.

        Raises:
            RunError: as for `feed`.
        """
        self._check()
        if self._drained:
            return
        self._broken = True
        self.world.run(self._drain)
        self._collect(self._fed)
        self._losses.verify()
        self._drained, self._broken = True, False

    def empty(self) -> None:
        """Empty the stream before parameters get new values; call `weights.restart` afterwards.

        Batches in flight are completed; after a failure they are dropped, and the failure is
        cleared.
        """
        if not self._broken:
            self.flush()
        self._in_flight.clear()
        self._losses.clear()
        self.ready.clear()
        for interpreter in self.interpreters.values():
            interpreter.forget()
        self._drained, self._broken = True, False

    def window(self) -> dict[int, list[tuple[Op, Op]]]:
        """Return the ops of the last completed batches.

        Returns:
            By rank, pairs of an op numbered as if these batches had been the first, and the op as
            it was run.
        """
        period = self.increments.period
        # Whole periods before the window: ops repeat with the period, so that the programs of the
        # first batches, moved by this many periods, are the ops that were run.
        loops = max(0, self._done - self.schedule.batches) // period.batches
        first = loops * period.batches
        if self._done <= first:
            return {rank: [] for rank in range(self.schedule.ranks)}
        window = with_batch_count(self.schedule, self._done - first)
        rows: dict[int, list[tuple[Op, Op]]] = {}
        for rank in range(self.schedule.ranks):
            rows[rank] = []
            for op in window.programs[rank]:
                run_op = period.moved(rank, op, loops)
                if op.kind is Kind.U or self._has_samples(run_op.micro_batch):
                    rows[rank].append((op, run_op))
        return rows

    def _has_samples(self, number: int) -> bool:
        """Whether a micro-batch existed: a small batch has fewer than the schedule."""
        index, micro_batch = divmod(number, self.schedule.micro_batches)
        return micro_batch < self._sizes[index]

    def _check(self) -> None:
        """Check that no batch has failed.

        Raises:
            RunError: one has.
        """
        if self._broken:
            raise RunError(
                "this pipeline cannot go on after a batch that failed: its stages have had "
                "different updates. Load a checkpoint, or make a new Pipeline"
            )

    def _play(self, rank: int, index: int) -> None:
        """Run a rank's ops for batch `index`."""
        interpreter = self.interpreters[rank]
        interpreter.run_actions(self.increments.increment(rank, index), self._context(rank))
        # With what has been sent by now, every rank can complete its increment, and receive the
        # messages of completed batches: so waiting for these sends cannot block for ever.
        interpreter.release(
            (self.increments.completed_batches(index) - 1) * self.schedule.micro_batches
        )
        marks = interpreter.marks
        for op in list(islice(marks, max(0, len(marks) - self._most_marks[rank]))):
            del marks[op]
        interpreter.transfers.keep(self._most_marks[rank])

    def _drain(self, rank: int) -> None:
        """Run a rank's remaining ops, and bring all replicas to the same weights."""
        interpreter = self.interpreters[rank]
        interpreter.run_actions(self.increments.remainder(rank, self._fed), self._context(rank))
        self.weights.drain(rank)
        for replicas in self.assembly.wave_replicas[rank].values():
            replicas.share_weights()
        interpreter.finish()

    def _context(self, rank: int) -> RunContext:
        """Return what the ops of a rank read and change beside its stages."""
        return RunContext(
            self._in_flight, weights=self.weights.by_rank[rank], on_loss=self._losses.tell
        )

    def _collect(self, done: int) -> None:
        """Move the losses of the batches before `done` to `ready`."""
        for index in range(self._done, done):
            batch = self._in_flight.take(index)
            self.ready.append((batch.step, self._losses.mean(batch)))
        self._done = done
