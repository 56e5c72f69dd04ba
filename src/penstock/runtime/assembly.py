"""The ranks of this process with their stages, replica groups, tied weights and weight rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.checkpoint.checkpoint import VersionedStage
from penstock.errors import SettingError
from penstock.optim.catalogue import stage_weights
from penstock.optim.factory import OptimizerFactory, check_alike, group_numbers
from penstock.optim.schedulers import stand_in
from penstock.optim.stage_weights import Site, StageWeights
from penstock.ranks.clock import clock_for
from penstock.ranks.run_config import RunConfig
from penstock.ranks.tied_weights import Shared, Tied, shared_tensors
from penstock.ranks.world import World
from penstock.runtime.interpreter import Interpreter
from penstock.schedule.op import Schedule
from penstock.stage.replicas import Copies, WaveReplicaExchange
from penstock.stage.stage import Stage
from penstock.stage.stage_builder import StageBuilder, Training, parameter_names
from penstock.stage.stage_state import Placed
from penstock.tracing.meta_layers import without_others
from penstock.tracing.traced_chain import TracedChain
from penstock.transport.compressed import CompressedTransport
from penstock.transport.payload import TensorForm
from penstock.weights.compatibility import rule_of
from penstock.weights.weight_uses import Uses, uses


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
    """

    traced: TracedChain
    world: World
    setting: RunConfig
    interpreters: Mapping[int, Interpreter] = field(default_factory=dict)
    wave_replicas: Mapping[int, Mapping[int, Copies]] = field(default_factory=dict)
    shared: tuple[Shared, ...] = ()
    tied: Mapping[int, Tied] = field(default_factory=dict)
    make: OptimizerFactory | None = None
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
            for copies in {**interpreter.copies, **self.wave_replicas[rank]}.values():
                copies.share_weights()
            if rank in self.tied:
                self.tied[rank].begin()
            interpreter.finish()

        replicated = any(len(ranks) > 1 for ranks in self.setting.schedule.ranks_of_stage)
        tied_over_ranks = any(len(shared.ranks) > 1 for shared in self.shared)
        if replicated or tied_over_ranks:
            self.world.run(share)

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

    @property
    def lives(self) -> int:
        """Number of replicas of a stage that have separate optimizers."""
        stream = self.setting.schedule.stream
        if stream is None or stream.waves is None:
            return 1
        return max(map(len, self.setting.schedule.ranks_of_stage))

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
        if not optimizers and not self._stand_ins:
            self._stand_ins.append(stand_in(self.make))
        return optimizers or self._stand_ins

    def broadcast_texts(self, texts: list[str]) -> tuple[str, ...]:
        """Return, on every rank, the texts of the first rank with trainable parameters."""
        description = self.traced.description
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

    def attach_weight_rules(self) -> list[VersionedStage]:
        """Attach a weight rule to every stage of a stream, starting from the present parameters."""
        setting = self.setting
        rule = rule_of(setting.schedule, setting.weights, setting.weights_options)
        version_uses = uses(setting.schedule, rule)
        for stage in self.stages:
            stage.allow_weight_changes()
        for rank, interpreter in self.interpreters.items():
            interpreter.weights = {
                index: self._stage_weights(version_uses, stage, self.wave_replicas[rank].get(index))
                for index, stage in interpreter.stages.items()
            }
        return self.versioned()

    def versions_kept(self) -> tuple[int, ...]:
        """Return, by stage of a stream, the peak number of its weight versions on any rank.

        Every rank must call this.
        """
        stages, world = len(self.setting.lengths), self.world
        form = TensorForm((stages,), "int64", wants_grad=False)
        peaks: dict[int, list[Tensor]] = {}
        for rank, interpreter in self.interpreters.items():
            row = torch.zeros(stages, dtype=torch.int64)
            for index, weights in interpreter.weights.items():
                row[index] = weights.peak_versions
            peaks[rank] = [row]
        gathered = world.gather(peaks, {rank: [form] for rank in range(world.size)})
        maximum = torch.stack([row for (row,) in gathered.values()]).amax(0) if gathered else None
        return tuple(int(count) for count in world.broadcast(maximum, 0, form))

    def versioned(self) -> list[VersionedStage]:
        """Return the local stages of a stream with their weight rules."""
        holders = self.setting.schedule.ranks_of_stage
        return [
            VersionedStage(
                rank,
                stage,
                interpreter.weights[index],
                holders[index].index(rank) if index in self.wave_replicas[rank] else 0,
            )
            for rank, interpreter in self.interpreters.items()
            for index, stage in interpreter.stages.items()
            if index in interpreter.weights
        ]

    def _stage_weights(
        self, version_uses: Uses, stage: Stage, copies: Copies | None
    ) -> StageWeights:
        """Return the weight rule of a stage.

        Args:
            version_uses: the weight version that each op reads.
            stage: the stage.
            copies: its replica group, if its replicas average weights after waves.
        """
        setting, stream = self.setting, self.setting.schedule.stream
        assert stream is not None
        rule = rule_of(setting.schedule, setting.weights, setting.weights_options)
        return stage_weights(
            Site(
                stage.update,
                lru_cache(maxsize=256)(lambda number: version_uses.at(stage.index, number)),
                rule,
                rule.with_defaults(setting.weights_options),
                stage.index,
                version_uses.staleness(stage.index),
                stream.pipelines,
                stream.waves,
                None if copies is None else WaveReplicaExchange(copies),
                len(setting.lengths),
            )
        )


