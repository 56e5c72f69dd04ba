"""What a run is made of: the ranks of this process with their stages, the copies that these meet, and their weight rules."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from torch import nn

from penstock.optim.catalogue import stage_weights
from penstock.optim.stage_weights import Site, StageWeights
from penstock.optim.update import OptimizerFactory, Update
from penstock.runtime.checkpoint import Versioned
from penstock.runtime.clock import clock_for
from penstock.runtime.copies import Copies, WaveMessages
from penstock.runtime.interpreter import Interpreter
from penstock.runtime.setting import Setting
from penstock.runtime.stage import Loss, Stage, StageLayer
from penstock.runtime.world import World
from penstock.schedule.op import Kind
from penstock.tracing.chain import TracedChain
from penstock.tracing.materialise import materialise
from penstock.weights.choice import rule_of
from penstock.weights.uses import Uses, uses


@dataclass(frozen=True)
class Assembly:
    """The local ranks of a run.

    `interpreters` by rank; `apart`, by rank and stage, the copies of stages that do not meet at every U.
    """

    world: World
    setting: Setting
    interpreters: Mapping[int, Interpreter] = field(default_factory=dict)
    apart: Mapping[int, Mapping[int, Copies]] = field(default_factory=dict)

    @property
    def stages(self) -> list[Stage]:
        """All stages that are held here."""
        return [stage for interpreter in self.interpreters.values() for stage in interpreter.stages.values()]

    def share_weights(self) -> None:
        """Let all copies of a stage begin with the first one's parameters and buffers."""

        def share(rank: int) -> None:
            for copies in {**self.interpreters[rank].copies, **self.apart[rank]}.values():
                copies.share_weights()

        if any(len(ranks) > 1 for ranks in self.setting.schedule.ranks_of_stage):
            self.world.run(share)

    def let_read(self) -> list[Versioned]:
        """In a stream, give every stage its weight rule, beginning with the parameters as they are."""
        setting = self.setting
        rule = rule_of(setting.schedule, setting.weights, setting.weights_options)
        found = uses(setting.schedule, rule)
        for rank, interpreter in self.interpreters.items():
            interpreter.weights = {
                index: self._weights(found, stage, self.apart[rank].get(index)) for index, stage in interpreter.stages.items()
            }
        return self.versioned()

    def versions_kept(self) -> dict[int, list[int]]:
        """Per local rank and stage, the most versions of its weights that there have been; 0 where the rank does not hold it."""
        return {
            rank: [
                interpreter.weights[index].peak_versions if index in interpreter.weights else 0
                for index in range(interpreter.stage_count)
            ]
            for rank, interpreter in self.interpreters.items()
        }

    def versioned(self) -> list[Versioned]:
        """In a stream, the stages that are held here with what stands behind their weights."""
        holders = self.setting.schedule.ranks_of_stage
        return [
            Versioned(rank, stage, interpreter.weights[index], holders[index].index(rank) if index in self.apart[rank] else 0)
            for rank, interpreter in self.interpreters.items()
            for index, stage in interpreter.stages.items()
            if index in interpreter.weights
        ]

    def _weights(self, found: Uses, stage: Stage, copies: Copies | None) -> StageWeights:
        setting, stream = self.setting, self.setting.schedule.stream
        assert stream is not None
        rule = rule_of(setting.schedule, setting.weights, setting.weights_options)
        return stage_weights(
            Site(
                stage.update, lru_cache(maxsize=256)(lambda number: found.at(stage.index, number)), rule, rule.with_defaults(setting.weights_options),
                stage.index, found.staleness(stage.index), stream.pipelines, stream.waves,
                None if copies is None else WaveMessages(copies), len(setting.lengths),
            )
        )  # fmt: skip


def assemble(traced: TracedChain, setting: Setting, world: World, training: Training) -> Assembly:
    """Make the stages of the ranks that live in this process."""
    bounds = traced.description.stage_bounds(setting.lengths)
    schedule = setting.schedule
    interpreters: dict[int, Interpreter] = {}
    apart: dict[int, dict[int, Copies]] = {}
    for rank in world.local_ranks:
        stages = {
            index: _stage(traced, setting, world, training, (rank, index, range(*bounds[index])))
            for index in schedule.stages_of_rank[rank]
        }
        made = Interpreter(rank, stages, len(bounds), world.transport(rank), world.board(rank), clock_for(world.device(rank)))
        for stage in stages.values():
            stage.held = made.held
        copies = {
            index: Copies(stage, schedule.ranks_of_stage[index], rank, made.transport, made.guard)
            for index, stage in stages.items()
            if len(schedule.ranks_of_stage[index]) > 1
        }
        meet = schedule.stream is None or schedule.stream.waves is None
        made.copies, apart[rank] = (copies, {}) if meet else ({}, copies)
        interpreters[rank] = made
    return Assembly(world, setting, interpreters, apart)


@dataclass(frozen=True)
class Training:
    """How a model is trained: loss, optimizer, and the seed of what is random."""

    loss: Loss
    optimizer: OptimizerFactory | None
    seed: int


def _stage(traced: TracedChain, setting: Setting, world: World, training: Training, place: tuple[int, int, range]) -> Stage:
    rank, index, layers = place
    device, schedule = world.device(rank), setting.schedule
    modules: Sequence[nn.Module] = materialise(traced, layers, device, training.seed)
    if rank != schedule.ranks_of_stage[index][0] and len(world.local_ranks) > 1:
        modules = list(copy.deepcopy(nn.ModuleList(modules)))  # the first copy has the user's own
    parameters = list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))
    last = index == len(setting.lengths) - 1
    held = [StageLayer(i, traced.layers[i].name, module) for i, module in zip(layers, modules, strict=True)]
    evicted = {op.micro_batch for op in schedule.programs[rank] if op.kind is Kind.E and op.stage == index}
    return Stage(index, held, device, Update.make(parameters, training.optimizer), training.seed, setting.recompute,
                 training.loss if last else None, evicted)  # fmt: skip
