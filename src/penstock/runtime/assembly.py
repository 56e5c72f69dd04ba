"""What a run is made of: the ranks of this process with their stages, the copies that these meet,
and their weight rules.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.errors import SettingError
from penstock.optim.catalogue import stage_weights
from penstock.optim.factory import OptimizerFactory, check_alike, group_numbers
from penstock.optim.groups import Groups
from penstock.optim.schedulers import stand_in
from penstock.optim.stage_weights import Site, StageWeights
from penstock.optim.update import Update
from penstock.runtime.checkpoint import Versioned
from penstock.runtime.clock import clock_for
from penstock.runtime.copies import Copies, WaveMessages
from penstock.runtime.interpreter import Interpreter
from penstock.runtime.options import Options
from penstock.runtime.reach import ModelParameters, Reach
from penstock.runtime.replica_check import ReplicatedStage, stage_class
from penstock.runtime.setting import Setting
from penstock.runtime.stage import Loss, Stage, StageLayer
from penstock.runtime.state import Placed
from penstock.runtime.tied import Shared, Tied, shared_tensors, tensors_of
from penstock.runtime.world import World
from penstock.schedule.op import Kind
from penstock.tracing.chain import TracedChain
from penstock.tracing.elsewhere import without_others
from penstock.tracing.materialise import materialise
from penstock.tracing.module_state import made_tensors
from penstock.tracing.names import parameters_of
from penstock.transport.coded import CodedTransport
from penstock.transport.payload import TensorForm
from penstock.values.classes import remember_code
from penstock.weights.choice import rule_of
from penstock.weights.uses import Uses, uses


@dataclass(frozen=True)
class Assembly:
    """The local ranks of a run.

    `interpreters` by rank; `apart`, by rank and stage, the copies of stages that do not meet at
    every U; `shared`, what stages have in common, and by rank in `tied` its part in that, if others
    have one. `make`: what optimizers are made by.
    """

    traced: TracedChain
    world: World
    setting: Setting
    interpreters: Mapping[int, Interpreter] = field(default_factory=dict)
    apart: Mapping[int, Mapping[int, Copies]] = field(default_factory=dict)
    shared: tuple[Shared, ...] = ()
    tied: Mapping[int, Tied] = field(default_factory=dict)
    make: OptimizerFactory | None = None
    _stand_ins: list[Optimizer] = field(default_factory=list)

    @property
    def steps(self) -> bool:
        """Whether there are optimizers, here or on other ranks."""
        return self.make is not None

    @property
    def stages(self) -> list[Stage]:
        """All stages that are held here."""
        return [
            stage
            for interpreter in self.interpreters.values()
            for stage in interpreter.stages.values()
        ]

    def share_weights(self) -> None:
        """Let all copies of a stage begin with the first one's parameters and buffers, and all that
        is tied with its home's.
        """

        def share(rank: int) -> None:
            interpreter = self.interpreters[rank]
            for copies in {**interpreter.copies, **self.apart[rank]}.values():
                copies.share_weights()
            if rank in self.tied:
                self.tied[rank].begin()
            interpreter.finish()

        if any(len(ranks) > 1 for ranks in self.setting.schedule.ranks_of_stage) or any(
            len(each.ranks) > 1 for each in self.shared
        ):
            self.world.run(share)

    @property
    def placed(self) -> Placed:
        """Which rank holds what, and the stages that are held here."""
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
            {each.name: each.home for each in self.shared},
        )

    @property
    def lives(self) -> int:
        """How many copies of each stage have optimizers of their own."""
        stream = self.setting.schedule.stream
        return (
            max(map(len, self.setting.schedule.ranks_of_stage))
            if stream is not None and stream.waves is not None
            else 1
        )

    def optimizers(self) -> list[Optimizer]:
        """Those of the stages held here, or one that stands in for them.

        Raises:
            SettingError: there are none anywhere.
        """
        if self.make is None:
            raise SettingError(
                "there is no learning rate to set: this pipeline has no optimizer. Give it one by optimizer="
            )
        here = [
            stage.update.optimizer for stage in self.stages if stage.update.optimizer is not None
        ]
        if not here and not self._stand_ins:
            self._stand_ins.append(stand_in(self.make))
        return here or self._stand_ins

    def told(self, texts: list[str]) -> tuple[str, ...]:
        """What the first rank that trains anything says, on every rank."""
        facts = self.traced.description
        bounds = facts.stage_bounds(self.setting.lengths)
        trains = (
            stage
            for stage, (first, end) in enumerate(bounds)
            if any(
                facts.tensor(name).trainable
                for layer in facts.layers[first:end]
                for name in layer.parameters
            )
        )
        source = self.setting.schedule.ranks_of_stage[next(trains, 0)][0]
        return tuple(self.world.broadcast(texts, source)) if texts else ()

    def names(self, stage: Stage) -> dict[nn.Parameter, str]:
        """All parameters of a stage by the chain's names."""
        return _names(self.traced, stage.layers)

    def let_read(self) -> list[Versioned]:
        """In a stream, give every stage its weight rule, beginning with the parameters as they are."""
        setting = self.setting
        rule = rule_of(setting.schedule, setting.weights, setting.weights_options)
        found = uses(setting.schedule, rule)
        for stage in self.stages:
            stage.allow_other_weights()
        for rank, interpreter in self.interpreters.items():
            interpreter.weights = {
                index: self._weights(found, stage, self.apart[rank].get(index))
                for index, stage in interpreter.stages.items()
            }
        return self.versioned()

    def versions_kept(self) -> tuple[int, ...]:
        """In a stream, per stage, the most versions of its weights that a rank has kept at once so
        far. Every rank must ask.
        """
        stages, world = len(self.setting.lengths), self.world
        form = TensorForm((stages,), "int64", wants_grad=False)
        kept = {
            rank: [
                interpreter.weights[index].peak_versions if index in interpreter.weights else 0
                for index in range(stages)
            ]
            for rank, interpreter in self.interpreters.items()
        }
        gathered = world.gather(
            {rank: [torch.tensor(row)] for rank, row in kept.items()},
            {rank: [form] for rank in range(world.size)},
        )
        most = torch.stack([row for (row,) in gathered.values()]).amax(0) if gathered else None
        return tuple(int(count) for count in world.broadcast(most, 0, form))

    def versioned(self) -> list[Versioned]:
        """In a stream, the stages that are held here with what stands behind their weights."""
        holders = self.setting.schedule.ranks_of_stage
        return [
            Versioned(
                rank,
                stage,
                interpreter.weights[index],
                holders[index].index(rank) if index in self.apart[rank] else 0,
            )
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
                stage.update,
                lru_cache(maxsize=256)(lambda number: found.at(stage.index, number)),
                rule,
                rule.with_defaults(setting.weights_options),
                stage.index,
                found.staleness(stage.index),
                stream.pipelines,
                stream.waves,
                None if copies is None else WaveMessages(copies),
                len(setting.lengths),
            )
        )


