"""Pipeline: train a model under a plan, on all its ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PlanError, RunError, SettingError
from penstock.event import Event, Timeline
from penstock.optim.update import OptimizerFactory, Update
from penstock.plan import Plan
from penstock.runtime import checkpoint, state
from penstock.runtime.batch import Batch, join, make_batch
from penstock.runtime.clock import clock_for
from penstock.runtime.compare import Comparison, compare
from penstock.runtime.interpreter import Interpreter
from penstock.runtime.processes import DistributedWorld, started
from penstock.runtime.processes import join as join_ranks
from penstock.runtime.stage import Loss, Stage, StageLayer
from penstock.runtime.threads import ThreadWorld
from penstock.runtime.world import World
from penstock.schedule.catalogue import schedule as make_schedule
from penstock.schedule.lower import Link, LoweredSchedule, lower, messages
from penstock.schedule.op import Op, Schedule
from penstock.simulate.simulate import recomputes
from penstock.tracing.chain import TracedChain, chain
from penstock.tracing.materialise import materialise
from penstock.transport.payload import TensorForm
from penstock.verify.verify import verify
from penstock.weights.catalogue import weight_rule

#: How many ops before it is needed a receive is posted. Two, because gloo's threads then have the message in hand while the rank
#: computes. Milliseconds per step with 0, 1, 2 and 4 ops: MLP on 2 ranks 15.7, 21.9, 17.4, 18.1; on 4 ranks 40.8, 39.9, 34.0,
#: 31.0; GPT on 2 ranks 90.6, 87.0, 83.7, 83.9 (benchmarks/step-overhead, `--ahead 0,1,2,4`). Every op more costs a buffer.
AHEAD = 2


@dataclass(frozen=True)
class Setting:
    """What a run does, whether a plan or the caller said it."""

    lengths: tuple[int, ...]
    schedule: Schedule
    recompute: str
    weights: str

    @classmethod
    def of_plan(cls, plan: Plan, traced: TracedChain) -> Setting:
        """What the plan says, once it fits the model."""
        plan.check_fits(traced.fingerprint, plan.ranks)
        return cls(tuple(plan.lengths), plan.schedule, plan.recompute, plan.weights)


class Pipeline:
    """A model cut over ranks, with its loss and optimizers. Every rank makes one and calls the same methods with the same data.

    Args:
        model: an `nn.Sequential`, a list of modules, or a chain from `ps.chain`. Modules with real weights are trained in
            place. Modules on the meta device are made on the ranks that hold them, from `seed` and their place in the chain.
        plan: from `ps.plan`; or say it yourself with the next four.
        loss: `loss(output, target)` to one number: the mean over the samples it is given.
        optimizer: from a list of parameters to an optimizer; called once for every stage. Without it gradients add up in
            `.grad` and nothing is updated.
        balance: layers per stage.
        schedule: a schedule, or the name of one.
        micro_batches: parts that a batch is cut into. A batch with fewer samples is cut into single samples.
        recompute: "never", "except_last" or "always": run a micro-batch's forward again before its backward.
        weights: name of the weight rule.
        seed: of initial weights and dropout. Both depend on it and the layer (dropout also on step and micro-batch), never on
            the cut.
        device: where this process computes; by default a GPU if there is one for every rank of the host.
        deadline_s: seconds that a rank waits for another before the run is stopped with a word on who waits for what.
        executor: "processes" (one rank in each, under torchrun or `ps.launch`) or "threads" (all ranks in this process, for
            tests and debugging). By default processes if there are several, threads if there is one rank alone.

    Raises:
        SettingError, PlanError, ScheduleError, ChainError: what is asked for makes no sense, or cannot be done.
        RunError: the ranks are not there.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | TracedChain,
        plan: Plan | None = None,
        *,
        loss: Loss,
        optimizer: OptimizerFactory | None = None,
        balance: Sequence[int] | None = None,
        schedule: str | Schedule | None = None,
        micro_batches: int | None = None,
        recompute: str | None = None,
        weights: str | None = None,
        seed: int = 0,
        device: str | torch.device | None = None,
        deadline_s: float = 300.0,
        executor: str | None = None,
    ) -> None:
        self.chain = model if isinstance(model, TracedChain) else chain(model)
        if getattr(loss, "reduction", "mean") != "mean":
            raise SettingError(f"the loss reduces by {getattr(loss, 'reduction', None)!r}; it must be the mean over the samples "
                               "it is given, so that micro-batches can be weighed by their sizes")  # fmt: skip
        self.setting = _setting(self.chain, plan, balance, schedule, micro_batches, recompute, weights)
        bounds = self.chain.description.stage_bounds(self.setting.lengths)
        _check(self.setting)
        self._lowered = lru_cache(maxsize=32)(self._lower)
        chosen = None if device is None else torch.device(device)
        self._world = _world(self.setting.schedule, executor, chosen, deadline_s)
        self._step = 0
        self._loss = loss
        self._seed = seed
        self._played: tuple[int, str] | None = None
        self._interpreters: dict[int, Interpreter] = {}
        for rank in self._world.local_ranks:
            stages = {
                index: self._stage(index, range(*bounds[index]), self._world.device(rank), seed, optimizer)
                for index in self.setting.schedule.stages_of_rank[rank]
            }
            self._interpreters[rank] = Interpreter(rank, stages, len(bounds), self._world.transport(rank),
                                                   self._world.board(rank), clock_for(self._world.device(rank)))  # fmt: skip

    def _stage(self, index: int, layers: range, device: torch.device, seed: int,
               optimizer: OptimizerFactory | None) -> Stage:  # fmt: skip
        modules = materialise(self.chain, layers, device, seed)
        parameters = list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))
        last = index == len(self.setting.lengths) - 1
        held = [StageLayer(i, self.chain.layers[i].name, module) for i, module in zip(layers, modules, strict=True)]
        return Stage(index, held, device, Update.make(parameters, optimizer), seed, self.setting.recompute,
                     self._loss if last else None)  # fmt: skip

    # -- running ------------------------------------------------------------------------------------------------------

    def train_batch(self, x: Any, y: Any) -> Tensor:
        """Run the schedule on one batch and update the weights.

        Args:
            x: inputs, nested tensors with the samples in their first dimension.
            y: targets, likewise.

        Returns:
            The mean loss of the batch, a float tensor, the same on every rank.

        Raises:
            RunError: an op failed, here or elsewhere; the message says which. With ranks in processes the run is over. With
                threads it can go on: all gradients are dropped, but stages that had come to their update have had it.
        """
        batch = self._batch(x, y, training=True)
        self._play(batch, "train")
        self._step += 1
        return self._mean_loss(batch)

    def train(self, loader: Iterable[tuple[Any, Any]]) -> Iterator[Tensor]:
        """Train on every batch of `loader`; yields the losses in batch order."""
        for x, y in loader:
            yield self.train_batch(x, y)
        self.flush()

    def flush(self) -> None:
        """Let everything under way finish. A synchronous schedule has nothing under way between batches."""
        self._world.barrier()

    def eval_batch(self, x: Any, y: Any) -> Tensor:
        """The mean loss of a batch, with layers in evaluation mode. Weights, gradients, buffers and random state stay."""
        batch = self._batch(x, y, training=False)
        self._play(batch, "evaluate")
        return self._mean_loss(batch)

    def forward(self, x: Any) -> Any:
        """The model's output on `x`, with layers in evaluation mode, on every rank."""
        batch = make_batch(x, None, self.setting.schedule.micro_batches, step=self._step, training=False)
        self._play(batch, "evaluate")
        last = self._last_rank
        joined = self._world.run(lambda rank: join([batch.outputs[m] for m in sorted(batch.outputs)]) if rank == last else None)
        return self._world.broadcast(joined.get(last), last)

    @property
    def step(self) -> int:
        """Batches trained so far, those before a checkpoint included."""
        return self._step

    def zero_grad(self) -> None:
        """Drop the gradients of the stages held here."""
        for stage in self._local_stages:
            stage.update.zero()

    def _batch(self, x: Any, y: Any, *, training: bool) -> Batch:
        if y is None:
            raise SettingError("a batch needs targets for its loss, not None: where the loss takes none, give the inputs again")
        return make_batch(x, y, self.setting.schedule.micro_batches, step=self._step, training=training)

    def _play(self, batch: Batch, mode: str) -> None:
        lowered = self._lowered(batch.micro_batches, mode)

        def job(rank: int) -> None:
            interpreter = self._interpreters[rank]
            if mode == "train":
                for stage in interpreter.stages.values():
                    stage.update.begin()
            interpreter.play(lowered.programs[rank], batch)

        self._played = None
        try:
            with contextlib.ExitStack() as modes:
                # All stages before any begins: a module without weights may stand in several, which may run at the same time.
                for stage in self._local_stages if mode == "evaluate" else ():
                    modes.enter_context(stage.evaluating())
                self._world.run(job)
        except BaseException:
            if mode == "train":
                self.zero_grad()
            raise
        self._played = (batch.micro_batches, mode)

    def _lower(self, micro_batches: int, mode: str) -> LoweredSchedule:
        schedule = self.setting.schedule.first_micro_batches(micro_batches)
        if mode == "evaluate":
            schedule = schedule.forward_only()
        elif mode == "compare":
            schedule = schedule.without_updates()
        return lower(schedule, AHEAD)

    def _mean_loss(self, batch: Batch) -> Tensor:
        total = None
        if batch.losses:
            total = torch.stack([batch.losses[m] for m in sorted(batch.losses)]).sum().float()
        result: Tensor = self._world.broadcast(total, self._last_rank, TensorForm((), "float32", wants_grad=False))
        return result

    @property
    def _last_rank(self) -> int:
        return self.setting.schedule.ranks_of_stage[-1][0]

    @property
    def _local_stages(self) -> list[Stage]:
        return [stage for interpreter in self._interpreters.values() for stage in interpreter.stages.values()]

    # -- looking ------------------------------------------------------------------------------------------------------

    def timeline(self) -> Timeline:
        """What really happened in the last step, on every rank; the same type as `simulate` gives.

        Times of ranks on one host share a clock. Ranks on several hosts are each counted from the host's own clock.

        Raises:
            RunError: no batch has been trained or evaluated yet.
        """
        if not self._played:
            raise RunError("there is no timeline yet: train a batch first")
        rows = self._timed_rows()
        local = {rank: [torch.tensor(interpreter.seconds(), dtype=torch.float64).reshape(-1, 2)]
                 for rank, interpreter in self._interpreters.items()}  # fmt: skip
        forms = {rank: [TensorForm((len(ops), 2), "float64", wants_grad=False)] for rank, ops in rows.items()}
        gathered = self._world.gather(local, forms)
        count = sum(map(len, rows.values()))
        table = torch.cat([gathered[rank][0] for rank in rows]) if gathered else None
        table = self._world.broadcast(table, 0, TensorForm((count, 2), "float64", wants_grad=False))
        spans = iter(table.tolist())
        events = [Event(rank, op, *next(spans)) for rank, ops in rows.items() for op in ops]
        return Timeline.of(events, len(rows), len(self.setting.lengths), source="measured", title=self.setting.schedule.name)

    def _timed_rows(self) -> dict[int, list[Op]]:
        """The ops that every rank ran last, in order."""
        assert self._played is not None
        programs = self._lowered(*self._played).programs
        return {rank: [action for action in row if isinstance(action, Op)] for rank, row in enumerate(programs)}

    def state_dict(self) -> dict[str, Tensor]:
        """On rank 0: parameters and buffers of the whole model, on the CPU, under the model's own names. Elsewhere empty."""
        return state.collect(self._world, self._placed)

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the values of the stages held here from the whole model's state.

        Raises:
            SettingError: a tensor is missing or has another shape.
        """
        state.put(self._local_stages, tensors)

    def save(self, folder: str | Path) -> None:
        """Write weights, optimizer state and step into `folder`: one file per stage, readable under any other plan.

        Raises:
            FileError: the folder cannot be written.
            SettingError: an optimizer keeps something that is neither tensor nor plain number.
        """
        checkpoint.save(Path(folder), self._world, self._placed, self._step)

    def load(self, folder: str | Path) -> None:
        """Go on from what `save` wrote, under this or any other plan for the same model.

        Raises:
            FileError: there is no whole checkpoint, or it is of another model. Nothing has changed then.
        """
        self._step = checkpoint.load(Path(folder), self._placed)

    def compare_with_one_device(self, x: Any, y: Any) -> Comparison:
        """Run one batch through the pipeline and through plain training, and compare. Nothing is updated.

        Returns:
            On rank 0 the largest error of each parameter's gradient, each buffer and the loss; elsewhere an empty comparison.
        """
        batch = self._batch(x, y, training=True)
        return compare(self._world, self._placed, lambda: self._play(batch, "compare"), batch, self._loss, self._seed)

    @property
    def _placed(self) -> state.Placed:
        ranks = self.setting.schedule.ranks_of_stage
        return state.Placed(self.chain, self.setting.lengths, tuple(holders[0] for holders in ranks), self._local_stages)

    def close(self) -> None:
        """Let go of links and threads."""
        self._world.close()


def _setting(traced: TracedChain, plan: Plan | None, balance: Sequence[int] | None, schedule: str | Schedule | None,
             micro_batches: int | None, recompute: str | None, weights: str | None) -> Setting:  # fmt: skip
    """What to do, from a plan or from the caller's own words, never from a mix of both."""
    own = {"balance": balance, "schedule": schedule, "micro_batches": micro_batches, "recompute": recompute, "weights": weights}
    if plan is not None:
        doubled = [name for name, value in own.items() if value is not None]
        if doubled:
            raise SettingError(f"the plan already says {', '.join(doubled)}: give a plan, or these, not both")
        return Setting.of_plan(plan, traced)
    if balance is None:
        raise SettingError("a Pipeline needs a plan (ps.plan), or balance=[layers of each stage, …]")
    lengths = tuple(int(length) for length in balance)
    if not isinstance(schedule, Schedule):
        schedule = make_schedule(schedule or "1f1b", len(lengths), 1 if micro_batches is None else micro_batches)
    elif micro_batches not in (None, schedule.micro_batches):
        raise SettingError(
            f"the schedule has {schedule.micro_batches} micro-batches, micro_batches={micro_batches} says otherwise"
        )
    return Setting(lengths, schedule, recompute or "never", weights or "flush")


