"""Checks that replicas of a stage train to the same weights as a single copy would.

Each replica runs some of the micro-batches, and the gradients of all are summed before the update.
This gives the result of a single copy as long as a forward depends on weights and inputs alone, and
gradients are only summed. Layers that violate it are refused before training where they can be
recognised, else at the first micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from penstock.batches.batch import Batch
from penstock.errors import SettingError
from penstock.modules.module_state import ModuleState
from penstock.modules.state_names import prefix_of
from penstock.ranks.settings.run_config import RunConfig
from penstock.ranks.tied_weights import shared_tensors
from penstock.schedule.op import Schedule
from penstock.stage.slice_state import SliceState, tensors_of
from penstock.stage.stage import Stage, StageLayer
from penstock.stage.stage_layers import StageLayers
from penstock.tracing.moving_state import observe, steady_buffers
from penstock.tracing.single_copy import (
    single_copy_reasons,
    weight_hook,
    weights_with_hooks,
    weights_with_max_norm,
)
from penstock.tracing.traced_chain import TracedChain
from penstock.transport.payload import Payload
from penstock.values.structure import map_tensors

#: Advice for layers that cannot be replicated.
REMEDY = (
    "Use a schedule with one copy of each stage, such as schedule='1f1b'; "
    "from ps.plan, by max_replicas=1 and schedules without copies"
)


def check_replicas(traced: TracedChain, setting: RunConfig) -> None:
    """Check that no layer would train differently because of replicas, cuts or slices.

    Refused are layers that cannot be replicated, in stages with replicas; and hooks on weights that
    would see only a part of a micro-batch's gradient, or would be lost.

    Raises:
        SettingError: there are such layers; the message lists all.
    """
    findings = [
        *_layers_in_replicas(traced, setting),
        *_weights_of_several_stages(traced, setting),
        *_hooks_on_meta(traced),
    ]
    if findings:
        raise SettingError("\n  ".join(findings))


def _layers_in_replicas(traced: TracedChain, setting: RunConfig) -> list[str]:
    """Describe the layers that cannot be replicated, in stages that several ranks hold."""
    schedule = setting.schedule
    if schedule.copies == 1:
        return []
    reasons = single_copy_reasons(traced)
    bounds = traced.description.stage_bounds(setting.lengths)
    lines = []
    for stage, ((first, end), ranks) in enumerate(
        zip(bounds, schedule.ranks_of_stage, strict=True)
    ):
        if len(ranks) == 1:
            continue
        rank_list = ", ".join(map(str, ranks))
        for layer in range(first, end):
            for reason in reasons.get(layer, ()):
                lines.append(f"stage {stage} (ranks {rank_list}): {reason}")
    head = (
        f"{schedule.name} holds copies of stages, and these layers would train to other numbers in "
        f"copies. {REMEDY}"
    )
    return [head, *lines] if lines else []


def _weights_of_several_stages(traced: TracedChain, setting: RunConfig) -> list[str]:
    """Describe hooks and `max_norm` that stages, or slices, would apply separately.

    These are gradient hooks on weights whose gradient is the sum of several parts, and embeddings
    that a forward changes and another stage uses.
    """
    schedule, hooks = setting.schedule, weights_with_hooks(traced)
    normed = weights_with_max_norm(traced)
    findings = []
    for shared in shared_tensors(traced.description, setting.lengths, schedule):
        stages = ", ".join(map(str, shared.stages))
        if shared.name in hooks:
            findings.append(
                f"{shared.name} has a gradient hook ({hooks[shared.name]}) and is used by stages "
                f"{stages}: the hook would see the gradient of each use, not their sum. Move the "
                "cut so that these layers stay in one stage, or remove the hook"
            )
        if shared.name in normed:
            findings.append(
                f"{shared.name} has max_norm and is used by stages {stages}: an embedding changes "
                "it in its forward, which the other stages do not see in time. Move the cut so "
                "that these layers stay in one stage, or do without max_norm"
            )
    if schedule.slicing is not None and hooks:
        name, kind = next(iter(hooks.items()))
        findings.append(
            f"{name} has a gradient hook ({kind}) and {schedule.name} cuts micro-batches into "
            "slices: the hook would see the gradient of each slice, not of the micro-batch. Use a "
            "schedule without slices, such as schedule='1f1b', or remove the hook"
        )
    return findings


def _hooks_on_meta(traced: TracedChain) -> list[str]:
    """Describe hooks on weights on the meta device: the parameters that replace them lose them."""
    hooks = weights_with_hooks(traced)
    on_meta = {
        traced.first_name(name)
        for layer, module in zip(traced.layers, traced.modules, strict=True)
        for name, parameter in module.named_parameters(prefix_of(layer.name, module))
        if parameter.is_meta
    }
    return [
        f"{name} has a gradient hook ({kind}) and is on the meta device: the parameter that is "
        "made in its place would not have the hook. Build this layer on a real device, or remove "
        "the hook"
        for name, kind in hooks.items()
        if name in on_meta
    ]


class ReplicatedStage(Stage):
    """A replica of a stage, which refuses forwards that read state that forwards change.

    The first micro-batch is observed. From then on every forward compares the version counters of
    the buffers that the first one did not change.
    """

    def __init__(self, schedule_name: str, *args: Any, **options: Any) -> None:
        """Make the replica. Arguments after the name of the schedule as for `Stage`."""
        self._schedule_name = schedule_name
        super().__init__(*args, **options)

    def __post_init__(self) -> None:
        # First, since helpers that the base class makes keep the runner.
        self.runner = cast("StageLayers", _ObservedLayers(self.runner, self._refuse))
        super().__post_init__()

    def forward(self, batch: Batch, micro_batch: int, arrived: Payload | None) -> Payload | None:
        """See `Stage.forward`.

        Raises:
            SettingError: the forward reads state that forwards change.
        """
        loss = self.loss if isinstance(self.loss, nn.Module) and batch.training else None
        before = None if loss is None else _versions(loss)
        output = super().forward(batch, micro_batch, arrived)
        if loss is not None and _versions(loss) != before:
            self._refuse(
                [f"a buffer of the loss ({type(loss).__name__}) is changed by its forward"]
            )
        return output

    def _refuse(self, findings: list[str]) -> None:
        """Raise the error for a stage that cannot be replicated.

        Raises:
            SettingError: always.
        """
        raise SettingError(
            f"{self._schedule_name} holds copies of stage {self.index}, each of which runs some of "
            "the micro-batches, and its layers would train to other numbers than in one copy: "
            f"{'; '.join(findings)}. {REMEDY}. Nothing has been updated"
        )


class HookedStage(Stage):
    """A stage with post-accumulate-grad hooks, which refuses hooks that change their weights.

    A hook that steps its weight creates a new weight after every micro-batch. A pipeline runs
    forwards of later micro-batches before that, and would train to other weights than the same
    micro-batches one after another.
    """

    def backward(self, batch: Batch, micro_batch: int, arrived: Payload | None) -> Payload:
        """See `Stage.backward`.

        Raises:
            SettingError: a hook has changed its weight, and the batch has several micro-batches.
        """
        before = self._hooked_versions()
        input_grads = super().backward(batch, micro_batch, arrived)
        self._check_unchanged(before, batch)
        return input_grads

    def weight_grad(self, batch: Batch, micro_batch: int) -> None:
        """See `Stage.weight_grad`.

        Raises:
            SettingError: as for `backward`.
        """
        before = self._hooked_versions()
        super().weight_grad(batch, micro_batch)
        self._check_unchanged(before, batch)

    def _hooked_versions(self) -> list[int]:
        """Return the version counters of the weights with hooks."""
        return [
            parameter._version for parameter in self.update.parameters if weight_hook(parameter)
        ]

    def _check_unchanged(self, before: list[int], batch: Batch) -> None:
        """Check that no hook has changed its weight since the versions `before`.

        Raises:
            SettingError: one has, and the batch has several micro-batches.
        """
        # A single micro-batch has no later forward that could read the changed weight.
        if batch.micro_batches > 1 and self._hooked_versions() != before:
            raise SettingError(
                "a hook (register_post_accumulate_grad_hook) of a weight of stage "
                f"{self.index} changes the weight during the backward of a micro-batch, while "
                f"{batch.micro_batches} micro-batches of one batch are in flight: later ones would "
                "run with other weights than in one process. Use micro_batches=1, or let "
                "optimizer= step the weights"
            )


def stage_class(
    layers: Sequence[StageLayer], schedule: Schedule, index: int
) -> Callable[..., Stage]:
    """Return the class of a stage, with the checks that its layers need.

    Args:
        layers: the layers of the stage.
        schedule: which ranks hold it.
        index: the stage.

    Returns:
        The class, called with the arguments of `Stage`.
    """
    if len(schedule.ranks_of_stage[index]) > 1:
        return partial(ReplicatedStage, schedule.name)
    weights = (weight for layer in layers for weight in layer.module.parameters())
    hooked = any(weight_hook(weight) == "register_post_accumulate_grad_hook" for weight in weights)
    return HookedStage if hooked else Stage


def _versions(module: nn.Module) -> list[tuple[int, int]]:
    """Return identity and version counter of a module's buffers."""
    return [(id(buffer), buffer._version) for buffer in module.buffers()]


