"""Pipeline: train a model under a plan, on all its ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import SettingError
from penstock.optim.groups import GroupsOf
from penstock.optim.scaling import LossScaler
from penstock.optim.schedulers import SchedulerFactory, Schedulers
from penstock.optim.update import OptimizerFactory
from penstock.plan.plan import Plan
from penstock.runtime import state
from penstock.runtime.agreement import compare_optimizers, compare_settings, meeting_of
from penstock.runtime.assembly import assemble
from penstock.runtime.batch import Batch, make_batch, pair_of
from penstock.runtime.calls import END_OF_TRAIN
from penstock.runtime.compare import Comparison, compare
from penstock.runtime.inspection import Inspection
from penstock.runtime.loss_parameters import check_training
from penstock.runtime.meeting import announced
from penstock.runtime.model_state import ModelState, guard_for
from penstock.runtime.optimizing import Optimizing
from penstock.runtime.options import Options, check_accumulate
from penstock.runtime.persistence import Persistence
from penstock.runtime.plan_memory import check_optimizer_memory
from penstock.runtime.player import Mode, Player, stream_portions
from penstock.runtime.preparation import Preparation
from penstock.runtime.ranks import Place, world_of
from penstock.runtime.replica_check import check_replicas
from penstock.runtime.results import mean_loss, outputs
from penstock.runtime.setting import Words, check, setting_of
from penstock.runtime.stage import Loss, Stage
from penstock.runtime.stage_builder import Training
from penstock.runtime.stage_loss import LossOptions
from penstock.runtime.streaming import Streaming
from penstock.runtime.together import Together
from penstock.runtime.trainability import Trainability
from penstock.schedule.op import Schedule
from penstock.tracing.chain import TracedChain, chain
from penstock.tracing.slices import check_slices


class Pipeline(Optimizing, ModelState, Inspection):
    """A model cut over ranks, with its loss and optimizers. Every rank makes one and calls the same
    methods with the same data.

    Args:
        model: an `nn.Sequential`, a list of modules, or a chain from `ps.chain`. Modules with real
        weights are trained in
            place. Modules on the meta device are made on the ranks that hold them, from `seed` and
            their place in the chain.
        plan: from `ps.plan`; or say it yourself with the next four.
        loss: `loss(output, target)` to one number, or to `(sum, count)`, which is that of the
        undivided batch: micro-batches are
            weighed by what they count (samples, tokens that are not ignored, class weights, 1 for
            sums), and a loss that cannot be divided is refused. Where a schedule cuts sequences, x
            and y have the tokens in their second dimension.
        optimizer: from a list of parameters to an optimizer; called once for every stage. Without
        it gradients add up in
            `.grad` and nothing is updated.
        balance: layers per stage.
        schedule: a schedule, or the name of one.
        micro_batches: parts that a batch is cut into. A batch with fewer samples is cut into single
        samples. recompute: "never", "except_last" or "always": run a micro-batch's forward again
        before its backward. Or layers, by
            name or place: these run again by themselves.
        weights: name of the weight rule; by default the one that the schedule is made for.
        weights_options: numbers that the rule takes; its own page says which.
        seed: of initial weights and dropout. Both depend on it and the layer (dropout also on step
        and micro-batch), never on
            the cut.
        device: where this process computes; by default a GPU if there is one for every rank of the
        host. deadline_s: seconds that a rank waits for another before the run is stopped with a
        word on who waits for what. executor: "processes" (one rank in each, under torchrun or
        `ps.launch`) or "threads" (all ranks in this process, for
            tests and debugging). By default processes if there are several, threads if there is one
            rank alone.
        clip_grad_norm: how long the gradients of all stages may be together, as
        torch.nn.utils.clip_grad_norm_. clip_norm_type: of that norm, such as 2.0, 1.0 or
        float("inf"). clip_grad_value: the largest absolute value in a gradient at a step, as
        torch.nn.utils.clip_grad_value_. autocast: torch.bfloat16 or torch.float16: mixed precision
        in layers and loss. scaler: True, options of torch.amp.GradScaler by name, or one: dynamic
        loss scaling, skipped on all ranks or none. parameter_groups: from a parameter's name and
        the parameter to options of its group, such as `{"weight_decay": 0.0}`;
            the optimizer is then made from parameter groups.
        accumulate: batches for each step, which has the mean of their gradients.
        compile: True, or options of `torch.compile`, for every stage.
        memory_format: such as torch.channels_last, for weights.
        deferred_batch_norm: let running statistics be those of whole batches, and not move with
        every micro-batch. offload: keep what layers save for their backward in host memory, where
        the device has a memory of its own. boundary: "bfloat16" or "int8": send activations and
        their gradients in fewer bits. That changes what is learnt, a little
            (benchmarks/boundary).
        check_data: compare the batches of ranks that are processes, as docs/training.md says. For
        all ranks or none. loss_weight: from a micro-batch's targets to how much they count, for a
        loss of which that is not known otherwise. loss_on: "batch" computes the loss once, on all
        outputs, if samples see each other in it (gpipe and its like).

    Raises:
        SettingError, PlanError, ScheduleError, ChainError: what is asked for makes no sense, or
        cannot be done. RanksDiffer: ranks that are processes are about to run different models or
        settings; the message says in what. RunError: the ranks are not there.
    """

    @announced
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
        recompute: str | Collection[int | str] | None = None,
        weights: str | None = None,
        weights_options: Mapping[str, float] | None = None,
        seed: int = 0,
        device: str | torch.device | None = None,
        deadline_s: float = 300.0,
        executor: str | None = None,
        clip_grad_norm: float | None = None,
        autocast: torch.dtype | None = None,
        scaler: object = None,
        parameter_groups: GroupsOf | None = None,
        accumulate: int = 1,
        compile: bool | Mapping[str, Any] | None = None,  # noqa: A002 - as torch calls it
        memory_format: torch.memory_format | None = None,
        deferred_batch_norm: bool = False,
        offload: bool = False,
        boundary: str | None = None,
        clip_norm_type: float = 2.0,
        clip_grad_value: float | None = None,
        check_data: bool = True,
        loss_weight: Callable[[Any], Any] | None = None,
        loss_on: str = "micro_batch",
    ) -> None:
        traced = model if isinstance(model, TracedChain) else chain(model)
        words = Words(balance, schedule, micro_batches, recompute, weights, weights_options)
        self.setting = setting_of(traced, plan, words)
        options = Options(
            clip_grad_norm,
            autocast,
            scaler,
            parameter_groups,
            accumulate,
            compile,
            memory_format,
            deferred_batch_norm,
            offload,
            boundary,
            clip_norm_type,
            clip_grad_value,
            LossOptions(loss_weight, loss_on),
        )
        check(self.setting)
        options.check(self.setting.schedule, loss, steps=optimizer is not None)
        check_training(traced, loss, optimizer)
        self.chain = options.converted(traced, self.setting.schedule.micro_batches)
        self.chain.description.stage_bounds(self.setting.lengths)
        check_slices(self.chain, self.setting.schedule)
        check_replicas(self.chain, self.setting)
        scaling = LossScaler.of(scaler)
        place = Place(executor, None if device is None else torch.device(device), deadline_s)
        self._training = Training(loss, optimizer, seed, options)
        self._meeting = meeting = meeting_of(self.setting, place)
        compare_settings(meeting, self.chain, self.setting, self._training, check_data=check_data)
        self._world = world_of(self.setting, self.chain.description, place)
        options.check_compiler(self._world.device(self._world.local_ranks[0]))
        self._step = self._gathered = 0
        self._accumulate = accumulate
        self._made = assemble(self.chain, self.setting, self._world, self._training)
        compare_optimizers(meeting, self._made)
        self._guard = guard_for(self.chain, self._made)
        whole, self.chain = self.chain, self._made.traced
        if plan is not None and optimizer is not None:
            check_optimizer_memory(plan, self.chain.description, self._made.optimizers()[0])
        self._world.calls.check_data = check_data
        self._made.share_weights()
        self._together = Together(self._made, scaling, clip_grad_norm, norm_type=clip_norm_type)
        self._trainability = Trainability(self._made, self._together, whole)
        self._player = Player(self._made, self._together)
        self._stream: Streaming | None = None
        if self.setting.schedule.stream is not None:
            self._made.let_read()
            self._stream = Streaming(self._made, stream_portions(self._made))
        self._persistence = Persistence(self._made, self._together, self._stream)
        self._preparation = Preparation(self._made, autocast, self._drain)
        self._preparation.begin()

    # -- running
    # ------------------------------------------------------------------------------------------------------

    def train_batch(self, x: Any, y: Any, *, update: bool | None = None) -> Tensor:
        """Run the schedule on one batch and update the weights. An asynchronous schedule drains
        afterwards: drive it by `train`.

        Args:
            x: inputs, nested tensors with the samples in their first dimension: in tuples, lists,
            mappings and records. y: targets, likewise. update: False adds the gradients to those
            that are there and leaves the weights; True steps with what has been added up.
                By default every batch steps, or every `accumulate`-th.

        Returns:
            The mean loss of the batch, a float tensor, the same on every rank.

        Raises:
            RunError: an op failed, here or elsewhere; the message says which. With ranks in
            processes the run is over. With
                threads it can go on: all gradients are dropped, but stages that had come to their
                update have had it.
        """
        steps = self._gathered + 1 >= self._accumulate if update is None else update
        call = "train_batch" if steps else "train_batch without an update"
        batch = self._batch(x, y, training=True, call=call)
        self._persistence.check_schedulers()
        if self._stream is not None:
            if update is not None:
                raise SettingError(
                    "update= is for synchronous schedules: an asynchronous one updates after every "
                    "batch"
                )
            self._feed(self._stream, batch)
            self.flush()
            return self._stream.ready.pop()[1]
        # If it fails, nothing is left of the batches before.
        gathered, self._gathered = self._gathered, 0
        self._mark_stale()
        self._player.play(batch, Mode.TRAIN, steps=steps, factor=1 / self._accumulate)
        self._gathered = 0 if steps else gathered + 1
        self._step += 1
        return self._mean_loss(batch)

    def update(self) -> None:
        """Step with the gradients of the batches since the last step; without any, nothing happens.

        Raises:
            SettingError: there is no optimizer.
        """
        if not self._made.steps:
            raise SettingError(
                "there is nothing to step: this pipeline has no optimizer. Give it one by "
                "optimizer="
            )
        self._world.calls.enter("update")
        if self._gathered:
            self._gathered = 0
            self._player.step()

    def train(self, loader: Iterable[tuple[Any, Any]]) -> Iterator[Tensor]:
        """Train on every batch of `loader`; yields the losses in batch order.

        An asynchronous schedule stays full from batch to batch, so the loss of a batch comes when
        later batches have been taken from the loader, at the same place on every rank. It drains at
        the end of the loader, and for `flush`, evaluation, `save`, `state_dict` and their like; it
        then fills anew.

        Raises:
            RunError: see `train_batch`.
            SettingError: the loader yields something else than pairs.
        """
        first = self._step
        self._world.calls.check_loader(loader)
        for item in loader:
            x, y = pair_of(item)
            if self._stream is None:
                yield self.train_batch(x, y)
                continue
            self._feed(self._stream, self._batch(x, y, training=True, call="train_batch"))
            yield from self._stream.taken(first)
        self._world.calls.enter(END_OF_TRAIN)
        self.flush()
        if self._stream is not None:
            yield from self._stream.taken(first)

    def _feed(self, stream: Streaming, batch: Batch) -> None:
        self._player.played = None
        self._persistence.check_schedulers()
        self._mark_stale()
        stream.feed(batch)
        self._step += 1

    def flush(self) -> None:
        """Let everything under way finish. A synchronous schedule has nothing under way between
        batches.
        """
        self._enter("flush")
        self._world.barrier()

    def eval_batch(self, x: Any, y: Any) -> Tensor:
        """The mean loss of a batch, with layers in evaluation mode. Weights, gradients, buffers and
        random state stay.
        """
        self._drain()
        batch = self._batch(x, y, training=False, call="eval_batch")
        self._player.play(batch, Mode.EVALUATE)
        return self._mean_loss(batch)

    def forward(self, x: Any) -> Any:
        """The model's output on `x`, with layers in evaluation mode, on every rank."""
        self._drain()
        batch = make_batch(
            x,
            None,
            self.setting.schedule.micro_batches,
            step=self._step,
            training=False,
            slicing=self.setting.schedule.slicing,
        )
        self._world.calls.begin(batch, x, None, "forward")
        self._preparation.prepare(batch)
        self._player.play(batch, Mode.EVALUATE)
        return outputs(self._world, self._player.one_batch, batch)

    def zero_grad(self) -> None:
        """Drop the gradients of the stages held here."""
        self._world.calls.enter("zero_grad")
        self._gathered = 0
        self._player.zero()

    def _batch(self, x: Any, y: Any, *, training: bool, call: str) -> Batch:
        if y is None:
            raise SettingError(
                "a batch needs targets for its loss, not None: where the loss takes none, give the "
                "inputs again"
            )
        batch = make_batch(
            x,
            y,
            self.setting.schedule.micro_batches,
            step=self._step,
            training=training,
            slicing=self.setting.schedule.slicing,
        )
        batch = self._world.calls.begin(batch, x, y, call)
        batch = self._trainability.checked(batch)
        return self._preparation.prepare(batch)

    def _enter(self, call: str) -> None:
        """Begin what every rank must do, when all that is under way has finished."""
        self._world.calls.enter(call)
        self._drain()

    def _drain(self) -> None:
        if self._stream is not None:
            self._stream.flush()

    def _mean_loss(self, batch: Batch) -> Tensor:
        return mean_loss(self._world, self._player.one_batch, batch)

    # -- looking
    # ------------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Batches trained so far, those before a checkpoint included."""
        return self._step

    @property
    def accumulate(self) -> int:
        """Batches for each step; may be set between steps."""
        return self._accumulate

    @accumulate.setter
    def accumulate(self, count: int) -> None:
        """Set the batches for each step.

        Raises:
            SettingError: gradients of some batches wait for their step, or the schedule is
            asynchronous.
        """
        check_accumulate(count, self.setting.schedule)
        if self._gathered:
            raise SettingError(
                f"accumulate cannot change while the gradients of {self._gathered} batches wait "
                "for their step: update() or zero_grad() first"
            )
        self._accumulate = count

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the stages held here, by the model's own names. One that several stages
        use is given at its home alone.
        """
        for stage in self._local_stages:
            borrowed = set(map(id, stage.update.borrowed))
            yield from (
                (name, parameter)
                for parameter, name in self._made.names(stage).items()
                if id(parameter) not in borrowed
            )

    def parameters(self) -> Iterator[nn.Parameter]:
        """Likewise, without names: for an optimizer of the user's own, where the pipeline has none."""
        return (parameter for _, parameter in self.named_parameters())

    def scheduler(self, make: SchedulerFactory) -> Schedulers:
        """A learning-rate scheduler over the optimizers of all stages. Checkpoints keep its state.

        Args:
            make: from an optimizer to a scheduler, such as `lambda optimizer: StepLR(optimizer,
            10)`.

        Raises:
            SettingError: there is no optimizer, `make` returned something else, or a checkpoint was
            loaded that has the state of
                another kind of scheduler in this one's place.
        """
        self._world.calls.enter("scheduler")
        return self._persistence.scheduler(make)

    def compare_with_one_device(self, x: Any, y: Any) -> Comparison:
        """Run one batch through the pipeline and through plain training, and compare. Nothing is
        updated; print what is returned.

        Returns:
            On rank 0 the largest error of each parameter's gradient, each buffer, the outputs and
            the loss; elsewhere an empty comparison.
        """
        self._drain()
        batch = self._batch(x, y, training=True, call="compare_with_one_device")
        batch.keeps_outputs = True

        def play() -> Tensor:
            self._player.play(batch, Mode.COMPARE)
            return self._mean_loss(batch)

        return compare(self._made, play, batch, self._training)

    # -- keeping
    # ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """On rank 0: parameters and buffers of the whole model, on the CPU, under the model's own
        names. Elsewhere empty.
        """
        self._enter("state_dict")
        return state.collect(self._world, self._made.placed)

    def load_state_dict(
        self, tensors: Mapping[str, Tensor], strict: bool = True
    ) -> state.IncompatibleKeys:
        """Take the values of the stages held here from the whole model's state, as
        `torch.nn.Module.load_state_dict`.

        Args:
            tensors: by the model's names.
            strict: False passes over names that are missing or not the model's.

        Returns:
            Those names, as `missing_keys` and `unexpected_keys`, of the whole model on every rank.

        Raises:
            SettingError: a tensor has another shape; or, with `strict`, is missing or not the
            model's.
        """
        self._world.calls.enter("load_state_dict")
        self._mark_stale()
        if self._stream is not None:
            self._stream.begin_anew()
        found = state.load(self._made.placed, tensors, strict=strict)
        if self._stream is not None:
            self._made.let_read()
        return found

    def save(self, folder: str | Path, *, allow_nonfinite: bool = False) -> None:
        """Write weights, optimizers, schedulers, scaler and step into `folder`: one file per stage,
        readable under any other plan.

        Args:
            folder: where to; with ranks on several hosts, on a disk that all of them share.
            allow_nonfinite: write NaN values in parameters and optimizer state too.

        Raises:
            FileError: the folder cannot be written, or rank 0 does not see what another rank wrote.
            The checkpoint that was there
                before is still whole.
            SettingError: gradients wait for their step, there are NaN values, or an optimizer keeps
            something that no file can hold.
        """
        self._enter("save")
        self._persistence.save(folder, self._step, self._gathered, nonfinite=allow_nonfinite)

    def load(
        self, folder: str | Path, *, skip: str | Collection[str] = (), allow_nonfinite: bool = False
    ) -> None:
        """Go on from what `save` wrote, under this or any other plan for the same model.

        Args:
            folder: where `save` wrote.
            skip: what to leave as it is: any of "optimizer" (its state and options, and the other
            three), "schedulers", "scaler" and
                "weight_rule". An optimizer that is skipped begins anew.
            allow_nonfinite: take NaN values in parameters and optimizer state too.

        Raises:
            FileError: there is no whole checkpoint, a file is damaged or of another checkpoint, or
            something does not fit this
                pipeline: its model, the classes of its optimizer and schedulers, its parameter
                groups. On every rank, then, and nothing has changed on any.
        """
        self._world.calls.enter("load")
        self._mark_stale()
        self._step = self._persistence.load(folder, skip=skip, nonfinite=allow_nonfinite)
        self._gathered = 0

    @property
    def _local_stages(self) -> list[Stage]:
        return self._made.stages

    def close(self) -> None:
        """Let go of links and threads."""
        self._release_guard()
        self._world.close()