def _check(setting: Setting) -> None:
    """Refuse what cannot run, before anything starts."""
    schedule = setting.schedule
    verify(schedule)
    recomputes(setting.recompute, 0, 1)
    rule = weight_rule(setting.weights)
    if schedule.stages != len(setting.lengths):
        raise PlanError(
            f"the schedule has {schedule.stages} stages, the balance {list(setting.lengths)} has {len(setting.lengths)}"
        )
    if not (schedule.synchronous and rule.synchronous):
        raise PlanError(f"{schedule.name} with weights={setting.weights!r} is asynchronous, which cannot be run yet")
    for stage, ranks in enumerate(schedule.ranks_of_stage):
        if len(ranks) > 1:
            raise PlanError(f"stage {stage} has copies on ranks {', '.join(map(str, ranks))}, which cannot be run yet")


def _world(schedule: Schedule, executor: str | None, device: torch.device | None, deadline_s: float) -> World:
    """The ranks to run on."""
    if executor not in (None, "processes", "threads"):
        raise SettingError(f"executor is 'processes' or 'threads', not {executor!r}")
    if deadline_s <= 0:
        raise SettingError(f"deadline_s is above 0, not {deadline_s}")
    if executor == "threads" or (executor is None and schedule.ranks == 1 and not started()):
        alone = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return ThreadWorld(schedule.ranks, alone, deadline_s)
    found = join_ranks()
    if found != schedule.ranks:
        raise PlanError(f"the schedule is for {schedule.ranks} ranks and there {'is' if found == 1 else 'are'} {found}: "
                        f"start {schedule.ranks} processes")  # fmt: skip
    links = {link for link, *_ in messages(schedule)}
    links |= {Link(link.target, link.source) for link in links}
    return DistributedWorld(device, deadline_s, links)
