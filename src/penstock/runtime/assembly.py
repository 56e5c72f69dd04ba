"""The ranks of this process with their stages, replica groups and tied weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.errors import SettingError
from penstock.optim.factory import OptimizerFactory, check_alike, group_numbers
from penstock.optim.scaling import LossScaler
from penstock.optim.schedulers import stand_in
from penstock.ranks.clock import clock_for
from penstock.ranks.peer_guard import PeerGuard
from penstock.ranks.settings.run_config import RunConfig
from penstock.ranks.tied_weights import Shared, Tied, shared_tensors
from penstock.ranks.world import World
from penstock.runtime.interpreter import Interpreter
from penstock.schedule.op import Schedule
from penstock.stage.activation_meter import ActivationMeter
from penstock.stage.finite_check import FiniteCheck
from penstock.stage.gradients.bucket_reduction import reduction_factory
from penstock.stage.gradients.bucket_sum import BucketSum
from penstock.stage.optimizer_shards import OptimizerShards
from penstock.stage.parallel.parallelism import Parallelism
from penstock.stage.replicas import ReplicaGroup
from penstock.stage.stage import Stage
from penstock.stage.stage_builder import StageBuilder, Training, parameter_names
from penstock.stage.stage_state import Placed
from penstock.stage.training_options import TrainingOptions
from penstock.tracing.meta_layers import without_others
from penstock.tracing.traced_chain import TracedChain
from penstock.transport.compressed import CompressedTransport
from penstock.transport.transport import Transport
from penstock.values.sharded import is_sharded


@dataclass(frozen=True)
class Assembly:
    """The local ranks of a run.

    Attributes:
        traced: the model.
        world: all ranks.
        setting: what is run.
        interpreters: by rank, its interpreter.
        wave_replicas: by rank and stage, the replica group of a stage whose replicas average
            weights after waves of batches, not gradients at every U.
        shared: tensors that several stages use.
        tied: by rank, its exchange of shared tensors with other ranks, if there are any.
        make: makes the optimizer of a stage; None without optimizers.
        parallelism: how processes share the layers of stages; None if they do not.
        zero: level of ZeRO among replicas of a stage.
    """

    traced: TracedChain
    world: World
    setting: RunConfig
    interpreters: Mapping[int, Interpreter]
    wave_replicas: Mapping[int, Mapping[int, ReplicaGroup]]
    shared: tuple[Shared, ...]
    tied: Mapping[int, Tied]
    make: OptimizerFactory | None
    parallelism: Parallelism | None = None
    zero: int = 0
    _stand_ins: list[Optimizer] = field(default_factory=list)

    @property
    def steps(self) -> bool:
        """Whether stages have optimizers, on this process or others."""
        return self.make is not None

    @property
    def stages(self) -> list[Stage]:
        """All stages of the local ranks."""
        return [
            stage
            for interpreter in self.interpreters.values()
            for stage in interpreter.stages.values()
        ]

    def share_weights(self) -> None:
        """Broadcast initial parameters and buffers.

        Replicas of a stage get those of the first replica, tied weights those of their home stage.
        """

        def share(rank: int) -> None:
            interpreter = self.interpreters[rank]
            for index, replicas in {**interpreter.replicas, **self.wave_replicas[rank]}.items():
                if index not in interpreter.parallel:  # shared before they were divided
                    replicas.share_weights()
            if rank in self.tied:
                self.tied[rank].begin()
            interpreter.finish()

        tied_over_ranks = any(len(shared.ranks) > 1 for shared in self.shared)
        if self.setting.schedule.copies > 1 or tied_over_ranks:
            self.world.run(share)

    def reset_gradient_hooks(self) -> None:
        """Drop what gradient hooks have accumulated in earlier steps, at every checkpoint.

        Checkpoints do not hold it. A run that goes on after a checkpoint then trains exactly as one
        that resumes from it.
        """
        for interpreter in self.interpreters.values():
            for replicas in interpreter.replicas.values():
                if replicas.buckets is not None:
                    replicas.buckets.reset()

    @contextmanager
    def whole_optimizer_state(self) -> Iterator[None]:
        """Within a `with` block, the first replica of a stage has all of its optimizer state.

        Replicas may divide it among them (ZeRO). All ranks enter the block at the same time.
        """
        shards = self._optimizer_shards()

        def gather(rank: int) -> None:
            for part in shards[rank]:
                part.gather_state()
            self.interpreters[rank].finish()

        if self.zero:
            self.world.run(gather)
        try:
            yield
        finally:
            self.drop_state_of_replicas()

    def drop_state_of_replicas(self) -> None:
        """Drop the optimizer state that belongs to other replicas of a stage."""
        for stage in self.stages:
            stage.update.drop_state_of_replicas()

    def _optimizer_shards(self) -> dict[int, list[OptimizerShards]]:
        """Return by rank of this process its shares of the optimizer state of its stages."""
        return {
            rank: [group.shards for group in interpreter.replicas.values() if group.shards]
            for rank, interpreter in self.interpreters.items()
        }

    @property
    def placed(self) -> Placed:
        """Home rank of every stage and shared tensor, and the local stages."""
        home = tuple(holders[0] for holders in self.setting.schedule.ranks_of_stage)
        at_home = [
            stage
            for rank, interpreter in self.interpreters.items()
            for stage in interpreter.stages.values()
            if home[stage.index] == rank
        ]
        return Placed(
            self.traced,
            self.setting.lengths,
            home,
            self.stages,
            at_home,
            {shared.name: shared.home for shared in self.shared},
        )

    def check_unshared(self, what: str, instead: str) -> None:
        """Reject what is not possible where processes share the layers of a stage.

        Args:
            what: what was called.
            instead: what to do.

        Raises:
            SettingError: they share them.
        """
        if self.parallelism is not None:
            raise SettingError(
                f"{what} is not possible where processes share the layers of a stage "
                f"(parallelize=): {instead}"
            )

    @property
    def optimizer_replicas(self) -> int:
        """Number of replicas of a stage that have separate optimizers."""
        stream = self.setting.schedule.stream
        if stream is None or stream.waves is None:
            return 1
        return self.setting.schedule.copies

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers of the local stages, or a stand-in if no local stage has one.

        Raises:
            SettingError: the pipeline has no optimizer on any rank.
        """
        if self.make is None:
            raise SettingError(
                "there is no learning rate to set: this pipeline has no optimizer. Pass one as "
                "optimizer="
            )
        optimizers = [
            stage.update.optimizer for stage in self.stages if stage.update.optimizer is not None
        ]
        # One stand-in for all calls: it holds the learning rate that was set through it.
        if not optimizers and not self._stand_ins:
            self._stand_ins.append(stand_in(self.make))
        return optimizers or self._stand_ins

    def broadcast_texts(self, texts: list[str]) -> tuple[str, ...]:
        """Return, on every rank, the texts of the first rank with trainable parameters."""
        description = self.traced.description
        # The stand-in optimizer of a rank without parameters may have other parameter groups.
        source_stage = 0
        for stage, (first, end) in enumerate(description.stage_bounds(self.setting.lengths)):
            names = {name for layer in description.layers[first:end] for name in layer.parameters}
            if any(description.tensor(name).trainable for name in names):
                source_stage = stage
                break
        source = self.setting.schedule.ranks_of_stage[source_stage][0]
        return tuple(self.world.broadcast(texts, source)) if texts else ()

    def names(self, stage: Stage) -> dict[nn.Parameter, str]:
        """Return the names in the chain of all parameters of a stage."""
        return parameter_names(self.traced, stage.layers)


