"""`Pipeline`: train a model on several ranks, under a plan or a schedule."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.batches.batch import Batch, make_batch, parse_pair
from penstock.errors import SettingError
from penstock.losses.parameters import check_training
from penstock.optim.scaling import LossScaler
from penstock.optim.schedulers import SchedulerFactory, Schedulers
from penstock.optim.update import OptimizerFactory
from penstock.option import describe_options, signature_with_options
from penstock.plan.plan import Plan
from penstock.ranks.calls import END_OF_TRAIN
from penstock.ranks.make_world import Place, world_of
from penstock.ranks.mesh.copy_batches import CopyBatches
from penstock.ranks.mesh.replicated_setting import plan_for_mesh, replicated
from penstock.ranks.results import outputs
from penstock.ranks.settings.run_config import Overrides, check, make_run_config
from penstock.ranks.settings.settings_exchange import report_failures
from penstock.runtime.assembly import assemble
from penstock.runtime.global_step import GlobalStep
from penstock.runtime.graph_preparation import Preparation
from penstock.runtime.inspection import Inspection
from penstock.runtime.optimizer_memory import check_optimizer_memory
from penstock.runtime.optimizer_methods import Optimizing
from penstock.runtime.player import Mode, Player, make_stream
from penstock.runtime.settings_check import (
    compare_optimizers,
    compare_settings,
    next_settings_exchange,
    place_on_hosts,
)
from penstock.runtime.slow_ranks import BusyTimes
from penstock.runtime.state.model_state_methods import ModelState, guard_for
from penstock.runtime.state.persistence import Persistence
from penstock.runtime.state.saving_methods import Saving
from penstock.runtime.streaming import Streaming
from penstock.runtime.trainability import Trainability
from penstock.schedule.op import Schedule
from penstock.stage import stage_state as state
from penstock.stage.parallel.parallelism import Parallelism
from penstock.stage.replica_check import check_replicas
from penstock.stage.stage import Loss
from penstock.stage.stage_builder import Training
from penstock.stage.training_arguments import TrainingArguments
from penstock.stage.training_options import TrainingOptions, parse_options
from penstock.tracing.slices import check_slices
from penstock.tracing.traced_chain import TracedChain, as_chain
from penstock.weights.catalogue import WeightRule


class Pipeline(Optimizing, ModelState, Saving, Inspection):
    """A model partitioned over ranks, with its loss and optimizers.

    Every rank makes a `Pipeline` and calls the same methods with the same data.

    Args:
        model: an `nn.Sequential`, a list of modules, or a chain from `ps.chain`. Modules with real
            weights are trained in place. Modules on the meta device are materialised on the ranks
            that run them, with weights that depend on `seed` and their position in the chain.
        plan: a plan from `ps.plan`; or give `balance` and further arguments to `weights_options`.
        loss: `loss(output, target)` returning a scalar or `(sum, count)`. The result is that of the
            undivided batch: micro-batches are weighted by what the loss counts (samples, tokens
            that are not ignored, class weights, 1 for sums). A loss that cannot be divided raises.
            If the schedule slices sequences, x and y have the tokens in their second dimension.
        optimizer: a function from a list of parameters to an optimizer, called once per stage. By
            default gradients accumulate in `.grad` and weights are not updated.
        balance: number of layers per stage.
        schedule: a schedule, or the name of one.
        micro_batches: number of micro-batches. A batch of fewer samples has one sample in each.
        recompute: "never", "except_last" or "always": which micro-batches run their forward again
            before their backward; or the layers to recompute, by name or index.
        weights: name of the weight rule; by default that of the schedule.
        weights_options: options of the weight rule; see its page.
        seed: seed of initial weights and dropout. Both depend on the seed and the layer (dropout
            also on step and micro-batch), but not on the balance.
        device: device of this process; by default a GPU if the host has one for each of its ranks.
        deadline_s: seconds that a rank waits for another before the run is stopped. The message
            says what each rank waits for.
        executor: "processes" (one rank per process, under torchrun or `ps.launch`) or "threads"
            (all ranks in this process, for tests and debugging). By default "threads" if the
            schedule has one rank and there is no process group, else "processes".
        check_data: compare the batches of ranks in processes (docs/training.md). All ranks must
            have the same value.
        example: inputs on which a model that is no list of layers is traced, as for `chain`.
        mesh: a torch `DeviceMesh` with the dimension "pp", then "dp" for copies of the pipeline,
            which read their own data, and "tp" for shared layers (docs/mesh.md).
        options: further options of training, the fields of `TrainingOptions`:
            {options}

    Raises:
        SettingError, PlanError, ScheduleError, ChainError: an argument is invalid, or the
            combination is not possible.
        RanksDiffer: ranks in processes have different models or settings; the message names the
            difference.
        RunError: the processes of the ranks cannot be reached.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> pipe = Pipeline(model, loss=nn.functional.mse_loss, optimizer=torch.optim.SGD,
        ...                 balance=[2, 1], micro_batches=2, executor="threads")
        >>> pipe.train_batch(torch.ones(8, 4), torch.ones(8, 2)).shape
        torch.Size([])
    """

    @report_failures
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
        weights: str | WeightRule | None = None,
        weights_options: Mapping[str, float] | None = None,
        seed: int = 0,
        device: str | torch.device | None = None,
        deadline_s: float = 300.0,
        executor: str | None = None,
        check_data: bool = True,
        example: Any = None,
        mesh: DeviceMesh | None = None,
        **options: Unpack[TrainingArguments],
    ) -> None:
        training_options = parse_options(options).with_plan(plan)
        traced = as_chain(model, example)
        overrides = Overrides(balance, schedule, micro_batches, recompute, weights, weights_options)
        place = Place.of(executor, device, deadline_s, mesh)
        run_config = make_run_config(traced, plan_for_mesh(plan, place.mesh), overrides)
        self.setting = replicated(run_config, place.mesh)
        check(self.setting)
        training_options.check(self.setting.schedule, loss, steps=optimizer is not None)
        check_training(traced, loss, optimizer)
        self.chain = training_options.converted(traced, self.setting.schedule.micro_batches)
        self.chain.description.stage_bounds(self.setting.lengths)
        check_slices(self.chain, self.setting.schedule)
        check_replicas(self.chain, self.setting)
        parallelism = Parallelism.of(place.mesh, training_options, self.setting, traced)
        scaling = LossScaler.of(training_options.scaler)
        self._training = training = Training(loss, optimizer, seed, training_options, parallelism)
        self._settings_exchange, group = next_settings_exchange(self.setting, place)
        self.setting = place_on_hosts(self._settings_exchange, self.setting)
        # Before ranks wait for each other's tensors: those with different settings would block.
        compare_settings(
            self._settings_exchange, self.chain, self.setting, training, check_data=check_data
        )
        self._world = world_of(self.setting, self.chain.description, place, group)
        training_options.check_compiler(self._world.device(self._world.local_ranks[0]))
        self._copies = CopyBatches.of(
            place.mesh, self._world, self.setting, traced, compares=check_data
        )
        self._step = self._accumulated = 0
        self._accumulate = training_options.accumulate
        self._assembly = assemble(self.chain, self.setting, self._world, self._training)
        compare_optimizers(self._settings_exchange, self._assembly)
        self._guard = guard_for(self.chain, self._assembly)
        whole_chain, self.chain = self.chain, self._assembly.traced
        if plan is not None and optimizer is not None and parallelism is None:
            check_optimizer_memory(plan, self.chain.description, self._assembly.optimizers()[0])
        self._world.calls.check_data = check_data
        self._assembly.share_weights()
        self._begin(scaling, whole_chain)

    def _begin(self, scaling: LossScaler | None, whole_chain: TracedChain) -> None:
        """Make what plays batches, when the stages have their weights.

        Args:
            scaling: the loss scaler, if any.
            whole_chain: the model as the caller has it, with the layers of other ranks.
        """
        training_options = self._training.options
        self._global_step = GlobalStep(self._assembly, scaling, training_options)
        # The assembly's chain has the layers of other ranks on the meta device; freezing is watched
        # on the parameters of the whole chain.
        self._trainability = Trainability(self._assembly, self._global_step, whole_chain)
        self._player = Player(self._assembly, self._global_step)
        self._stream = make_stream(self._assembly)
        self._persistence = Persistence(self._assembly, self._global_step, self._stream)
        autocast_dtype = training_options.autocast_dtype
        self._preparation = Preparation(self._assembly, autocast_dtype, self._drain)
        self._preparation.begin()
        self._busy_times = BusyTimes(self._settings_exchange, self.setting)

    # -- training and evaluation

    def train_batch(self, x: Any, y: Any, *, update: bool | None = None) -> Tensor:
        """Run the schedule on one batch and update the weights.

        An asynchronous schedule drains afterwards: use `train` for it.

        Args:
            x: inputs: tensors with the samples in their first dimension, nested in tuples, lists,
                mappings and records.
            y: targets, likewise.
            update: False accumulates gradients without updating the weights; True updates with the
                accumulated gradients. By default every batch updates, or every `accumulate`-th.

        Returns:
            The mean loss of the batch, a float32 scalar, equal on every rank.

        Raises:
            RunError: an op failed on any rank; the message says which. With ranks in processes the
                run is over. With threads it can continue: all gradients are dropped, but stages
                that had reached their update have been updated.
        """
        steps = self._accumulated + 1 >= self._accumulate if update is None else update
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
            self._world.calls.enter("flush")
            self._stream.flush()  # deferred checks are read by a later batch
            self._world.barrier()
            # The last entry: losses of an unfinished `train` may stand before it.
            return self._stream.ready.pop()[1]
        # 0 during the batch: if it fails, the gradients of earlier batches are dropped too.
        accumulated, self._accumulated = self._accumulated, 0
        self._mark_stale()
        self._player.play(batch, Mode.TRAIN, steps=steps, factor=1 / self._accumulate)
        self._accumulated = 0 if steps else accumulated + 1
        self._step += 1
        self._busy_times.step(self._assembly.interpreters)
        return self._player.mean_loss(batch)

    def update(self) -> None:
        """Update the weights with the accumulated gradients, if there are any.

        Raises:
            SettingError: there is no optimizer.
        """
        if not self._assembly.steps:
            raise SettingError(
                "there is nothing to step: this pipeline has no optimizer. Pass one as optimizer="
            )
        self._world.calls.enter("update")
        if self._accumulated:
            self._accumulated = 0
            self._player.step()

    def train(self, loader: Iterable[tuple[Any, Any]]) -> Iterator[Tensor]:
        """Train on every batch of `loader`; yield the losses in batch order.

        An asynchronous schedule stays full between batches. The loss of a batch is therefore
        yielded after later batches have been read from the loader, at the same point on every rank.
        The pipeline drains at the end of the loader and for `flush`, evaluation, `save`,
        `state_dict` and similar calls, and then fills again.

        Raises:
            RunError: see `train_batch`.
            SettingError: the loader yields items other than pairs.
        """
        first = self._step
        # Copies of a mesh read different data by design.
        if self._copies is None:
            self._world.calls.check_loader(loader)
        for item in loader:
            x, y = parse_pair(item)
            if self._stream is None:
                yield self.train_batch(x, y)
                continue
            self._feed(self._stream, self._batch(x, y, training=True, call="train_batch"))
            yield from self._stream.take_losses(first)
        self._world.calls.enter(END_OF_TRAIN)
        self.flush()
        if self._stream is not None:
            yield from self._stream.take_losses(first)

    def _feed(self, stream: Streaming, batch: Batch) -> None:
        """Give a batch to the stream of an asynchronous schedule."""
        # So that `timeline` shows the stream and not the batch that was evaluated last.
        self._player.played = None
        self._persistence.check_schedulers()
        self._mark_stale()
        stream.feed(batch)
        self._step += 1

    def flush(self) -> None:
        """Wait until all batches in flight are done; a synchronous schedule has none."""
        self._enter("flush")
        self._world.barrier()

    def eval_batch(self, x: Any, y: Any) -> Tensor:
        """Return the mean loss of a batch with layers in evaluation mode.

        Weights, gradients, buffers and random state do not change.
        """
        self._drain()
        batch = self._batch(x, y, training=False, call="eval_batch")
        self._player.play(batch, Mode.EVALUATE)
        return self._player.mean_loss(batch)

    def forward(self, x: Any) -> Any:
        """Return the model's output for `x`, with layers in evaluation mode, on every rank."""
        self._drain()
        if self._copies is not None:
            x, _ = self._copies.joined(x, None)
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
        value = outputs(self._world, self._player.one_batch, batch)
        return value if self._copies is None else self._copies.outputs_of_copy(value)

    def zero_grad(self) -> None:
        """Drop the gradients of the local stages, after all batches in flight are done."""
        self._world.calls.enter("zero_grad")
        self._settle()
        self._accumulated = 0
        self._player.zero()

    def _batch(self, x: Any, y: Any, *, training: bool, call: str) -> Batch:
        """Return a batch with targets, checked and compared between ranks.

        Args:
            x: inputs.
            y: targets.
            training: whether gradients are computed.
            call: the calling method, which must be the same on all ranks.
        """
        if y is None:
            raise SettingError(
                "a batch needs targets for its loss, not None: for a loss without targets, pass "
                "the inputs again"
            )
        if self._copies is not None:
            x, y = self._copies.joined(x, y)
        batch = make_batch(
            x,
            y,
            self.setting.schedule.micro_batches,
            step=self._step,
            training=training,
            slicing=self.setting.schedule.slicing,
        )
        batch = self._world.calls.begin(batch, x, y, call)
        if self._stream is not None:
            batch.checksum()  # the next batches come before this one is done
        batch = self._trainability.checked(batch)
        return self._preparation.prepare(batch)

    def _enter(self, call: str) -> None:
        """Begin a call that all ranks must make, after all batches in flight are done."""
        self._world.calls.enter(call)
        self._drain()

    def _drain(self) -> None:
        if self._stream is not None:
            self._stream.flush()
        self._player.read_checks()

    # -- settings and self-check

    @property
    def step(self) -> int:
        """Number of batches trained so far, including those before a checkpoint."""
        return self._step

    def scheduler(self, make: SchedulerFactory) -> Schedulers:
        """Make a learning-rate scheduler over the optimizers of all stages.

        Checkpoints include its state.

        Args:
            make: a function from an optimizer to a scheduler, such as
                `lambda optimizer: StepLR(optimizer, 10)`.

        Raises:
            SettingError: there is no optimizer, `make` did not return a scheduler, or the loaded
                checkpoint has the state of another kind of scheduler at this position.
        """
        self._world.calls.enter("scheduler")
        return self._persistence.scheduler(make)

    # -- saving and loading

    def state_dict(self) -> dict[str, Tensor]:
        """Return parameters and buffers of the whole model on rank 0, an empty dict elsewhere.

        They are on the CPU, under the names of the model.
        """
        self._enter("state_dict")
        return state.collect(self._world, self._assembly.placed)

    def load_state_dict(
        self, tensors: Mapping[str, Tensor], strict: bool = True
    ) -> state.IncompatibleKeys:
        """Load the local stages from the whole model's state, as `torch.nn.Module.load_state_dict`.

        Args:
            tensors: tensors by the names of the model.
            strict: whether missing and unexpected names are errors.

        Returns:
            The missing and unexpected names of the whole model, on every rank.

        Raises:
            SettingError: a tensor has another shape; or, with `strict`, a name is missing or
                unexpected.
        """
        self._world.calls.enter("load_state_dict")
        self._mark_stale()
        if self._stream is not None:
            self._stream.empty()
        incompatible_keys = state.load(self._assembly.placed, tensors, strict=strict)
        if self._stream is not None:
            self._stream.weights.restart()
        return incompatible_keys

    def close(self) -> None:
        """Close links and end threads. Raises RunError if a deferred check has failed."""
        self._release_guard()
        self._busy_times.close()
        self._world.close()
        for stage in self._assembly.stages:
            stage.read_checks()


Pipeline.__doc__ = str(Pipeline.__doc__).format(options=describe_options(TrainingOptions))
vars(Pipeline.__init__)["__signature__"] = signature_with_options(
    Pipeline.__init__, TrainingOptions
)
