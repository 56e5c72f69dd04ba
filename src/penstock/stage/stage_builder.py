"""The construction of the stages of a rank."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor, nn

from penstock.errors import SettingError
from penstock.modules.module_state import computed_tensors
from penstock.modules.state_names import parameters_of
from penstock.optim.factory import OptimizerFactory
from penstock.optim.groups import Groups
from penstock.optim.update import Update
from penstock.ranks.settings.run_config import RunConfig
from penstock.ranks.tied_weights import Shared, tensors_of
from penstock.ranks.world import World
from penstock.schedule.op import Kind
from penstock.stage.activation_meter import ActivationMeter
from penstock.stage.foreign_parameters import ModelParameters, Reach
from penstock.stage.parallel.parallelism import Parallelism
from penstock.stage.replica_check import stage_class
from penstock.stage.stage import Loss, Stage, StageLayer
from penstock.stage.stage_layers import StageLayers
from penstock.stage.training_options import TrainingOptions
from penstock.tracing.materialise import materialise
from penstock.tracing.traced_chain import TracedChain
from penstock.values.classes import remember_code
from penstock.values.sharded import is_sharded

if TYPE_CHECKING:
    from penstock.stage.parallel.parallel_stage import ParallelStage


@dataclass(frozen=True)
class Training:
    """The training of a model: loss, optimizer, seed and options.

    Attributes:
        loss: the loss function.
        optimizer: makes the optimizer of a stage from its parameters; None without updates.
        seed: seed of initial weights and of random numbers in layers.
        options: further options.
        parallelism: how processes share the layers of stages; None if they do not.
    """

    loss: Loss
    optimizer: OptimizerFactory | None
    seed: int
    options: TrainingOptions = field(default_factory=TrainingOptions)
    parallelism: Parallelism | None = None


@dataclass
class StageBuilder:
    """Makes the stages of the local ranks.

    Attributes:
        traced: the model.
        setting: what is run.
        world: all ranks.
        training: how the model is trained.
        shared: tensors that several stages use.
        make: makes the optimizer of a stage, with the parameter groups of the options.
        parallel: by stage that has been built, its shared layers, if processes share them.
    """

    traced: TracedChain
    setting: RunConfig
    world: World
    training: Training
    shared: tuple[Shared, ...]
    parallel: dict[int, ParallelStage] = field(default_factory=dict)

    def __post_init__(self) -> None:
        schedule = self.setting.schedule
        self._bounds = self.traced.description.stage_bounds(self.setting.lengths)
        groups_of = self.training.options.parameter_groups
        self._groups = (
            None if groups_of is None else Groups.of(groups_of, _named_parameters(self.traced))
        )
        self.make = self.training.optimizer
        if self.make is not None and self._groups is not None:
            self.make = self._groups.factory(self.make)
        # The rank whose tensor is the original, by name of a shared tensor. The original of any
        # other tensor is on the first rank of its stage.
        self._home = {entry.name: entry.home for entry in self.shared}
        self._first_rank = [ranks[0] for ranks in schedule.ranks_of_stage]
        self._model = ModelParameters.of(self.traced)
        if len(self.world.local_ranks) < self.world.size:  # classes cross between processes by name
            parts = (part for module in self.traced.modules for part in module.modules())
            remember_code([*parts, self.training.loss])

    def build_stages(
        self, rank: int, activation_meter: ActivationMeter
    ) -> tuple[dict[int, Stage], list[tuple[Shared, Tensor]]]:
        """Return the stages of a rank, by index, and the shared tensors that it has.

        Args:
            rank: the rank.
            activation_meter: the rank's counter of saved activations.
        """
        indices = self.setting.schedule.stages_of_rank[rank]
        layers = [layer for index in indices for layer in range(*self._bounds[index])]
        modules = dict(zip(layers, self._modules(rank, indices, layers), strict=True))
        # Before the tensors are listed below: sharing a layer replaces its parameters.
        parallelism = self.training.parallelism
        if parallelism is not None:
            for index in indices:
                stage_modules = [modules[layer] for layer in range(*self._bounds[index])]
                self.parallel[index] = parallelism.apply(index, stage_modules)
        tensors = tensors_of(
            self.traced, ((self.traced.layers[i].name, modules[i]) for i in layers)
        )
        rank_shared = [(entry, tensors[entry.name]) for entry in self.shared if rank in entry.ranks]
        for entry, tensor in rank_shared:
            if is_sharded(tensor):
                raise SettingError(
                    f"parallelize= divides {entry.name}, which several stages use: leave its layer "
                    "as it is, or move the cut so that one stage uses it"
                )
        stages: dict[int, Stage] = {}
        for index in indices:
            bounds = range(*self._bounds[index])
            stage_layers = [StageLayer(i, self.traced.layers[i].name, modules[i]) for i in bounds]
            borrowed = _borrowed_parameters(rank, index, rank_shared)
            stages[index] = self._build_stage(rank, index, stage_layers, borrowed, activation_meter)
        return stages, rank_shared

    def _modules(self, rank: int, indices: Sequence[int], layers: Sequence[int]) -> list[nn.Module]:
        """Return the modules of a rank's layers, on its device.

        Args:
            rank: the rank.
            indices: its stages.
            layers: the layers of these stages.
        """
        device = self.world.device(rank)
        modules = materialise(self.traced, layers, device, self.training.seed)
        layout = self.training.options.memory_format
        if layout is not None:
            modules = [module.to(memory_format=layout) for module in modules]  # type: ignore[call-overload]
        if len(self.world.local_ranks) == 1:
            return modules
        return self._copy_modules(rank, indices, dict(zip(layers, modules, strict=True)))

    def _copy_modules(
        self, rank: int, indices: Sequence[int], modules: Mapping[int, nn.Module]
    ) -> list[nn.Module]:
        """Copy the modules that a rank must not share with other ranks of the same process.

        The user's modules serve the first replica of a stage and the home of tied weights. A rank
        gets a copy of a module that has a tensor whose original is on another rank; tensors whose
        original is on this rank are not copied.

        Args:
            rank: the rank.
            indices: its stages.
            modules: by layer, the user's modules of these stages.
        """
        copied_layers: list[int] = []
        # The memo of deepcopy: tensors in it are not copied.
        memo = computed_tensors(modules.values())
        for index in indices:
            for layer in range(*self._bounds[index]):
                named = tensors_of(self.traced, [(self.traced.layers[layer].name, modules[layer])])
                originals = [
                    tensor
                    for name, tensor in named.items()
                    if self._home.get(name, self._first_rank[index]) == rank
                ]
                memo.update((id(tensor), tensor) for tensor in originals)
                if self._first_rank[index] != rank or len(originals) < len(named):
                    copied_layers.append(layer)
        # One call for all layers, so that tensors which they share stay shared.
        copies = copy.deepcopy(nn.ModuleList([modules[layer] for layer in copied_layers]), memo)
        copy_of_layer = dict(zip(copied_layers, copies, strict=True))
        return [copy_of_layer.get(layer, module) for layer, module in modules.items()]

    def _build_stage(
        self,
        rank: int,
        index: int,
        layers: Sequence[StageLayer],
        borrowed: Sequence[nn.Parameter],
        activation_meter: ActivationMeter,
    ) -> Stage:
        """Make one stage of a rank.

        Args:
            rank: the rank.
            index: the stage.
            layers: its layers, with the modules of the rank.
            borrowed: its parameters that the optimizer of another stage updates.
            activation_meter: the rank's counter of saved activations.
        """
        setting, training = self.setting, self.training
        options = training.options
        names = parameter_names(self.traced, layers)
        if self._groups is not None:
            self._groups.add_names(names)
        evictions = (op for op in setting.schedule.programs[rank] if op.kind is Kind.E)
        update = Update.make(
            list(names), self.make, borrowed, f"stage {index}", options.clip_grad_value
        )
        last = index == len(setting.lengths) - 1
        make_stage = stage_class(layers, setting.schedule, index)
        return make_stage(
            index,
            self._stage_layers(rank, index, layers),
            update,
            setting.recompute,
            training.loss if last else None,
            options.loss_options,
            evicted={op.micro_batch for op in evictions if op.stage == index},
            activation_meter=activation_meter,
            autocast=options.autocast_dtype,
            reach=Reach(index, names, self._model),
        )

    def _stage_layers(self, rank: int, index: int, layers: Sequence[StageLayer]) -> StageLayers:
        """Return the runner of a stage's layers.

        Args:
            rank: the rank.
            index: the stage.
            layers: its layers.
        """
        setting, training = self.setting, self.training
        first, end = self._bounds[index]
        device, last = self.world.device(rank), index == len(setting.lengths) - 1
        entry = self.traced.entries.get(first) if index else None
        return StageLayers(
            layers,
            device,
            training.seed,
            None if entry is None else entry.to(device),
            None if last else self.traced.exits.get(end - 1),
            setting.recomputed,
            setting.segment_starts,
            training.options.compiled,
            float(training.options.offload),
        )


def _borrowed_parameters(
    rank: int, index: int, rank_shared: Sequence[tuple[Shared, Tensor]]
) -> list[nn.Parameter]:
    """Return the shared parameters of a rank that the optimizer of another stage updates.

    Args:
        rank: the rank.
        index: the stage for which they are borrowed.
        rank_shared: shared tensors of the rank.
    """
    return [
        tensor
        for entry, tensor in rank_shared
        if (entry.home, entry.stages[0]) != (rank, index) and isinstance(tensor, nn.Parameter)
    ]


def parameter_names(traced: TracedChain, layers: Sequence[StageLayer]) -> dict[nn.Parameter, str]:
    """Return the names in the chain of the parameters of some layers, in order of first use."""
    names: dict[nn.Parameter, str] = {}
    for layer in layers:
        for name, parameter in parameters_of(layer.name, layer.module):
            names.setdefault(parameter, traced.first_name(name))
    return names


def _named_parameters(traced: TracedChain) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of the whole model, each once."""
    yielded: set[str] = set()
    for name, parameter in traced.named_parameters():
        if name not in yielded:
            yielded.add(name)
            yield name, parameter