def assemble(traced: TracedChain, setting: RunConfig, world: World, training: Training) -> Assembly:
    """Make the stages of the local ranks.

    Raises:
        ChainError: a tensor that several stages use cannot be shared between them.
        SettingError: a setting is invalid, or a function of the caller returned a wrong type.
    """
    shared = shared_tensors(traced.description, setting.lengths, setting.schedule)
    builder = StageBuilder(traced, setting, world, training, shared)
    interpreters: dict[int, Interpreter] = {}
    wave_replicas: dict[int, dict[int, ReplicaGroup]] = {}
    tied: dict[int, Tied] = {}
    stream = setting.schedule.stream
    in_waves = stream is not None and stream.waves is not None
    # A loss scaler checks the gradients, and skips the step.
    checks_gradients = builder.make is not None and LossScaler.of(training.options.scaler) is None
    for rank in world.local_ranks:
        meter = ActivationMeter()
        stages, rank_shared = builder.build_stages(rank, meter)
        guard = PeerGuard(rank, world.board(rank))
        replicas = _make_replicas(
            stages, guard, world, setting.schedule, rank_shared, training.options
        )
        wave_replicas[rank] = replicas if in_waves else {}
        interpreters[rank] = Interpreter(
            rank,
            stages,
            len(setting.lengths),
            _stage_links(world.transport(rank), training.options.boundary),
            world.board(rank),
            clock_for(world.device(rank)),
            {} if in_waves else replicas,
            meter,
            FiniteCheck(rank, training.options.on_nonfinite, gradients=checks_gradients),
            setting.predicted_bytes[rank] if setting.predicted_bytes else None,
            builder.parallel,
        )
        tied_tensors = [(entry, tensor) for entry, tensor in rank_shared if len(entry.ranks) > 1]
        if tied_tensors:
            tied[rank] = Tied(rank, tied_tensors, world.transport(rank), guard)
    if training.parallelism is not None:
        training.parallelism.watch_groups(world)
    _check_optimizers(traced, interpreters)
    _check_gradient_hook(training.options.gradient_hook, world)
    # Layers of other processes become copies on the meta device, which hold no memory.
    if len(world.local_ranks) < world.size:
        traced = without_others(traced, _local_layers(interpreters))
    return Assembly(
        traced,
        world,
        setting,
        interpreters,
        wave_replicas,
        shared,
        tied,
        builder.make,
        training.parallelism,
        training.options.zero_level,
    )