class _ObservedLayers:
    """The layers of a replicated stage; a `StageLayers` that observes its forwards.

    Args:
        layers: the layers.
        refuse: raises the error for some findings.
    """

    def __init__(self, layers: StageLayers, refuse: Callable[[list[str]], None]) -> None:
        self._layers, self._refuse = layers, refuse
        #: The buffers that the first forward did not change: name, holding dictionary and key.
        self._steady: list[tuple[str, dict[str, Any], str]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layers, name)

    def run(self, batch: Batch, micro_batch: int, value: Any, slice_state: SliceState) -> Any:
        """Run the layers, see `StageLayers.run`.

        Raises:
            SettingError: the forward reads state that forwards change.
        """
        if not batch.training:
            return self._layers.run(batch, micro_batch, value, slice_state)
        if self._steady is None:
            return self._observed_run(batch, micro_batch, value, slice_state)
        # With the identity: a forward may put another tensor in the place of a buffer.
        before = [(id(holder[key]), holder[key]._version) for _, holder, key in self._steady]
        output = self._layers.run(batch, micro_batch, value, slice_state)
        after = [(id(holder[key]), holder[key]._version) for _, holder, key in self._steady]
        if before != after:
            names = [name for name, _, _ in self._steady]
            self._refuse(
                [
                    f"buffer {name} is changed by the forward, which it was not at the first "
                    "micro-batch"
                    for name, old, new in zip(names, before, after, strict=True)
                    if old != new
                ]
            )
        return output

    def _observed_run(
        self, batch: Batch, micro_batch: int, value: Any, slice_state: SliceState
    ) -> Any:
        """Run the first micro-batch and record which state the forward reads and changes.

        Raises:
            SettingError: the forward reads state that it changes.
        """
        state = ModuleState(
            (name, module)
            for layer in self._layers.layers
            for name, module in layer.module.named_modules(
                prefix=prefix_of(layer.name, layer.module)
            )
        )
        # The forward may write into its inputs, which a second run needs as they were.
        inputs = map_tensors(Tensor.clone, value)

        def run() -> tuple[Any, list[Tensor]]:
            """Run the forward; return its output and the state for the next slice."""
            output = self._layers.run(batch, micro_batch, value, slice_state)
            return output, tensors_of(slice_state.outgoing)

        def again() -> Any:
            """Run the forward on a copy of the same inputs."""
            fresh = map_tensors(Tensor.clone, inputs)
            return self._layers.run(batch, micro_batch, fresh, SliceState(keeps=False))

        observation = observe(
            state,
            run,
            None if batch.cuts_tokens else again,
            follow=self._layers.compile is None,
        )
        if observation.findings:
            self._refuse(list(observation.findings))
        self._steady = steady_buffers(state, observation.changed)
        return observation.output[0]
