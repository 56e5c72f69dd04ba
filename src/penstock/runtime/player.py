"""Player: runs the program of a batch on all local ranks, and then the global step, if any."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from enum import Enum
from functools import cached_property, lru_cache

from torch import Tensor

from penstock.batches.batch import Batch
from penstock.modules.deferred_batch_norm import DeferredBatchNorm, deferred_norms
from penstock.ranks.device_results import device_losses
from penstock.ranks.results import last_micro_batches, mean_loss
from penstock.runtime.assembly import Assembly
from penstock.runtime.global_step import GlobalStep
from penstock.runtime.streaming import Streaming
from penstock.schedule.lower import Action, LoweredSchedule, lower
from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.streaming.increments import StreamIncrements
from penstock.schedule.streaming.period import with_batch_count

#: Number of ops before its use at which a receive is posted. With two, gloo's threads receive the
#: message while the rank computes: over gloo, an MLP on 4 ranks took a sixth longer with 0 or 1,
#: and no less with 4. Every further op costs a buffer. Shared memory needs no posted receives.
AHEAD = 2

#: The same where a posted receive is a kernel that occupies the device (NCCL). It is then never
#: posted before the ops that its message depends on.
AHEAD_ON_DEVICE = 1


def make_stream(assembly: Assembly) -> Streaming | None:
    """Return the stream of an asynchronous schedule; None for a synchronous one."""
    if assembly.setting.schedule.stream is None:
        return None
    return Streaming(assembly, _stream_increments(assembly))


def _stream_increments(assembly: Assembly) -> StreamIncrements:
    """Return the programs of a stream by batch, with receives posted as in `Player`."""
    schedule = assembly.setting.schedule
    if assembly.world.receives_on_device:
        return StreamIncrements(schedule, AHEAD_ON_DEVICE, after_dependencies=True)
    return StreamIncrements(schedule, AHEAD)


class Mode(str, Enum):
    """The purpose of a batch."""

    TRAIN = "train"  #: accumulate gradients, and possibly update weights
    COMPARE = "compare"  #: accumulate gradients for the self-check
    EVALUATE = "evaluate"  #: compute no gradients


class Player:
    """Runs the batches of one `Pipeline`.

    Attributes:
        assembly: the local ranks.
        global_step: the global step of all ranks.
        played: micro-batches and mode of the last batch; None if it failed.
    """

    def __init__(self, assembly: Assembly, global_step: GlobalStep) -> None:
        self.assembly, self.global_step = assembly, global_step
        self._device_losses = device_losses(assembly.world)
        self.played: tuple[int, Mode] | None = None
        # Programs differ by mode and by the number of micro-batches, of which a short last batch
        # has fewer.
        self._lowered = lru_cache(maxsize=32)(self._lower)
        # By rank and stage, its batch norms with deferred statistics.
        self._deferred_norms: dict[tuple[int, int], list[DeferredBatchNorm]] = {}
        for rank, interpreter in assembly.interpreters.items():
            for index, stage in interpreter.stages.items():
                norms = [norm for layer in stage.layers for norm in deferred_norms(layer.module)]
                if norms:
                    self._deferred_norms[rank, index] = norms

    @cached_property
    def one_batch(self) -> Schedule:
        """The schedule for a single batch, which differs from that of a stream."""
        schedule = self.assembly.setting.schedule
        return schedule if schedule.stream is None else with_batch_count(schedule, 1)

    def play(self, batch: Batch, mode: Mode, *, steps: bool = False, factor: float = 1.0) -> None:
        """Run the program of one batch.

        Args:
            batch: the batch.
            mode: its purpose.
            steps: whether weights are updated.
            factor: factor of the gradients.

        Raises:
            RunError: an op failed on any rank. In training, all gradients have then been dropped.
        """
        lowered = self._lowered(batch.micro_batches, mode)
        global_step = self.global_step
        # Stages update by themselves, at their U, unless the update needs all stages' gradients.
        update_at_u = steps and not global_step.needed
        if mode is Mode.TRAIN:
            global_step.begin(factor)
        if mode is not Mode.EVALUATE:
            self._begin_statistics(lowered)

        def job(rank: int) -> tuple[Tensor | None, float] | None:
            self._play_rank(rank, lowered.programs[rank], batch, mode, update=update_at_u)
            return global_step.step(rank) if steps and not update_at_u else None

        self.played = None
        try:
            with contextlib.ExitStack() as modes:
                if mode is Mode.EVALUATE:
                    # All stages change mode before any runs: a module without weights may be in
                    # several stages, which may run at the same time.
                    for stage in self.assembly.stages:
                        modes.enter_context(stage.evaluation_mode())
                step_results = self.assembly.world.run(job)
        except BaseException:
            if mode is Mode.TRAIN:
                # Gradients of a part of a batch must not enter the next update.
                self.zero()
            raise
        if steps and not update_at_u:
            global_step.record_step(
                {rank: row for rank, row in step_results.items() if row is not None}
            )
        self.played = (batch.micro_batches, mode)

    def _play_rank(
        self, rank: int, program: Sequence[Action], batch: Batch, mode: Mode, *, update: bool
    ) -> None:
        """Run the program of one rank, and exchange the gradients of tied weights.

        Args:
            rank: the rank.
            program: its program.
            batch: the batch.
            mode: the purpose of the batch.
            update: whether stages update at their U.
        """
        interpreter = self.assembly.interpreters[rank]
        if mode is not Mode.EVALUATE:
            for replicas in interpreter.replicas.values():
                replicas.begin()
        if not self.assembly.steps:
            # Without an optimizer, the caller may have changed the weights since.
            self.global_step.send_tied_weights(rank)
        interpreter.play(program, batch, update=update)
        if mode is not Mode.EVALUATE:
            self.global_step.gather(rank)

    def _begin_statistics(self, lowered: LoweredSchedule) -> None:
        """Tell deferred batch norms the number of micro-batches that their stage will run.

        A small batch has fewer than the schedule.
        """
        for (rank, index), norms in self._deferred_norms.items():
            ops = (action for action in lowered.programs[rank] if isinstance(action, Op))
            count = sum(op.kind is Kind.F and op.stage == index for op in ops)
            for norm in norms:
                norm.begin(max(count, 1))

    def step(self) -> None:
        """Update the weights with the accumulated gradients."""
        try:
            step_results = self.assembly.world.run(self.global_step.step)
        except BaseException:
            self.zero()
            raise
        self.global_step.record_step(step_results)

    def mean_loss(self, batch: Batch) -> Tensor:
        """Return the mean loss of a batch that has been played; see `results.mean_loss`."""
        if self._device_losses is None:
            return mean_loss(self.assembly.world, self.one_batch, batch)
        return self._device_losses.mean(batch, last_micro_batches(self.one_batch, batch))

    def read_checks(self) -> None:
        """Read the results of all checks that have been deferred.

        Raises:
            RunError: a check on an accelerator has failed.
            RanksDiffer: ranks had different batches.
        """
        if self._device_losses is not None:
            self._device_losses.verify()
        if not any(stage.has_pending_checks for stage in self.assembly.stages):
            return

        def read(rank: int) -> None:
            for stage in self.assembly.interpreters[rank].stages.values():
                stage.read_checks()

        self.assembly.world.run(read)

    def zero(self) -> None:
        """Drop the gradients of the local stages."""
        for interpreter in self.assembly.interpreters.values():
            if interpreter.finite is not None:
                interpreter.finite.reset()
        for stage in self.assembly.stages:
            stage.update.zero()

    def rows(self) -> dict[int, list[tuple[Op, Op]]]:
        """Return, by rank, the ops of the last batch in order.

        Ops are in pairs: as the timeline shows them and as they were run. In a stream these differ;
        here they are equal.
        """
        if self.played is None:
            return {}
        rows: dict[int, list[tuple[Op, Op]]] = {}
        for rank, program in enumerate(self._lowered(*self.played).programs):
            rows[rank] = [(action, action) for action in program if isinstance(action, Op)]
        return rows

    def _lower(self, micro_batches: int, mode: Mode) -> LoweredSchedule:
        schedule = self.one_batch.first_micro_batches(micro_batches)
        if mode is Mode.EVALUATE:
            schedule = schedule.forward_only()
        if self.assembly.world.receives_on_device:
            return lower(schedule, AHEAD_ON_DEVICE, after_dependencies=True)
        return lower(schedule, AHEAD)