def assemble(traced: TracedChain, setting: Setting, world: World, training: Training) -> Assembly:
    """Make the stages of the ranks that live in this process.

    Raises:
        ChainError: a tensor that several stages use cannot be kept one.
        SettingError: what is asked for makes no sense, or a function of the caller's returned
        something else than it should.
    """
    schedule = setting.schedule
    shared = shared_tensors(traced.description, setting.lengths, schedule)
    bench = _Bench(traced, setting, world, training, shared)
    interpreters: dict[int, Interpreter] = {}
    apart: dict[int, dict[int, Copies]] = {}
    tied: dict[int, Tied] = {}
    for rank in world.local_ranks:
        stages, held = bench.stages(rank)
        transport, code = world.transport(rank), training.options.boundary
        crossing = transport if code is None else CodedTransport(transport, code)
        made = Interpreter(
            rank,
            stages,
            len(setting.lengths),
            crossing,
            world.board(rank),
            clock_for(world.device(rank)),
        )
        for stage in stages.values():
            stage.held = made.held
        copies = {
            index: Copies(
                stage,
                schedule.ranks_of_stage[index],
                rank,
                transport,
                made.guard,
                [tensor for _, tensor in held],
            )
            for index, stage in stages.items()
            if len(schedule.ranks_of_stage[index]) > 1
        }
        meet = schedule.stream is None or schedule.stream.waves is None
        made.copies, apart[rank] = (copies, {}) if meet else ({}, copies)
        interpreters[rank] = made
        over_ranks = [(each, tensor) for each, tensor in held if len(each.ranks) > 1]
        if over_ranks:
            tied[rank] = Tied(rank, over_ranks, transport, made.guard)
    _check_optimizers(traced, interpreters)
    if len(world.local_ranks) < world.size:
        held_here = {
            layer.index
            for made in interpreters.values()
            for stage in made.stages.values()
            for layer in stage.layers
        }
        bench.traced = without_others(traced, held_here)
    return Assembly(bench.traced, world, setting, interpreters, apart, shared, tied, bench.make)


