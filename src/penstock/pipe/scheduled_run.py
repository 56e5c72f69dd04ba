"""A model on the ranks of a schedule, in one process: forwards, losses and backwards of a batch.

The ranks are those of `ps.Pipeline`: for each an `Interpreter`, which runs the ops of its `Stage`s.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from penstock.batches.batch import Batch, make_batch
from penstock.batches.in_flight import BatchesInFlight
from penstock.batches.splitting import sample_count
from penstock.errors import ScheduleError, SettingError, StageFailed
from penstock.losses.call import is_torchs_loss
from penstock.losses.parameters import check_training
from penstock.modules.deferred_batch_norm import deferred_norms
from penstock.modules.randomness import may_draw
from penstock.pipe.pipe_engine import AutocastState
from penstock.pipe.pipe_threads import ThreadChoice, has_thread_local_state
from penstock.pipe.pipe_world import PipeWorld, Turn, turns_of
from penstock.ranks.settings.run_config import Overrides, check, make_run_config
from penstock.runtime.assembly import assemble
from penstock.runtime.interpreter import RunContext
from penstock.runtime.program_steps import steps_of
from penstock.schedule.lower import Action, lower
from penstock.schedule.op import Kind, Schedule
from penstock.stage.stage import Loss
from penstock.stage.stage_builder import Training
from penstock.stage.training_options import TrainingOptions
from penstock.tracing.sequential import runs_otherwise
from penstock.tracing.slices import check_slices
from penstock.tracing.traced_chain import TracedChain, chain


def check_schedule(schedule: Schedule) -> None:
    """Reject a schedule that a `Pipe` cannot run.

    Raises:
        ScheduleError: it is asynchronous, or has copies of stages.
    """
    if not schedule.synchronous:
        raise ScheduleError(
            f"{schedule.name} is asynchronous: it updates the weights between the micro-batches of "
            "a batch, and with a Pipe the caller updates them after the backward. Use ps.Pipeline, "
            "which has the optimizer, or a synchronous schedule such as 1f1b"
        )
    copied = [stage for stage, ranks in enumerate(schedule.ranks_of_stage) if len(ranks) > 1]
    if copied:
        raise ScheduleError(
            f"{schedule.name} has copies of stages on several ranks (stage {copied[0]} on ranks "
            f"{', '.join(map(str, schedule.ranks_of_stage[copied[0]]))}), and a Pipe has each "
            "layer once. Use ps.Pipeline, or a schedule with one copy of each stage such as 1f1b"
        )


@dataclass(frozen=True)
class _Programs:
    """The programs for batches with one number of micro-batches.

    Attributes:
        by_rank: the lowered program of each rank.
        turns: the same, in an order in which one thread can run them.
        op_count: number of forwards and backwards.
    """

    by_rank: Sequence[Sequence[Action]]
    turns: Sequence[Turn]
    op_count: int


@dataclass(frozen=True, eq=False)
class ModelParts:
    """A model that is divided into partitions.

    Attributes:
        partitions: the layers, one stage per partition.
        traced: the chain of a traced model; None for an nn.Sequential.
        balance: number of layers per partition.
    """

    partitions: Sequence[nn.Sequential]
    traced: TracedChain | None
    balance: Sequence[int]


class ScheduledRun:
    """Runs batches under a schedule. Gradients accumulate in `.grad` of the parameters.

    Args:
        parts: the model.
        device: where all of them compute.
        schedule: a schedule that `check_schedule` accepts.
        checkpoint: "never", "except_last" or "always".
        loss: `loss(output, target)`, as for `ps.Pipeline`.

    Attributes:
        choice: the choice between one thread and one per rank.

    Raises:
        SettingError, ScheduleError, PlanError: the arguments do not fit together.
    """

    def __init__(
        self,
        parts: ModelParts,
        device: torch.device,
        schedule: Schedule,
        checkpoint: str,
        loss: Loss,
    ) -> None:
        partitions = parts.partitions
        traced, lengths = _chain_of(parts)
        setting = make_run_config(traced, None, Overrides(lengths, schedule, recompute=checkpoint))
        check(setting)
        TrainingOptions().check(schedule, loss, steps=False)
        check_training(traced, loss, None)
        check_slices(traced, schedule)
        self.schedule = schedule
        self.choice = ThreadChoice()
        self._partitions = list(partitions)
        self._modules = _modules_of(partitions)
        self._containers = _divided_containers(self._modules, traced)
        self._layers = traced.modules
        self._norms = [norm for layer in traced.modules for norm in deferred_norms(layer)]
        self._loss_draws = not is_torchs_loss(loss)
        self._recomputes = checkpoint != "never"
        self._device = device
        self._world = PipeWorld(schedule.ranks, device)
        assembly = assemble(traced, setting, self._world, Training(loss, None, seed=0))
        if assembly.shared:
            shared = assembly.shared[0]
            raise SettingError(
                f"{shared.name} is in partitions {', '.join(map(str, shared.stages))}, and under a "
                "schedule with loss= a Pipe cannot add up their gradients. Choose a balance that "
                "puts both layers into one partition, or use ps.Pipeline, which ties weights"
            )
        self._interpreters = list(assembly.interpreters.values())
        self._programs = lru_cache(maxsize=32)(self._lower)
        # As in `Engine`: ops on a GPU are asynchronous, so that one thread can launch all of them.
        self._threads_allowed = schedule.ranks > 1 and device.type == "cpu"

    def is_current(self) -> bool:
        """Return whether the partitions still have the modules of which this was built."""
        return self._modules == _modules_of(self._partitions) and not any(
            map(runs_otherwise, self._containers)
        )

    def make_batch(self, x: Any, y: Any) -> Batch:
        """Split a batch into micro-batches.

        Its random numbers depend on torch's default generator, which is advanced by one number
        unless it is known that neither the layers nor the loss draw any.

        Raises:
            SettingError: the batch cannot be split.
        """
        may_need_seed = self._loss_draws or any(map(may_draw, self._layers))
        seed = int(torch.empty((), dtype=torch.int64).random_()) if may_need_seed else 0
        schedule = self.schedule
        micro_batches = schedule.micro_batches
        if schedule.slicing is None:
            # The number that `torch.chunk` returns, as without `loss=`: for batch norm, 6 samples
            # in 4 chunks are better 2, 2 and 2 than 2, 2, 1 and 1.
            samples = max(1, sample_count(x, "the inputs of a batch"))
            micro_batches = -(-samples // -(-samples // micro_batches))
        # The random streams of a stage depend on the step: here each batch has its own seed.
        return make_batch(x, y, micro_batches, step=seed, training=True, slicing=schedule.slicing)

    def run(self, batch: Batch) -> Tensor:
        """Run all forwards and backwards of a batch.

        Returns:
            The loss of the batch with the side losses of the layers: a scalar without graph.

        Raises:
            Exception: the first exception of a layer or the loss, as it was raised.
        """
        programs = self._programs(batch.micro_batches)
        for norm in self._norms:
            norm.begin(len(batch.inputs))
        autocast = AutocastState([self._device], caching=not self._recomputes)
        timed = self._threads_allowed and self.choice.is_due()
        in_threads = self._threads_allowed and self.choice.use_threads()
        failure: BaseException | None = None
        seconds = 0.0
        try:
            if in_threads and not has_thread_local_state():
                seconds = self._run_in_threads(programs, batch, autocast, timed=timed)
            else:
                seconds = self._run_in_turn(programs, batch, autocast, timed=timed)
        except StageFailed as error:
            failure = error.__cause__ or error
        if failure is not None:
            # Outside of the handler, which would become the context of the layer's exception.
            try:
                raise failure
            finally:
                del failure
        if timed:
            self.choice.seconds_per_op = seconds / programs.op_count
        return batch.loss_shares(sorted(batch.losses)).sum()

    def _run_in_threads(
        self, programs: _Programs, batch: Batch, autocast: AutocastState, *, timed: bool
    ) -> float:
        """Run the program of each rank in its thread; return their CPU time if `timed`."""

        def job(rank: int) -> float:
            start = time.thread_time() if timed else 0.0
            with autocast.restored():
                self._interpreters[rank].play(programs.by_rank[rank], batch, update=False)
            return time.thread_time() - start if timed else 0.0

        return sum(self._world.run(job).values())

    def _run_in_turn(
        self, programs: _Programs, batch: Batch, autocast: AutocastState, *, timed: bool
    ) -> float:
        """Run the programs of all ranks in this thread; return the CPU time if `timed`."""
        start = time.thread_time() if timed else 0.0
        context = RunContext(BatchesInFlight.alone(batch), updates=False)
        for interpreter in self._interpreters:
            interpreter.begin()
        try:
            with autocast.restored():
                for rank, step in programs.turns:
                    self._interpreters[rank].run_step(step, context)
        except BaseException:
            for interpreter in self._interpreters:
                interpreter.forget()
            self._world.discard_messages()
            raise
        return time.thread_time() - start if timed else 0.0

    def _lower(self, micro_batches: int) -> _Programs:
        schedule = self.schedule.first_micro_batches(micro_batches)
        by_rank = lower(schedule).programs
        steps = [steps_of(program, schedule.stages) for program in by_rank]
        op_count = sum(op.kind is not Kind.U for op in schedule.ops)
        return _Programs(by_rank, turns_of(steps), op_count)


def _chain_of(parts: ModelParts) -> tuple[TracedChain, list[int]]:
    """Return the chain of all partitions, and the number of its layers in each.

    The chain divides nested containers, so that it may have more layers than the partitions.
    """
    if parts.traced is not None:
        return parts.traced, list(parts.balance)
    partitions = parts.partitions
    names = [list(partition._modules) for partition in partitions]
    layers = [layer for partition in partitions for layer in partition._modules.items()]
    traced = chain(nn.Sequential(OrderedDict(layers)))
    first_names = [layer.name.partition(".")[0] for layer in traced.layers]
    return traced, [sum(name in group for name in first_names) for group in names]


def _modules_of(partitions: Sequence[nn.Module]) -> list[nn.Module]:
    return [module for partition in partitions for module in partition.modules()]


def _divided_containers(modules: Sequence[nn.Module], traced: TracedChain) -> list[nn.Module]:
    """Return the containers whose children are layers of the chain by themselves."""
    inner = {id(part) for layer in traced.modules for part in layer.modules()}
    return [
        module
        for module in modules
        if type(module).forward is nn.Sequential.forward and id(module) not in inner
    ]
