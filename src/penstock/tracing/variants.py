"""All graphs of one model: for training and evaluation, and for inputs whose form or shapes another graph is not right for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from penstock.errors import ChainError
from penstock.tracing.capture import Capture, Form, capture
from penstock.tracing.cuts import Key, layer_keys, segments_of
from penstock.tracing.flow import Flow, changed_tensors, clean, flow_of
from penstock.tracing.initialise import drawn
from penstock.tracing.segments import Segment, remade


@dataclass(eq=False)
class Variant:
    """One graph, cut."""

    captured: Capture
    flow: Flow
    segments: tuple[Segment, ...]
    steady: Callable[[str], Tensor]
    _remakers: dict[tuple[fx.Node, ...], tuple[Callable[..., tuple[Any, ...]], list[fx.Node]]] = (
        field(default_factory=dict)
    )
    _elsewhere: dict[tuple[fx.Node, torch.device], tuple[int, Any]] = field(default_factory=dict)

    @cached_property
    def output(self) -> Callable[[Sequence[Any]], Any]:
        """From what changes in the outputs to the model's own output."""
        return self.captured.outputs.value

    def remaker(
        self, wanted: tuple[fx.Node, ...]
    ) -> tuple[Callable[..., tuple[Any, ...]], list[fx.Node]]:
        """See `remade`."""
        found = self._remakers.get(wanted)
        if found is None:
            found = self._remakers[wanted] = remade(self.flow, wanted)
        return found

    def held(self, node: fx.Node, device: torch.device) -> Any:
        """A constant, or a buffer that stays as it is."""
        value = (
            self.flow.constants[node]
            if node in self.flow.constants
            else self.steady(self.flow.weights[node])
        )
        if not isinstance(value, Tensor) or value.device == device:
            return value
        version, moved = self._elsewhere.get((node, device), (-1, None))
        if version != value._version:
            moved = value.to(device)
            self._elsewhere[node, device] = value._version, moved
        return moved


class Variants:
    """Finds the graph for a micro-batch, or makes it.

    Attributes:
        skeleton: the model on the meta device.
        tensors: the model's parameters and buffers by the first of their names.
        names: of every name, the first.
        keys: of the layers.
        home: of weights that are in one layer alone, which.
        steady: buffers that no graph changes.
    """

    def __init__(
        self, skeleton: nn.Module, tensors: Mapping[str, Tensor], names: Mapping[str, str]
    ) -> None:
        self.skeleton, self.tensors, self.names = skeleton, dict(tensors), dict(names)
        self.model_name = type(skeleton).__name__
        self.keys: tuple[Key, ...] = ()
        self.home: dict[str, int] = {}
        self.steady: set[str] = set()
        self._known: dict[tuple[object, ...], list[Variant]] = {}
        self._exact: dict[tuple[object, ...], Variant] = {}
        self._drawing: set[int] = set()
        self._made: dict[str, Tensor] = {}
        self._lock = threading.RLock()

    def __deepcopy__(self, memo: dict[int, object]) -> Variants:
        """Copies of layers share the graphs, which nothing changes."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Graphs do not travel to other processes: they are made anew there, as they are asked for."""
        return {**self.__dict__, "_known": {}, "_exact": {}, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()

    def begin(self, form: Form) -> list[Flow]:
        """Make the graphs for training and evaluation, and let them say what the layers are."""
        captured = [self._capture(form, training) for training in (True, False)]
        changed = {name for each in captured for name in changed_tensors(each, self.names)}
        self.steady = {
            name for name, tensor in self.tensors.items() if not isinstance(tensor, nn.Parameter)
        } - changed
        flows = [flow_of(each, self.names, self.steady) for each in captured]
        self.keys = tuple(layer_keys(flows, self.skeleton))
        for training, each, flow in zip((True, False), captured, flows, strict=True):
            self._add(form, training, each, flow)
        return flows

    def find(self, form: Form, training: bool) -> Variant:
        """The graph for inputs of a form and shape.

        Raises:
            ChainError: there is none, and none can be made.
        """
        exact = (training, _surroundings(), form.spec, tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf
                                                         for leaf in form.leaves))  # fmt: skip
        found = self._exact.get(exact)
        if found is not None:
            return found
        with self._lock:
            known = self._known.get(self._kind(form, training), [])
            tensors = form.tensors
            found = next(
                (variant for variant in known if variant.captured.domain.has(tensors)), None
            )
            if found is None:
                captured = self._capture(form, training)
                if changed_tensors(captured, self.names) & self.steady:
                    raise ChainError(f"for inputs of this form {self.model_name} changes buffers that it does not change for the example: make "
                                     "the chain with an example of this form")  # fmt: skip
                found = self._add(
                    form, training, captured, flow_of(captured, self.names, self.steady)
                )
            if len(self._exact) > 4096:
                self._exact.clear()
            self._exact[exact] = found
        return found

    def buffer(self, first: str) -> Tensor:
        """A buffer that no graph changes; of a model on the meta device, with the values that its module gives it.

        Raises:
            ChainError: the module gives it none.
        """
        with self._lock:
            tensor = self.tensors[first]
            if tensor.is_meta and first not in self._made:
                self._made |= drawn(self.skeleton, self.names, {first: tensor}, torch.device("cpu"))
            return self._made.get(first, tensor)

    def draws(self, layer: int) -> bool:
        """Whether a layer could draw random numbers in any graph that has been known."""
        return layer in self._drawing

    def all(self) -> list[Variant]:
        """The graphs that there are."""
        with self._lock:
            return [variant for known in self._known.values() for variant in known]

    @staticmethod
    def _kind(form: Form, training: bool) -> tuple[object, ...]:
        return training, _surroundings(), form.kind

    def _capture(self, form: Form, training: bool) -> Capture:
        captured = capture(self.skeleton, form, training=training)
        clean(captured)
        return captured

    def _add(self, form: Form, training: bool, captured: Capture, flow: Flow) -> Variant:
        ranges = segments_of(flow, self.skeleton, self.keys, self.home)
        made = Variant(captured, flow, tuple(Segment.of(flow, ops) for ops in ranges), self.buffer)
        self._drawing |= {index for index, segment in enumerate(made.segments) if segment.draws}
        self._known.setdefault(self._kind(form, training), []).append(made)
        return made


def _surroundings() -> object:
    """What of the surroundings changes what a model does."""
    mixed = tuple(
        (kind, torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    )
    return torch.get_default_dtype(), mixed
