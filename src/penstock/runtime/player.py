"""Player: lets all ranks of this process play a batch's program, and do afterwards what they do
together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from enum import Enum
from functools import cached_property, lru_cache

from penstock.runtime.assembly import Assembly
from penstock.runtime.batch import Batch
from penstock.runtime.together import Together
from penstock.schedule.lower import LoweredSchedule, lower
from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.period import prolonged
from penstock.schedule.portions import Portions
from penstock.tracing.deferred_batch_norm import deferring

#: How many ops before it is needed a receive is posted. Two, because gloo's threads then have the
#: message in hand while the rank
#: computes: over gloo an MLP on 4 ranks took a sixth longer with 0 or 1, and no less with 4. Every
#: op more costs a buffer. Through
#: shared memory there is nothing to post.
AHEAD = 2

#: Likewise where a posted receive is a kernel on the device: one, and never before what its message
#: depends on.
AHEAD_ON_DEVICE = 1


def stream_portions(assembly: Assembly) -> Portions:
    """What the ranks of a stream play, batch by batch, with receives as early as `Player` has them."""
    schedule = assembly.setting.schedule
    if assembly.world.receives_on_device:
        return Portions(schedule, AHEAD_ON_DEVICE, after_dependencies=True)
    return Portions(schedule, AHEAD)


class Mode(str, Enum):
    """What a batch is for."""

    TRAIN = "train"  #: gradients are added up, and maybe used
    COMPARE = "compare"  #: gradients are looked at
    EVALUATE = "evaluate"  #: there are none


class Player:
    """Of one `Pipeline`.

    Attributes:
        made: the ranks.
        together: what they do after a program.
        played: micro-batches and mode of the last batch, if it has been played to its end.
    """

    def __init__(self, made: Assembly, together: Together) -> None:
        self.made, self.together = made, together
        self.played: tuple[int, Mode] | None = None
        self._lowered = lru_cache(maxsize=32)(self._lower)
        self._deferring = {
            (rank, index): found
            for rank, interpreter in made.interpreters.items()
            for index, stage in interpreter.stages.items()
            if (found := [part for layer in stage.layers for part in deferring(layer.module)])
        }

    @cached_property
    def one_batch(self) -> Schedule:
        """The schedule as it is for one batch alone."""
        schedule = self.made.setting.schedule
        return schedule if schedule.stream is None else prolonged(schedule, 1)

    def play(self, batch: Batch, mode: Mode, *, steps: bool = False, factor: float = 1.0) -> None:
        """Play the program of one batch.

        Args:
            batch: the batch.
            mode: what it is for.
            steps: whether weights are updated.
            factor: what the gradients are multiplied by.

        Raises:
            RunError: an op failed, here or elsewhere. All gradients have been dropped then, if this
            was training.
        """
        lowered = self._lowered(batch.micro_batches, mode)
        together, apart = self.together, steps and not self.together.needed
        if mode is Mode.TRAIN:
            together.begin(factor)
        if mode is not Mode.EVALUATE:
            self._begin_statistics(lowered)

        def job(rank: int) -> tuple[float, float] | None:
            interpreter = self.made.interpreters[rank]
            if mode is not Mode.EVALUATE:
                for copies in interpreter.copies.values():
                    copies.begin()
            if not self.made.steps:
                # The user may have stepped the weights since the last batch.
                together.send_tied_weights(rank)
            interpreter.play(lowered.programs[rank], batch, update=apart)
            if mode is not Mode.EVALUATE:
                together.gather(rank)
            return together.step(rank) if steps and not apart else None

        self.played = None
        try:
            with contextlib.ExitStack() as modes:
                # All stages before any begins: a module without weights may stand in several, which
                # may run at the same time.
                for stage in self.made.stages if mode is Mode.EVALUATE else ():
                    modes.enter_context(stage.evaluating())
                told = self.made.world.run(job)
        except BaseException:
            if mode is Mode.TRAIN:
                self.zero()
            raise
        if steps and not apart:
            together.record_step({rank: row for rank, row in told.items() if row is not None})
        self.played = (batch.micro_batches, mode)

    def _begin_statistics(self, lowered: LoweredSchedule) -> None:
        """Tell deferred batch norms how many micro-batches their stage runs here: a small batch has
        fewer.
        """
        for (rank, index), parts in self._deferring.items():
            ops = (action for action in lowered.programs[rank] if isinstance(action, Op))
            count = sum(op.kind is Kind.F and op.stage == index for op in ops)
            for part in parts:
                part.begin(max(count, 1))

    def step(self) -> None:
        """Step with the gradients that are there."""
        try:
            told = self.made.world.run(self.together.step)
        except BaseException:
            self.zero()
            raise
        self.together.record_step(told)

    def zero(self) -> None:
        """Drop the gradients of the stages held here."""
        for stage in self.made.stages:
            stage.update.zero()

    def rows(self) -> dict[int, list[tuple[Op, Op]]]:
        """The ops that every rank played last, in order: as a timeline shows them, and as they were
        run.
        """
        if self.played is None:
            return {}
        programs: Mapping[int, tuple[object, ...]] = dict(
            enumerate(self._lowered(*self.played).programs)
        )
        return {
            rank: [(action, action) for action in row if isinstance(action, Op)]
            for rank, row in programs.items()
        }

    def _lower(self, micro_batches: int, mode: Mode) -> LoweredSchedule:
        schedule = self.one_batch.first_micro_batches(micro_batches)
        if mode is Mode.EVALUATE:
            schedule = schedule.forward_only()
        if self.made.world.receives_on_device:
            return lower(schedule, AHEAD_ON_DEVICE, after_dependencies=True)
        return lower(schedule, AHEAD)
