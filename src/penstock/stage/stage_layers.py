"""Run the layers of a stage, with random streams, slice state, recompute and compiled code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import nn

from penstock.batches.batch import Batch
from penstock.batches.device_batch import micro_batch_inputs
from penstock.grad.offload import offloading
from penstock.grad.recompute import Recomputing
from penstock.modules.randomness import has_dropout, may_draw
from penstock.stage.slice_state import SliceState
from penstock.stage.stage_random import Place, StageDraws
from penstock.tracing.slices import has_past
from penstock.values.deferred_checks import DeferredChecks
from penstock.values.sharded import local_part


@dataclass(frozen=True)
class StageLayer:
    """A layer of a stage: its index in the whole chain, its name and its module."""

    index: int
    name: str
    module: nn.Module


@dataclass(frozen=True)
class _Part:
    """One layer, or neighbouring layers that are compiled as one function.

    Attributes:
        index: index of the (first) layer in the chain.
        name: name of the layer, or names joined by " + ".
        module: the layer, or a sequence of them.
        call: its forward.
        slice_state: whether it passes state from one slice of a sequence to the next.
    """

    index: int
    name: str
    module: nn.Module
    call: Callable[[Any], Any]
    slice_state: bool = False


@dataclass
class StageLayers:
    """The layers of a stage, and how to run them.

    Attributes:
        layers: the layers in order.
        device: where they compute.
        seed: seed of the random numbers, which depend on it, the step, the layer and the
            micro-batch, but not on the rank that runs a layer.
        entry: if given, computes the input of the first layer from the received value and the
            micro-batch's inputs.
        exit: if given, computes the value to send from the output of the last layer.
        recomputed: indices of layers that are recomputed for their backward. Consecutive ones form
            one segment.
        segment_starts: indices of recomputed layers that start a new segment nevertheless.
        compile: options of `torch.compile`, which compiles neighbouring layers as one function;
            None does not compile.
        offload: the share of the bytes saved for the backward that is kept in host memory, if the
            device is not the CPU.
        checks: results of checks of the stage that are read later.
    """

    layers: Sequence[StageLayer]
    device: torch.device
    seed: int
    entry: nn.Module | None = None
    exit: Callable[[Any], Any] | None = None
    recomputed: frozenset[int] = frozenset()
    segment_starts: frozenset[int] = frozenset()
    compile: Mapping[str, Any] | None = None
    offload: float = 0.0
    _parts: list[_Part] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.checks = DeferredChecks(self.device)
        self._inspect()

    def _inspect(self) -> None:
        """Compile the layers, and determine what running them needs."""
        parts = [
            _Part(
                layer.index,
                layer.name,
                layer.module,
                layer.module,
                has_past(layer.module),
            )
            for layer in self.layers
        ]
        if self.compile is not None:
            parts = list(self._compile_parts(parts, self.compile))
        self._parts = parts
        self._calls = [part.call for part in self._parts]
        layer_names = {layer.name for layer in self.layers}
        joined = {part.index: part.name for part in self._parts if part.name not in layer_names}
        self.draws = StageDraws(
            self._parts, self.device, self.seed, joined, compiled=self.compile is not None
        )
        # Without these, the layers can be called one after another with nothing in between.
        self._layers_only = not (self.entry or self.exit or self.recomputed or self.offload)
        self._recomputing = Recomputing(
            self._parts, self.recomputed, self.segment_starts, self.checks
        )

    def renew(self) -> None:
        """Compile and inspect the layers again, after the code of a traced model has changed."""
        if self.compile is not None:
            torch.compiler.reset()
        self._inspect()

    def allow_weight_changes(self) -> None:
        """See `Stage.allow_weight_changes`."""
        self._recomputing.allow_weight_changes()

    def modules(self) -> Iterator[nn.Module]:
        """Yield all modules, those of `entry` included."""
        if self.entry is not None:
            yield from self.entry.modules()
        for layer in self.layers:
            yield from layer.module.modules()

    def run(self, batch: Batch, micro_batch: int, value: Any, slice_state: SliceState) -> Any:
        """Run the layers.

        Args:
            batch: the batch.
            micro_batch: number of the micro-batch or slice.
            value: the input of the stage.
            slice_state: state of earlier slices of the same sequences; that of the layers is added
                to it.

        Returns:
            The output of the stage.
        """
        if not self.draws.begin(batch) and self._layers_only and not batch.cuts_tokens:
            for call in self._calls:
                value = call(value)
            return value
        if self.offload and torch.is_grad_enabled():
            with offloading(self.weights(), share=self.offload):
                return self._run_with_boundaries(batch, micro_batch, value, slice_state)
        return self._run_with_boundaries(batch, micro_batch, value, slice_state)

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Set all modules to evaluation mode inside; restore the mode of each module afterwards."""
        modes = [(module, module.training) for module in self.modules()]
        try:
            for module, _ in modes:
                # Not by eval(), which a module may override, and which sets the children as well.
                module.training = False
            yield
        finally:
            for module, training in modes:
                module.training = training

    def weights(self) -> frozenset[int]:
        """Return the start addresses of the storages of parameters and buffers."""
        tensors = (
            tensor
            for module in self.modules()
            for tensor in (*module._parameters.values(), *module._buffers.values())
        )
        # Only strided tensors have one storage.
        return frozenset(
            local_part(tensor).untyped_storage().data_ptr()
            for tensor in tensors
            if tensor is not None and tensor.layout is torch.strided
        )

    def _run_with_boundaries(
        self, batch: Batch, micro_batch: int, value: Any, slice_state: SliceState
    ) -> Any:
        """Run the layers between `entry` and `exit`. Arguments as for `run`."""
        if self.entry is not None:
            value = self.entry(value, micro_batch_inputs(batch, micro_batch, self.device))
        if not self.draws.needed and not batch.cuts_tokens and not self.recomputed:
            for call in self._calls:
                value = call(value)
        else:
            value = self._run_parts(batch, micro_batch, value, slice_state)
        return value if self.exit is None else self.exit(value)

    def _run_parts(
        self, batch: Batch, micro_batch: int, value: Any, slice_state: SliceState
    ) -> Any:
        """Run the layers with random streams, slice state and recompute. Arguments as for `run`."""
        draws, place = self.draws, Place(batch, micro_batch)
        forward = True

        def call(part: _Part, value: Any) -> Any:
            run = part.call
            if part.slice_state and batch.cuts_tokens:
                run = partial(slice_state.run, part.index, part.name, part.module)
            method = draws.call if forward else draws.call_again
            return method(part, place, run, value)

        with draws.running():
            value = self._recomputing.run(value, call)
            forward = False  # calls from now on come from the backward
            return value

    def _compile_parts(self, parts: Sequence[_Part], options: Mapping[str, Any]) -> Iterator[_Part]:
        """Compile the layers; neighbours become one function if that is possible.

        A layer is compiled by itself if it may draw random numbers or passes on slice state. With
        recompute, all are.
        """

        def is_separate(part: _Part) -> bool:
            draws = may_draw(part.module) or has_dropout(part.module)
            return draws or part.slice_state or bool(self.recomputed)

        for separate, neighbours in groupby(parts, is_separate):
            group = list(neighbours)
            for members in [[part] for part in group] if separate else [group]:
                yield _compile_group(members, options)


def _compile_group(group: Sequence[_Part], options: Mapping[str, Any]) -> _Part:
    """Compile neighbouring layers as one function."""
    if len(group) == 1:
        return replace(group[0], call=torch.compile(group[0].module, **options))
    whole = nn.Sequential(*(part.module for part in group))
    name = " + ".join(part.name for part in group)
    return _Part(group[0].index, name, whole, torch.compile(whole, **options))
