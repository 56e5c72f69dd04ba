"""An asynchronous schedule as it runs: fed batch by batch, full from one to the next, drained when
somebody asks for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from torch import Tensor

from penstock.errors import RunError
from penstock.runtime.assembly import Assembly
from penstock.runtime.batch import Batch
from penstock.runtime.results import StreamLosses
from penstock.runtime.under_way import UnderWay
from penstock.schedule.op import Kind, Op
from penstock.schedule.period import prolonged
from penstock.schedule.portions import Portions


@dataclass
class Streaming:
    """The stream of one `Pipeline`.

    Attributes:
        made: the ranks of this process; their schedule has a stream.
        portions: what ranks play.
        ready: losses of batches that are wholly done, with their steps, in order, until they are
        taken.
    """

    made: Assembly
    portions: Portions
    ready: deque[tuple[int, Tensor]] = field(default_factory=deque)
    _fed: int = 0
    _done: int = 0
    _drained: bool = True
    _broken: bool = False
    _sizes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.world, self.schedule, self.interpreters = (
            self.made.world,
            self.made.setting.schedule,
            self.made.interpreters,
        )
        self._under_way = UnderWay(self.schedule.micro_batches)
        self._losses = StreamLosses(
            self.world, prolonged(self.schedule, self.portions.period.batches)
        )
        # What a timeline shows, and what may have been run of later batches by then.
        longest = prolonged(self.schedule, 2 * self.schedule.batches + self.portions.period.batches)
        self._most_marks = {rank: len(longest.programs[rank]) for rank in self.interpreters}
        for interpreter in self.interpreters.values():
            interpreter.on_loss = self._losses.tell

    def feed(self, batch: Batch) -> None:
        """Give one more batch to the ranks, and let them run what they can with it.

        Raises:
            RunError: an op failed, here or elsewhere, now or before.
        """
        self._check()
        if self._drained:
            self._fed = self._done = 0
            self._sizes.clear()
            for interpreter in self.interpreters.values():
                interpreter.begin()
            self._drained = False
        index = self._fed
        self._under_way.add(index, batch)
        self._sizes.append(len(batch.inputs))
        self._broken = True
        self._losses.expect(index, batch)
        self.world.run(lambda rank: self._play(rank, index))
        self._fed += 1
        self._collect(self.portions.done(index))
        self._broken = False
        if batch.step < self.made.setting.weights_options.get("warm_up", 0):
            self.flush()

    def taken(self, first: int) -> Iterator[Tensor]:
        """The losses that are there, of the batches from step `first` on: those before were
        somebody's who has stopped asking.
        """
        while self.ready:
            step, loss = self.ready.popleft()
            if step >= first:
                yield loss

    def flush(self) -> None:
        """Let everything under way finish: every batch is done, and parameters are the newest
        version. Raises as `feed`.
        """
        self._check()
        if self._drained:
            return
        self._broken = True
        self.world.run(self._drain)
        self._collect(self._fed)
        self._drained, self._broken = True, False

    def begin_anew(self) -> None:
        """Before parameters are given new values: let what is under way finish, or, after a
        failure, forget it, and the failure too.
        """
        if not self._broken:
            self.flush()
        self._under_way.clear()
        self._losses.clear()
        self.ready.clear()
        for interpreter in self.interpreters.values():
            interpreter.forget()
        self._drained, self._broken = True, False

    def window(self) -> dict[int, list[tuple[Op, Op]]]:
        """Per rank, the ops of the last batches that are wholly done: as they would count had these
        been the first, and as they were run.
        """
        period = self.portions.period
        loops = max(0, self._done - self.schedule.batches) // period.batches
        first = loops * period.batches
        shown = prolonged(self.schedule, self._done - first) if self._done > first else None
        rows: dict[int, list[tuple[Op, Op]]] = {}
        for rank in range(self.schedule.ranks):
            ops = shown.programs[rank] if shown is not None else ()
            pairs = [(op, period.moved(rank, op, loops)) for op in ops]
            rows[rank] = [
                (op, ran) for op, ran in pairs if op.kind is Kind.U or self._had(ran.micro_batch)
            ]
        return rows

    def _had(self, number: int) -> bool:
        index, own = divmod(number, self.schedule.micro_batches)
        return own < self._sizes[index]

    def _check(self) -> None:
        if self._broken:
            raise RunError(
                "this pipeline cannot go on after a batch that failed: its stages have had different updates. Load a "
                "checkpoint, or make a new Pipeline"
            )

    def _play(self, rank: int, index: int) -> None:
        interpreter = self.interpreters[rank]
        interpreter.go_on(self.portions.fed(rank, index), self._under_way)
        # All ranks come to the end of their portions with what has been sent by now, and take what
        # is of batches done by then.
        interpreter.release((self.portions.done(index) - 1) * self.schedule.micro_batches)
        marks = interpreter.marks
        for op in list(islice(marks, max(0, len(marks) - self._most_marks[rank]))):
            del marks[op]

    def _drain(self, rank: int) -> None:
        interpreter = self.interpreters[rank]
        interpreter.go_on(self.portions.rest(rank, self._fed), self._under_way)
        for weights in interpreter.weights.values():
            weights.drain()
        for copies in self.made.wave_replicas[rank].values():
            copies.share_weights()
        interpreter.finish()

    def _collect(self, done: int) -> None:
        for index in range(self._done, done):
            batch = self._under_way.take(index)
            self.ready.append((batch.step, self._losses.mean(batch)))
        self._done = done
