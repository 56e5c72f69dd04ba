"""Pipeline: train a model under a plan, on all its ranks."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PlanError, RunError, SettingError
from penstock.event import Timeline
from penstock.optim.update import OptimizerFactory
from penstock.plan.plan import Plan
from penstock.runtime import checkpoint, state
from penstock.runtime.assembly import Training, assemble
from penstock.runtime.batch import Batch, make_batch
from penstock.runtime.compare import Comparison, compare
from penstock.runtime.processes import DistributedWorld, started
from penstock.runtime.processes import join as join_ranks
from penstock.runtime.results import mean_loss, outputs
from penstock.runtime.setting import Words, check, setting_of
from penstock.runtime.stage import Loss, Stage
from penstock.runtime.streaming import Streaming
from penstock.runtime.threads import ThreadWorld
from penstock.runtime.timing import measured
from penstock.runtime.world import World
from penstock.schedule.lower import Link, LoweredSchedule, lower, messages
from penstock.schedule.op import Op, Schedule
from penstock.schedule.period import prolonged
from penstock.schedule.portions import Portions
from penstock.tracing.chain import TracedChain, chain
from penstock.tracing.slices import check_slices
from penstock.transport.payload import TensorForm

#: How many ops before it is needed a receive is posted. Two, because gloo's threads then have the message in hand while the rank
#: computes. Milliseconds per step with 0, 1, 2 and 4 ops: MLP on 2 ranks 15.7, 21.9, 17.4, 18.1; on 4 ranks 40.8, 39.9, 34.0,
#: 31.0; GPT on 2 ranks 90.6, 87.0, 83.7, 83.9 (benchmarks/step-overhead, `--ahead 0,1,2,4`). Every op more costs a buffer.
AHEAD = 2


class Pipeline:
    """A model cut over ranks, with its loss and optimizers. Every rank makes one and calls the same methods with the same data.

    Args:
        model: an `nn.Sequential`, a list of modules, or a chain from `ps.chain`. Modules with real weights are trained in
            place. Modules on the meta device are made on the ranks that hold them, from `seed` and their place in the chain.
        plan: from `ps.plan`; or say it yourself with the next four.
        loss: `loss(output, target)` to one number: the mean over the samples it is given (and their tokens, where a schedule cuts
            sequences: x and y then have the tokens in their second dimension).
        optimizer: from a list of parameters to an optimizer; called once for every stage. Without it gradients add up in
            `.grad` and nothing is updated.
        balance: layers per stage.
        schedule: a schedule, or the name of one.
        micro_batches: parts that a batch is cut into. A batch with fewer samples is cut into single samples.
        recompute: "never", "except_last" or "always": run a micro-batch's forward again before its backward.
        weights: name of the weight rule; by default the one that the schedule is made for.
        weights_options: numbers that the rule takes; its own page says which.
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
        weights_options: Mapping[str, float] | None = None,
        seed: int = 0,
        device: str | torch.device | None = None,
        deadline_s: float = 300.0,
        executor: str | None = None,
    ) -> None:
        self.chain = model if isinstance(model, TracedChain) else chain(model)
        if getattr(loss, "reduction", "mean") != "mean":
            raise SettingError(f"the loss reduces by {getattr(loss, 'reduction', None)!r}; it must be the mean over the samples "
                               "it is given, so that micro-batches can be weighed by their sizes")  # fmt: skip
        words = Words(balance, schedule, micro_batches, recompute, weights, weights_options)
        self.setting = setting_of(self.chain, plan, words)
        self.chain.description.stage_bounds(self.setting.lengths)
        check(self.setting)
        check_slices(self.chain, self.setting.schedule)
        self._lowered = lru_cache(maxsize=32)(self._lower)
        chosen = None if device is None else torch.device(device)
        self._world = _world(self.setting.schedule, executor, chosen, deadline_s)
        self._step = 0
        self._loss = loss
        self._seed = seed
        self._played: tuple[int, str] | None = None
        self._made = assemble(self.chain, self.setting, self._world, Training(loss, optimizer, seed))
        self._made.share_weights()
        self._stream: Streaming | None = None
        if self.setting.schedule.stream is not None:
            self._made.let_read()
            self._stream = Streaming(self._made, Portions(self.setting.schedule, AHEAD))

    # -- running ------------------------------------------------------------------------------------------------------

    def train_batch(self, x: Any, y: Any) -> Tensor:
        """Run the schedule on one batch and update the weights. An asynchronous schedule drains afterwards: drive it by `train`.

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
        if self._stream is not None:
            self._feed(self._stream, batch)
            self.flush()
            return self._stream.ready.pop()[1]
        self._play(batch, "train")
        self._step += 1
        return self._mean_loss(batch)

    def train(self, loader: Iterable[tuple[Any, Any]]) -> Iterator[Tensor]:
        """Train on every batch of `loader`; yields the losses in batch order.

        An asynchronous schedule stays full from batch to batch, so the loss of a batch comes when later batches have been
        taken from the loader, at the same place on every rank. It drains at the end of the loader, and for `flush`, evaluation,
        `save`, `state_dict` and their like; it then fills anew.

        Raises:
            RunError: see `train_batch`.
        """
        first = self._step
        for x, y in loader:
            if self._stream is None:
                yield self.train_batch(x, y)
                continue
            self._feed(self._stream, self._batch(x, y, training=True))
            yield from self._taken(self._stream, first)
        self.flush()
        if self._stream is not None:
            yield from self._taken(self._stream, first)

    def _feed(self, stream: Streaming, batch: Batch) -> None:
        self._played = None
        stream.feed(batch)
        self._step += 1
        if self._step <= self.setting.weights_options.get("warm_up", 0):
            stream.flush()

    @staticmethod
    def _taken(stream: Streaming, first: int) -> Iterator[Tensor]:
        """The losses that are there, of the batches from step `first` on: those before were somebody's who has stopped asking."""
        while stream.ready:
            step, loss = stream.ready.popleft()
            if step >= first:
                yield loss

    def flush(self) -> None:
        """Let everything under way finish. A synchronous schedule has nothing under way between batches."""
        if self._stream is not None:
            self._stream.flush()
        self._world.barrier()

    def eval_batch(self, x: Any, y: Any) -> Tensor:
        """The mean loss of a batch, with layers in evaluation mode. Weights, gradients, buffers and random state stay."""
        batch = self._batch(x, y, training=False)
        self._play(batch, "evaluate")
        return self._mean_loss(batch)

    def forward(self, x: Any) -> Any:
        """The model's output on `x`, with layers in evaluation mode, on every rank."""
        batch = make_batch(x, None, self.setting.schedule.micro_batches, step=self._step, training=False,
                           slicing=self.setting.schedule.slicing)  # fmt: skip
        self._play(batch, "evaluate")
        return outputs(self._world, self._one_batch, batch)

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
        return make_batch(x, y, self.setting.schedule.micro_batches, step=self._step, training=training,
                          slicing=self.setting.schedule.slicing)  # fmt: skip

    @cached_property
    def _one_batch(self) -> Schedule:
        """The schedule as it is for one batch alone."""
        schedule = self.setting.schedule
        return schedule if schedule.stream is None else prolonged(schedule, 1)

    def _drain(self) -> None:
        if self._stream is not None:
            self._stream.flush()

    def _play(self, batch: Batch, mode: str) -> None:
        self._drain()
        lowered = self._lowered(batch.micro_batches, mode)

        def job(rank: int) -> None:
            interpreter = self._made.interpreters[rank]
            if mode == "train":
                for stage in interpreter.stages.values():
                    stage.update.begin()
            if mode != "evaluate":
                for copies in interpreter.copies.values():
                    copies.begin()
            interpreter.play(lowered.programs[rank], batch, update=mode == "train")

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
        schedule = self._one_batch.first_micro_batches(micro_batches)
        if mode == "evaluate":
            schedule = schedule.forward_only()
        return lower(schedule, AHEAD)

    def _mean_loss(self, batch: Batch) -> Tensor:
        return mean_loss(self._world, self._one_batch, batch)

    @property
    def _local_stages(self) -> list[Stage]:
        return self._made.stages

    # -- looking ------------------------------------------------------------------------------------------------------

    def timeline(self) -> Timeline:
        """What really happened in the last step, on every rank; the same type as `simulate` gives.

        Times of ranks on one host share a clock. Ranks on several hosts are each counted from the host's own clock.

        Raises:
            RunError: no batch has been trained or evaluated yet.
        """
        rows = self._timed_rows()
        if not any(rows.values()):
            raise RunError("there is no timeline yet: train a batch first")
        timeline = measured(self._world, self.setting.schedule, self._made.interpreters, rows)
        if self._played is None:
            return timeline
        return replace(timeline, slicing=self.setting.schedule.first_micro_batches(self._played[0]).slicing)

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """Per stage, the most versions of its weights that a rank has kept at once so far."""
        stages = len(self.setting.lengths)
        if self._stream is None:
            return (1,) * stages
        forms = {rank: [TensorForm((stages,), "int64", wants_grad=False)] for rank in range(self._world.size)}
        gathered = self._world.gather({rank: [torch.tensor(row)] for rank, row in self._made.versions_kept().items()}, forms)
        most = torch.stack([row for (row,) in gathered.values()]).amax(0) if gathered else None
        found = self._world.broadcast(most, 0, TensorForm((stages,), "int64", wants_grad=False))
        return tuple(int(count) for count in found)

    def _timed_rows(self) -> dict[int, list[tuple[Op, Op]]]:
        """The ops that every rank ran last, in order: as the timeline shows them, and as they were run."""
        if self._played is None:
            return {} if self._stream is None else self._stream.window()
        programs = self._lowered(*self._played).programs
        return {rank: [(action, action) for action in row if isinstance(action, Op)] for rank, row in enumerate(programs)}

    def state_dict(self) -> dict[str, Tensor]:
        """On rank 0: parameters and buffers of the whole model, on the CPU, under the model's own names. Elsewhere empty."""
        self._drain()
        return state.collect(self._world, self._placed)

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the values of the stages held here from the whole model's state.

        Raises:
            SettingError: a tensor is missing or has another shape.
        """
        if self._stream is not None:
            self._stream.begin_anew()
        state.put(self._local_stages, tensors)
        if self._stream is not None:
            self._made.let_read()

    def save(self, folder: str | Path) -> None:
        """Write weights, optimizer state and step into `folder`: one file per stage, readable under any other plan.

        Raises:
            FileError: the folder cannot be written.
            SettingError: an optimizer keeps something that is neither tensor nor plain number.
        """
        self._drain()
        stream = self.setting.schedule.stream
        apart = stream is not None and stream.waves is not None
        copies = max(map(len, self.setting.schedule.ranks_of_stage)) if apart else 1
        checkpoint.save(Path(folder), self._world, self._placed, self._step, self._made.versioned(), copies)

    def load(self, folder: str | Path) -> None:
        """Go on from what `save` wrote, under this or any other plan for the same model.

        Raises:
            FileError: there is no whole checkpoint, or it is of another model. Nothing has changed then.
        """
        if self._stream is None:
            self._step = checkpoint.load(Path(folder), self._placed)
        else:
            self._stream.begin_anew()
            self._step = checkpoint.load(Path(folder), self._placed, self._made.let_read)

    def compare_with_one_device(self, x: Any, y: Any) -> Comparison:
        """Run one batch through the pipeline and through plain training, and compare. Nothing is updated.

        Returns:
            On rank 0 the largest error of each parameter's gradient, each buffer and the loss; elsewhere an empty comparison.
        """
        self._drain()
        batch = self._batch(x, y, training=True)

        def play() -> Tensor:
            self._play(batch, "compare")
            return self._mean_loss(batch)

        return compare(self._world, self._placed, play, batch, self._loss, self._seed)

    @property
    def _placed(self) -> state.Placed:
        home = tuple(holders[0] for holders in self.setting.schedule.ranks_of_stage)
        at_home = [stage for rank, interpreter in self._made.interpreters.items() for stage in interpreter.stages.values()
                   if home[stage.index] == rank]  # fmt: skip
        return state.Placed(self.chain, self.setting.lengths, home, self._local_stages, at_home)

    def close(self) -> None:
        """Let go of links and threads."""
        self._world.close()


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
    copies = {Link(*pair) for ranks in schedule.ranks_of_stage for pair in itertools.permutations(ranks, 2)}
    return DistributedWorld(device, deadline_s, links, copies)