def _check_optimizers(traced: TracedChain, interpreters: Mapping[int, Interpreter]) -> None:
    by_stage: dict[int, list[dict[str, int | None]]] = {}
    for interpreter in interpreters.values():
        for index, stage in interpreter.stages.items():
            numbers = group_numbers(stage.update.optimizer)
            names = _names(traced, stage.layers)
            of_stage = {names[each]: numbers.get(id(each)) for each in stage.update.candidates}
            by_stage.setdefault(index, []).append(of_stage)
    for index, copies in sorted(by_stage.items()):
        check_alike(index, copies)


@dataclass(frozen=True)
class Training:
    """How a model is trained: loss, optimizer, the seed of what is random, and what else is asked
    for.
    """

    loss: Loss
    optimizer: OptimizerFactory | None
    seed: int
    options: Options = field(default_factory=Options)


@dataclass
class _Bench:
    """Where the stages of a rank are put together."""

    traced: TracedChain
    setting: Setting
    world: World
    training: Training
    shared: tuple[Shared, ...]

    def __post_init__(self) -> None:
        schedule = self.setting.schedule
        self._bounds = self.traced.description.stage_bounds(self.setting.lengths)
        asked = self.training.options.parameter_groups
        self._groups = None if asked is None else Groups.of(asked, _named(self.traced))
        self.make = self.training.optimizer
        if self.make is not None and self._groups is not None:
            self.make = self._groups.factory(self.make)
        # Whose tensor counts, by name: what is not there lies in one stage, and counts on the first
        # rank of that.
        self._home = {each.name: each.home for each in self.shared}
        self._first = [ranks[0] for ranks in schedule.ranks_of_stage]
        self._model = ModelParameters.of(self.traced)
        if len(self.world.local_ranks) < self.world.size:  # classes cross between processes by name
            parts = (part for module in self.traced.modules for part in module.modules())
            remember_code([*parts, self.training.loss])

    def stages(self, rank: int) -> tuple[dict[int, Stage], list[tuple[Shared, Tensor]]]:
        """The stages of a rank, and those of the shared tensors that it holds."""
        indices = self.setting.schedule.stages_of_rank[rank]
        layers = [layer for index in indices for layer in range(*self._bounds[index])]
        modules = dict(zip(layers, self._modules(rank, indices, layers), strict=True))
        tensors = tensors_of(
            self.traced, ((self.traced.layers[i].name, modules[i]) for i in layers)
        )
        held = [(each, tensors[each.name]) for each in self.shared if rank in each.ranks]
        return {index: self._stage(rank, index, modules, held) for index in indices}, held

    def _modules(self, rank: int, indices: Sequence[int], layers: Sequence[int]) -> list[nn.Module]:
        device = self.world.device(rank)
        modules = materialise(self.traced, layers, device, self.training.seed)
        layout = self.training.options.memory_format
        if layout is not None:
            modules = [module.to(memory_format=layout) for module in modules]  # type: ignore[call-overload]
        return (
            modules
            if len(self.world.local_ranks) == 1
            else self._own(rank, indices, dict(zip(layers, modules, strict=True)))
        )

    def _own(
        self, rank: int, indices: Sequence[int], modules: Mapping[int, nn.Module]
    ) -> list[nn.Module]:
        """Of ranks that are threads of one process, the user's own modules are those of a stage's
        first copy and of the home of what is tied; the others have modules of their own where they
        hold a tensor that is not theirs, and share the rest.
        """
        chosen: list[int] = []
        kept = made_tensors(modules.values())
        for index in indices:
            for layer in range(*self._bounds[index]):
                named = tensors_of(self.traced, [(self.traced.layers[layer].name, modules[layer])])
                own = [
                    tensor
                    for name, tensor in named.items()
                    if self._home.get(name, self._first[index]) == rank
                ]
                kept.update((id(tensor), tensor) for tensor in own)
                if self._first[index] != rank or len(own) < len(named):
                    chosen.append(layer)
        copies = copy.deepcopy(nn.ModuleList([modules[layer] for layer in chosen]), kept)
        return list({**modules, **dict(zip(chosen, copies, strict=True))}.values())

    def _stage(
        self,
        rank: int,
        index: int,
        modules: Mapping[int, nn.Module],
        held: Sequence[tuple[Shared, Tensor]],
    ) -> Stage:
        traced, setting, training = self.traced, self.setting, self.training
        first, end = self._bounds[index]
        layers = [StageLayer(i, traced.layers[i].name, modules[i]) for i in range(first, end)]
        names = _names(traced, layers)
        if self._groups is not None:
            self._groups.know(names)
        borrowed = [tensor for each, tensor in held if (each.home, each.stages[0]) != (rank, index)]
        update = Update.make(
            list(names),
            self.make,
            [tensor for tensor in borrowed if isinstance(tensor, nn.Parameter)],
            f"stage {index}",
        )
        update.clip_value = training.options.clip_grad_value
        evicted = {
            op.micro_batch
            for op in setting.schedule.programs[rank]
            if op.kind is Kind.E and op.stage == index
        }
        device, last = self.world.device(rank), index == len(setting.lengths) - 1
        entry = traced.entries.get(first) if index else None
        kind = stage_class(layers, len(setting.schedule.ranks_of_stage[index]))
        stage = kind(
            index,
            layers,
            device,
            update,
            training.seed,
            setting.recompute,
            training.loss if last else None,
            evicted,
            entry=None if entry is None else entry.to(device),
            exit=None if last else traced.exits.get(end - 1),
            autocast=training.options.autocast,
            recomputed=setting.recomputed,
            segment_starts=setting.segment_starts,
            compile=training.options.compiled,
            offload=training.options.offload,
            reach=Reach(index, names, self._model),
            loss_options=training.options.loss_division,
        )
        if isinstance(stage, ReplicatedStage):
            stage.schedule_name = setting.schedule.name
        return stage


def _names(traced: TracedChain, layers: Sequence[StageLayer]) -> dict[nn.Parameter, str]:
    """The parameters of some layers by the chain's names, in the order in which they are first
    used.
    """
    names: dict[nn.Parameter, str] = {}
    for layer in layers:
        for name, parameter in parameters_of(layer.name, layer.module):
            names.setdefault(parameter, traced.aliases.get(name, name))
    return names


def _named(traced: TracedChain) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of the whole model, each once; those of layers that nobody has made yet are on
    the meta device.
    """
    seen: set[str] = set()
    for layer, module in zip(traced.layers, traced.modules, strict=True):
        for name, parameter in parameters_of(layer.name, module):
            own = traced.aliases.get(name, name)
            if own not in seen:
                seen.add(own)
                yield own, parameter
