"""The layers of a stage, run one after another: random numbers, slices, mixed precision, compiled
code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import nn

from penstock.grad.offload import offloading
from penstock.grad.recompute import Recomputing
from penstock.runtime.batch import Batch
from penstock.runtime.device_batch import INPUTS, device_batch
from penstock.runtime.draws import Place, StageDraws
from penstock.runtime.past import Past
from penstock.tracing.randomness import has_dropout, may_draw
from penstock.tracing.slices import has_past
from penstock.values.structure import map_tensors


@dataclass(frozen=True)
class StageLayer:
    """A layer's place in the whole chain, its name and its module."""

    index: int
    name: str
    module: nn.Module


@dataclass(frozen=True)
class _Part:
    """Layers that are called as one: the first one's place and name, and whether they hand on a
    past.
    """

    index: int
    name: str
    module: nn.Module
    call: Callable[[Any], Any]
    hands_on: bool = False


@dataclass
class StageLayers:
    """What a stage runs on a value.

    Attributes:
        layers: in order.
        device: where they compute.
        seed: of random numbers, which depend on it, the step, the layer and the micro-batch, never
        on where a layer runs. entry: makes of what has crossed the boundary, and the micro-batch's
        inputs, what the first layer takes. exit: makes of what the last layer returns what crosses
        the next boundary. recomputed: layers that run again before their backward instead of
        keeping what they have saved; consecutive ones together,
            but for those in `segment_starts`, which begin anew.
        compile: options of `torch.compile`, with which neighbouring layers become one function;
        None leaves them as they are. offload: keep what is saved for the backward in host memory,
        where the device has a memory of its own.
    """

    layers: Sequence[StageLayer]
    device: torch.device
    seed: int
    entry: nn.Module | None = None
    exit: Callable[[Any], Any] | None = None
    recomputed: frozenset[int] = frozenset()
    segment_starts: frozenset[int] = frozenset()
    compile: Mapping[str, Any] | None = None
    offload: bool = False
    _parts: list[_Part] = field(default_factory=list)

    def __post_init__(self) -> None:
        found = [
            _Part(
                layer.index,
                layer.name,
                layer.module,
                layer.module,
                has_past(layer.module),
            )
            for layer in self.layers
        ]
        self._parts = found if self.compile is None else list(self._compiled(found, self.compile))
        self._calls = [part.call for part in self._parts]
        joined = {part.index: part.name for part in self._parts if part.name not in self._names()}
        self.draws = StageDraws(
            self._parts, self.device, self.seed, joined, compiled=self.compile is not None
        )
        self._straight = not (self.entry or self.exit or self.recomputed or self.offload)
        self._again = Recomputing(self._parts, self.recomputed, self.segment_starts)

    def renew(self) -> None:
        """Learn anew which layers draw, and compile anew, after layers of a traced model have got
        other code.
        """
        if self.compile is not None:
            torch.compiler.reset()
        self.__post_init__()

    def allow_other_weights(self) -> None:
        """See `Stage.allow_other_weights`."""
        self._again.allow_other_weights()

    def modules(self) -> Iterator[nn.Module]:
        """All modules."""
        if self.entry is not None:
            yield from self.entry.modules()
        for layer in self.layers:
            yield from layer.module.modules()

    def run(self, batch: Batch, micro_batch: int, value: Any, past: Past) -> Any:
        """What the layers make of `value`, and what they leave in `past`."""
        if not self.draws.begin(batch) and self._straight and not batch.cuts_tokens:
            for call in self._calls:
                value = call(value)
            return value
        if self.offload and torch.is_grad_enabled():
            with offloading(self.weights()):
                return self._through(batch, micro_batch, value, past)
        return self._through(batch, micro_batch, value, past)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Layers in evaluation mode; afterwards every module is in the mode it was in."""
        modes = [(module, module.training) for module in self.modules()]
        try:
            for module, _ in modes:
                module.training = False
            yield
        finally:
            for module, training in modes:
                module.training = training

    def weights(self) -> frozenset[int]:
        """Where the memory of parameters and buffers begins."""
        tensors = (
            t
            for module in self.modules()
            for t in (*module._parameters.values(), *module._buffers.values())
        )
        return frozenset(
            tensor.untyped_storage().data_ptr()
            for tensor in tensors
            if tensor is not None and tensor.layout is torch.strided
        )

    def _through(self, batch: Batch, micro_batch: int, value: Any, past: Past) -> Any:
        if self.entry is not None:
            value = self.entry(value, self._inputs(batch, micro_batch))
        if not self.draws.needed and not batch.cuts_tokens and not self.recomputed:
            for call in self._calls:
                value = call(value)
        else:
            value = self._run(batch, micro_batch, value, past)
        return value if self.exit is None else self.exit(value)

    def _run(self, batch: Batch, micro_batch: int, value: Any, past: Past) -> Any:
        draws, place = self.draws, Place(batch, micro_batch)
        forward = True

        def call(part: _Part, value: Any) -> Any:
            run = part.call
            if part.hands_on and batch.cuts_tokens:
                run = partial(past.run, part.index, part.name, part.module)
            method = draws.call if forward else draws.call_again
            return method(part, place, run, value)

        with draws.running():
            if self.recomputed and torch.is_grad_enabled():
                value = self._again.run(value, call)
                forward = False  # calls from now on come from the backward
                return value
            for part in self._parts:
                value = call(part, value)
            return value

    def _inputs(self, batch: Batch, micro_batch: int) -> Any:
        if self.device.type != "cpu":
            return device_batch(batch, self.device).part(INPUTS, micro_batch)
        return map_tensors(lambda leaf: leaf.to(self.device), batch.inputs[micro_batch])

    def _compiled(self, parts: Sequence[_Part], options: Mapping[str, Any]) -> Iterator[_Part]:
        """Neighbours that neither draw nor hand on nor run again by themselves become one."""
        alone = {
            part.index
            for part in parts
            if may_draw(part.module) or has_dropout(part.module) or part.hands_on or self.recomputed
        }
        for by_itself, group in groupby(parts, key=lambda part: part.index in alone):
            if by_itself:
                for part in group:
                    yield _Part(
                        part.index,
                        part.name,
                        part.module,
                        torch.compile(part.module, **options),
                        part.hands_on,
                    )
                continue
            members = list(group)
            whole = (
                members[0].module
                if len(members) == 1
                else nn.Sequential(*(part.module for part in members))
            )
            name = (
                members[0].name if len(members) == 1 else " + ".join(part.name for part in members)
            )
            yield _Part(members[0].index, name, whole, torch.compile(whole, **options))

    def _names(self) -> set[str]:
        return {layer.name for layer in self.layers}
