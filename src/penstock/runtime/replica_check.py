"""Copies of a stage train as one would, or are refused: before anything starts where it can be
seen, else at the first micro-batch.

Every copy runs some of the micro-batches, and the gradients of all are added up before the update.
That is what one copy does as long as a forward depends on weights and inputs alone, and gradients
are only added up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor, nn

from penstock.errors import SettingError
from penstock.runtime.batch import Batch
from penstock.runtime.layers import StageLayers
from penstock.runtime.past import Past, tensors_of
from penstock.runtime.setting import Setting
from penstock.runtime.stage import Stage, StageLayer
from penstock.runtime.tied import shared_tensors
from penstock.schedule.op import Schedule
from penstock.tracing.chain import TracedChain
from penstock.tracing.module_state import ModuleState
from penstock.tracing.moving_state import observe, steady_buffers
from penstock.tracing.names import prefix_of
from penstock.tracing.single_copy import (
    single_copy_reasons,
    weight_hook,
    weights_with_hooks,
    weights_with_max_norm,
)
from penstock.transport.payload import Payload
from penstock.values.structure import map_tensors

#: What to do about a layer that cannot have copies.
REMEDY = (
    "Take a schedule with one copy of each stage, such as schedule='1f1b'; "
    "from ps.plan, by max_replicas=1 and schedules without copies"
)


def check_replicas(traced: TracedChain, setting: Setting) -> None:
    """Refuse layers that cannot be held by several ranks, where the schedule has copies of their
    stage; and hooks on weights that see only a part of a micro-batch's gradient.

    Raises:
        SettingError: there are such; the message has all of them.
    """
    findings = [*_in_copies(traced, setting), *_in_parts(traced, setting), *_unmade(traced)]
    if findings:
        raise SettingError("\n  ".join(findings))


def _in_copies(traced: TracedChain, setting: Setting) -> list[str]:
    schedule = setting.schedule
    if not _has_copies(schedule):
        return []
    reasons = single_copy_reasons(traced)
    bounds = traced.description.stage_bounds(setting.lengths)
    lines = [
        f"stage {stage} (ranks {', '.join(map(str, ranks))}): {reason}"
        for stage, ((first, end), ranks) in enumerate(
            zip(bounds, schedule.ranks_of_stage, strict=True)
        )
        for layer in range(first, end)
        for reason in reasons.get(layer, ())
        if len(ranks) > 1
    ]
    head = f"{schedule.name} holds copies of stages, and these layers would train to other numbers in copies. {REMEDY}"
    return [head, *lines] if lines else []


def _in_parts(traced: TracedChain, setting: Setting) -> list[str]:
    """Hooks on weights whose gradient comes in several parts, and tables that a forward changes and
    another stage uses.
    """
    schedule, hooks = setting.schedule, weights_with_hooks(traced)
    normed = weights_with_max_norm(traced)
    found = []
    for shared in shared_tensors(traced.description, setting.lengths, schedule):
        stages = ", ".join(map(str, shared.stages))
        if shared.name in hooks:
            found.append(
                f"{shared.name} has a gradient hook ({hooks[shared.name]}) and is used by stages {stages}: the hook would see the "
                "gradient of each use, not their sum. Move the cut so that these layers stay in one stage, or remove the hook"
            )
        if shared.name in normed:
            found.append(
                f"{shared.name} has max_norm and is used by stages {stages}: an embedding changes it in its forward, which the other "
                "stages do not see in time. Move the cut so that these layers stay in one stage, or do without max_norm"
            )
    if schedule.slicing is not None and hooks:
        name, kind = next(iter(hooks.items()))
        found.append(
            f"{name} has a gradient hook ({kind}) and {schedule.name} cuts micro-batches into slices: the hook would see the gradient "
            "of each slice, not of the micro-batch. Take a schedule without slices, such as schedule='1f1b', or remove the hook"
        )
    return found


def _unmade(traced: TracedChain) -> list[str]:
    """Hooks on weights that have no memory yet: the parameter that takes their place would not have
    them.
    """
    hooks = weights_with_hooks(traced)
    on_meta = {
        traced.aliases.get(name, name)
        for layer, module in zip(traced.layers, traced.modules, strict=True)
        for name, parameter in module.named_parameters(prefix_of(layer.name, module))
        if parameter.is_meta
    }
    return [
        f"{name} has a gradient hook ({kind}) and is on the meta device: the parameter that is made in its place would not have the "
        "hook. Build this layer on a real device, or remove the hook"
        for name, kind in hooks.items()
        if name in on_meta
    ]


def _has_copies(schedule: Schedule) -> bool:
    return any(len(ranks) > 1 for ranks in schedule.ranks_of_stage)


class ReplicatedStage(Stage):
    """One of several copies of a stage: refuses forwards that read what forwards change.

    The first micro-batch is observed. Afterwards the versions of the buffers that it left alone are
    compared at every forward.
    """

    schedule_name: str = "the schedule"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._running = cast("StageLayers", _ObservedLayers(self._running, self._refuse))

    def forward(self, batch: Batch, micro_batch: int, arrived: Payload | None) -> Payload | None:
        """See `Stage.forward`.

        Raises:
            SettingError: the forward reads state that forwards change.
        """
        loss = self.loss if isinstance(self.loss, nn.Module) and batch.training else None
        before = None if loss is None else _versions(loss)
        made = super().forward(batch, micro_batch, arrived)
        if loss is not None and _versions(loss) != before:
            self._refuse(
                [f"a buffer of the loss ({type(loss).__name__}) is changed by its forward"]
            )
        return made

    def _refuse(self, findings: list[str]) -> None:
        raise SettingError(
            f"{self.schedule_name} holds copies of stage {self.index}, each of which runs some of the micro-batches, and its layers "
            f"would train to other numbers than in one copy: {'; '.join(findings)}. {REMEDY}. Nothing has been updated"
        )


class HookedStage(Stage):
    """A stage whose weights have hooks that run when a gradient has been added up: refuses those
    that change the weight.

    A hook that steps its weight makes a new weight after every micro-batch. A pipeline runs
    forwards of later micro-batches before, and would train to other numbers than the same
    micro-batches one after another.
    """

    def backward(self, batch: Batch, micro_batch: int, arrived: Payload | None) -> Payload:
        """See `Stage.backward`.

        Raises:
            SettingError: a hook has changed its weight, and the batch has several micro-batches.
        """
        before = self._hooked_versions()
        made = super().backward(batch, micro_batch, arrived)
        self._check_unchanged(before, batch)
        return made

    def weight_grad(self, batch: Batch, micro_batch: int) -> None:
        """See `Stage.weight_grad`; raises as `backward`."""
        before = self._hooked_versions()
        super().weight_grad(batch, micro_batch)
        self._check_unchanged(before, batch)

    def _hooked_versions(self) -> list[int]:
        return [each._version for each in self.update.parameters if weight_hook(each)]

    def _check_unchanged(self, before: list[int], batch: Batch) -> None:
        if batch.micro_batches > 1 and self._hooked_versions() != before:
            raise SettingError(
                f"a hook (register_post_accumulate_grad_hook) of a weight of stage {self.index} changes the weight during the backward of "
                f"a micro-batch, while {batch.micro_batches} micro-batches of one batch are under way: later ones would run with other "
                "weights than in one process. Take micro_batches=1, or let optimizer= step the weights"
            )


def stage_class(layers: Sequence[StageLayer], copies: int) -> type[Stage]:
    """The kind of stage that checks what these layers, held by so many ranks, may do wrong."""
    if copies > 1:
        return ReplicatedStage
    weights = (weight for layer in layers for weight in layer.module.parameters())
    hooked = any(weight_hook(weight) == "register_post_accumulate_grad_hook" for weight in weights)
    return HookedStage if hooked else Stage


def _versions(module: nn.Module) -> list[tuple[int, int]]:
    return [(id(buffer), buffer._version) for buffer in module.buffers()]


class _ObservedLayers:
    """The layers of a stage with copies. See `StageLayers`."""

    def __init__(self, layers: StageLayers, refuse: Callable[[list[str]], None]) -> None:
        self._layers, self._refuse = layers, refuse
        self._steady: list[tuple[str, dict[str, Any], str]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layers, name)

    def run(self, batch: Batch, micro_batch: int, value: Any, past: Past) -> Any:
        """What the layers make of `value`, and what they leave in `past`."""
        if not batch.training:
            return self._layers.run(batch, micro_batch, value, past)
        if self._steady is None:
            return self._observed(batch, micro_batch, value, past)
        before = [(id(holder[key]), holder[key]._version) for _, holder, key in self._steady]
        made = self._layers.run(batch, micro_batch, value, past)
        after = [(id(holder[key]), holder[key]._version) for _, holder, key in self._steady]
        if before != after:
            names = [
                f"buffer {name} is changed by the forward, which it was not at the first micro-batch"
                for (name, *_), old, new in zip(self._steady, before, after, strict=True)
                if old != new
            ]
            self._refuse(names)
        return made

    def _observed(self, batch: Batch, micro_batch: int, value: Any, past: Past) -> Any:
        state = ModuleState(
            (name, module)
            for layer in self._layers.layers
            for name, module in layer.module.named_modules(
                prefix=prefix_of(layer.name, layer.module)
            )
        )
        given = map_tensors(Tensor.clone, value)

        def run() -> tuple[Any, list[Tensor]]:
            made = self._layers.run(batch, micro_batch, value, past)
            return made, tensors_of(past.left)

        def again() -> Any:
            fresh = map_tensors(Tensor.clone, given)
            return self._layers.run(batch, micro_batch, fresh, Past(keeps=False))

        found = observe(
            state,
            run,
            None if batch.cuts_tokens else again,
            follow=self._layers.compile is None,
        )
        if found.findings:
            self._refuse(list(found.findings))
        self._steady = steady_buffers(state, found.changed)
        return found.output[0]