def _stage_links(transport: Transport, boundary: str | None) -> Transport:
    """Return the links between stages: those of the rank, with the compression of activations."""
    return transport if boundary is None else CompressedTransport(transport, boundary)


def _make_replicas(
    stages: Mapping[int, Stage],
    guard: PeerGuard,
    world: World,
    schedule: Schedule,
    shared: Sequence[tuple[Shared, Tensor]],
    options: TrainingOptions,
) -> dict[int, ReplicaGroup]:
    """Make the replica groups of a rank's stages that other ranks have too.

    Args:
        stages: the stages of a rank.
        guard: converts errors of its transport.
        world: all ranks.
        schedule: which ranks have which stages.
        shared: tensors of this rank that several stages use.
        options: those of gradient hooks and of ZeRO are used here.
    """
    rank = guard.rank
    shared_by_stages = [tensor for _, tensor in shared]
    replicas: dict[int, ReplicaGroup] = {}
    for index, stage in stages.items():
        ranks = schedule.ranks_of_stage[index]
        if len(ranks) > 1:
            replicas[index] = ReplicaGroup(
                stage,
                ranks,
                rank,
                world.transport(rank),
                guard,
                [*shared_by_stages, *filter(is_sharded, stage.tensors())],
                world.open_segment(ranks),
                # Buckets bring every sum to every replica; at level 1 each needs those of its part.
                None
                if options.zero_level
                else _bucket_sum(index, world, guard, options.gradient_hook),
                options.zero_level,
            )
    return replicas


def _check_gradient_hook(gradient_hook: str, world: World) -> None:
    """Warn, on the process of rank 0, if a gradient hook has no effect in this run."""
    if gradient_hook != "none" and 0 in world.local_ranks and not world.has_replica_collectives:
        warnings.warn(
            f"gradient_hook={gradient_hook!r} has no effect here: it is for copies of a stage in "
            "CPU processes on several hosts, and gradients of this run are summed exactly",
            stacklevel=2,
        )


def _bucket_sum(stage: int, world: World, guard: PeerGuard, gradient_hook: str) -> BucketSum | None:
    """Return the sum in buckets of a stage's gradients, where collective operations join it."""
    collectives = world.replica_collectives(stage)
    if collectives is None:
        return None
    return BucketSum(
        stage, collectives, reduction_factory(collectives, gradient_hook), guard.during
    )


def _local_layers(interpreters: Mapping[int, Interpreter]) -> set[int]:
    """Return the indices of all layers of the local ranks."""
    layers: set[int] = set()
    for interpreter in interpreters.values():
        for stage in interpreter.stages.values():
            layers.update(layer.index for layer in stage.layers)
    return layers


def _check_optimizers(traced: TracedChain, interpreters: Mapping[int, Interpreter]) -> None:
    """Reject replicas of a stage whose optimizers have different parameter groups."""
    groups_by_stage: dict[int, list[dict[str, int | None]]] = {}
    for interpreter in interpreters.values():
        for index, stage in interpreter.stages.items():
            numbers = group_numbers(stage.update.optimizer)
            names = parameter_names(traced, stage.layers)
            groups: dict[str, int | None] = {}
            for parameter in stage.update.candidates:
                groups[names[parameter]] = numbers.get(id(parameter))
            groups_by_stage.setdefault(index, []).append(groups)
    for index, replica_groups in sorted(groups_by_stage.items()):
        check_alike(index, replica_groups)