def assemble(traced: TracedChain, setting: RunConfig, world: World, training: Training) -> Assembly:
    """Make the stages of the local ranks.

    Raises:
        ChainError: a tensor that several stages use cannot be shared between them.
        SettingError: a setting is invalid, or a function of the caller returned a wrong type.
    """
    shared = shared_tensors(traced.description, setting.lengths, setting.schedule)
    builder = StageBuilder(traced, setting, world, training, shared)
    interpreters: dict[int, Interpreter] = {}
    wave_replicas: dict[int, dict[int, Copies]] = {}
    tied: dict[int, Tied] = {}
    for rank in world.local_ranks:
        stages, shared_here = builder.build_stages(rank)
        interpreter = _make_interpreter(rank, stages, world, training.options.boundary, setting)
        interpreters[rank] = interpreter
        replicas = _make_replicas(interpreter, world, setting.schedule, shared_here)
        wave_replicas[rank] = {}
        stream = setting.schedule.stream
        if stream is None or stream.waves is None:
            interpreter.copies = replicas
        else:
            wave_replicas[rank] = replicas
        tied_tensors = [(entry, tensor) for entry, tensor in shared_here if len(entry.ranks) > 1]
        if tied_tensors:
            transport = world.transport(rank)
            tied[rank] = Tied(rank, tied_tensors, transport, interpreter.guard)
    _check_optimizers(traced, interpreters)
    if len(world.local_ranks) < world.size:
        traced = without_others(traced, _local_layers(interpreters))
    return Assembly(traced, world, setting, interpreters, wave_replicas, shared, tied, builder.make)


def _make_interpreter(
    rank: int, stages: Mapping[int, Stage], world: World, boundary: str | None, setting: RunConfig
) -> Interpreter:
    """Make the interpreter of a rank.

    Args:
        rank: the rank.
        stages: its stages.
        world: all ranks.
        boundary: the compression of activations between stages, if any.
        setting: what is run.
    """
    transport = world.transport(rank)
    interpreter = Interpreter(
        rank,
        stages,
        len(setting.lengths),
        transport if boundary is None else CompressedTransport(transport, boundary),
        world.board(rank),
        clock_for(world.device(rank)),
    )
    for stage in stages.values():
        stage.held = interpreter.activation_meter
    return interpreter


def _make_replicas(
    interpreter: Interpreter,
    world: World,
    schedule: Schedule,
    shared: Sequence[tuple[Shared, Tensor]],
) -> dict[int, Copies]:
    """Make the replica groups of a rank's stages that other ranks have too.

    Args:
        interpreter: the rank.
        world: all ranks.
        schedule: which ranks have which stages.
        shared: tensors of this rank that several stages use.
    """
    rank = interpreter.rank
    shared_tensors_here = [tensor for _, tensor in shared]
    replicas: dict[int, Copies] = {}
    for index, stage in interpreter.stages.items():
        ranks = schedule.ranks_of_stage[index]
        if len(ranks) > 1:
            replicas[index] = Copies(
                stage, ranks, rank, world.transport(rank), interpreter.guard, shared_tensors_here
            )
    return replicas


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
