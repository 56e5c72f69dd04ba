"""All graphs of one model: for training and evaluation, and for inputs of different forms."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from penstock.errors import ChainError
from penstock.modules.export_output import announced
from penstock.modules.initialise import initial_values
from penstock.tracing.capture import Capture, Form, capture
from penstock.tracing.cuts import Key, layer_keys, segments_of
from penstock.tracing.flow import Flow, changed_tensors, clean, flow_of
from penstock.tracing.graph_segments import Segment, recomputation
from penstock.tracing.python_state.state_watch import Change, Watch
from penstock.tracing.skeleton import skeleton_of

_LOG = logging.getLogger("penstock")


@dataclass(eq=False)
class Variant:
    """One graph, divided into layers.

    Attributes:
        captured: the graph.
        flow: its data flow.
        segments: its layers.
        steady: returns a buffer that no graph changes, by its first name.
    """

    captured: Capture
    flow: Flow
    segments: tuple[Segment, ...]
    steady: Callable[[str], Tensor]
    _recomputations: dict[
        tuple[fx.Node, ...], tuple[Callable[..., tuple[Any, ...]], list[fx.Node]]
    ] = field(default_factory=dict)
    _copies: dict[tuple[fx.Node, torch.device], tuple[int, Any]] = field(default_factory=dict)

    @cached_property
    def output(self) -> Callable[[Sequence[Any]], Any]:
        """The function from the computed outputs to the model's own output."""
        return self.captured.outputs.value

    def recomputation_function(
        self, targets: tuple[fx.Node, ...]
    ) -> tuple[Callable[..., tuple[Any, ...]], list[fx.Node]]:
        """Return the function that recomputes some values, see `recomputation`; created once."""
        recomputation_function = self._recomputations.get(targets)
        if recomputation_function is None:
            recomputation_function = self._recomputations[targets] = recomputation(
                self.flow, targets
            )
        return recomputation_function

    def value_on(self, node: fx.Node, device: torch.device) -> Any:
        """Return a constant, or a buffer that no graph changes, on a device.

        Copies on other devices are renewed when the tensor changes.
        """
        value = (
            self.flow.constants[node]
            if node in self.flow.constants
            else self.steady(self.flow.weights[node])
        )
        if not isinstance(value, Tensor) or value.device == device:
            return value
        version, copied = self._copies.get((node, device), (-1, None))
        if version != value._version:
            copied = value.to(device)
            self._copies[node, device] = value._version, copied
        return copied


@dataclass(eq=False)
class _StateGraphs:
    """The graphs of a model for one Python state, in training or in evaluation.

    Attributes:
        number: identifies the state.
        by_kind: graphs by the kind of the inputs.
        exact: graphs by form and shapes of the inputs.
        reads: by the path of a module, the attributes that the forwards have read.
        watch: detects changes of these attributes.
        why: the changes that have led to this state, as text.
    """

    number: int = 0
    by_kind: dict[tuple[object, ...], list[Variant]] = field(default_factory=dict)
    exact: dict[tuple[object, ...], Variant] = field(default_factory=dict)
    reads: dict[str, set[str]] = field(default_factory=dict)
    watch: Watch | None = None
    why: str = ""


#: Number of earlier Python states whose graphs are stored, in case a state recurs.
_MAX_STATES = 8

#: Maximum number of changes that a message lists.
_MAX_LISTED = 4

#: Maximum number of input shapes for which graphs are looked up directly.
_MAX_EXACT = 4096


class Variants:
    """Finds the graph for a micro-batch, or captures it.

    Attributes:
        model: the user's model, on whose Python state the graphs depend.
        skeleton: the model on the meta device.
        tensors: the model's parameters and buffers by their first names.
        names: for every name of a tensor its first name.
        keys: keys of the layers.
        home: for tensors that one layer alone uses, its index.
        steady: buffers that no graph changes.
        holds: for each layer, the first names of its tensors; empty until the layers are created.
        example: form of the example, with its tensors on the meta device.
    """

    def __init__(
        self, model: nn.Module, tensors: Mapping[str, Tensor], names: Mapping[str, str]
    ) -> None:
        self.model, self.skeleton = model, skeleton_of(model)
        self.tensors, self.names = dict(tensors), dict(names)
        self.model_name = type(model).__name__
        self.keys: tuple[Key, ...] = ()
        self.home: dict[str, int] = {}
        self.steady: set[str] = set()
        self.holds: list[set[str]] = []
        self.example: Form | None = None
        self._graphs = {True: [_StateGraphs()], False: [_StateGraphs()]}
        self._written: dict[str, set[str]] = {}
        self._drawing: set[int] = set()
        self._drawn: dict[str, Tensor] = {}
        self._states = 0
        self._is_skeleton_current = True
        self._lock = threading.RLock()

    def __deepcopy__(self, memo: dict[int, object]) -> Variants:
        """Return this object: copies of layers share the graphs."""
        return self

    def copy_with_model(self, memo: dict[int, object]) -> Variants:
        """Return a copy that follows the Python state of a copy of the model, without graphs.

        Args:
            memo: that of `copy.deepcopy`. Layers that are copied with it afterwards have the copy.
        """
        copied = Variants.__new__(Variants)
        # The example is never changed.
        memo |= {id(self): copied, id(self.example): self.example}
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without graphs: other processes capture them again when needed."""
        stores = {
            training: [_StateGraphs(rows[0].number)] for training, rows in self._graphs.items()
        }
        return {**self.__dict__, "_graphs": stores, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()

    def begin(self, form: Form) -> list[Flow]:
        """Capture the graphs for training and evaluation, and determine the layers.

        Returns:
            The data flows of the two graphs.
        """
        self.example = form.on_meta()
        captures = [self._capture(form, training) for training in (True, False)]
        self.steady = {
            name for name, tensor in self.tensors.items() if not isinstance(tensor, nn.Parameter)
        }
        for captured in captures:
            self.steady -= changed_tensors(captured, self.names)
        flows = [flow_of(captured, self.names, self.steady) for captured in captures]
        self.keys = tuple(layer_keys(flows, self.skeleton))
        for training, captured, flow in zip((True, False), captures, flows, strict=True):
            self._add(form, training, captured, flow)
        # From now on the user may change the model, so the next capture copies its state first.
        self._is_skeleton_current = False
        return flows

    def find(self, form: Form, training: bool) -> Variant:
        """Return the graph for inputs of a form and shape, captured if necessary.

        Raises:
            ChainError: it cannot be captured.
        """
        exact = self._exact_key(form)
        graphs = self._graphs[training][0]
        # Without the lock: this is the usual case, and a look-up in a dict is atomic.
        variant = graphs.exact.get(exact)
        if variant is not None:
            return variant
        with self._lock:
            tensors = form.tensors
            for candidate in graphs.by_kind.get(self._kind(form), []):
                if candidate.captured.domain.has(tensors):
                    variant = candidate
                    break
            else:
                variant = self._capture_variant(form, training, graphs)
            # Only a shortcut: what is dropped here is looked up by its kind again.
            if len(graphs.exact) > _MAX_EXACT:
                graphs.exact.clear()
            graphs.exact[exact] = variant
        return variant

    def _capture_variant(self, form: Form, training: bool, graphs: _StateGraphs) -> Variant:
        """Trace the model on inputs of a form, and add the graph."""
        try:
            captured = self._capture(form, training)
            self._check_steady(captured)
            flow = flow_of(captured, self.names, self.steady)
            return self._add(form, training, captured, flow)
        except ChainError as error:
            if not graphs.why:
                raise
            raise ChainError(
                f"since the chain was made, {graphs.why}, and its layers cannot be traced as it is "
                f"now: {error}. Make the chain and the pipeline anew: ps.chain(model, example)"
            ) from error

    def _check_steady(self, captured: Capture) -> None:
        """Reject a graph that changes buffers which the example's graph leaves as they are."""
        if changed_tensors(captured, self.names) & self.steady:
            raise ChainError(
                f"for inputs of this form {self.model_name} changes buffers that it does not "
                "change for the example: make the chain with an example of this form"
            )

    def is_current(self, training: bool) -> bool:
        """Return whether the model's Python state is certain not to have changed.

        Fast, since it is called before every batch.
        """
        watch = self._graphs[training][0].watch
        return watch is None or watch.unchanged()

    def has(self, form: Form, training: bool) -> bool:
        """Return whether `find` has a graph and need not capture one."""
        graphs = self._graphs[training][0]
        return self._exact_key(form) in graphs.exact or any(
            variant.captured.domain.has(form.tensors)
            for variant in graphs.by_kind.get(self._kind(form), [])
        )

    @property
    def drawing(self) -> frozenset[int]:
        """The layers that may draw random numbers, in any graph captured so far."""
        return frozenset(self._drawing)

    def refresh(self, training: bool) -> bool:
        """Select the graphs for the model's present Python state. Fast if it has not changed.

        Returns:
            Whether it has changed, so that other graphs are used from now on.

        Raises:
            ChainError: the model has other submodules, parameters, buffers or backward hooks.
        """
        watch = self._graphs[training][0].watch
        if watch is None or watch.unchanged():
            return False
        with self._lock:
            changes = watch.changes()
            if not changes:
                watch.renew()
                return False
            self._check_structure(changes)
            states = self._graphs[training]
            for index, graphs in enumerate(states):
                if graphs.watch is not None and not graphs.watch.changes():
                    graphs.watch.renew()
                    states.insert(0, states.pop(index))
                    return True
            self._states += 1
            why = "; ".join(change.text for change in changes[:_MAX_LISTED])
            states.insert(0, _StateGraphs(self._states, why=why))
            del states[_MAX_STATES:]
        _LOG.info("%s is traced anew: %s", self.model_name, why)
        return True

    def _check_structure(self, changes: Sequence[Change]) -> None:
        """Check that all changes are such that tracing again takes account of them."""
        faults = [change.text for change in changes if not change.traceable]
        if faults:
            raise ChainError(
                f"{self.model_name} is not the model that was traced: {'; '.join(faults)}. The "
                "layers of a chain hold the modules and tensors that the model had when the chain "
                "was made, so this would not be trained. Undo the change (new values of a tensor "
                "are written in place: `buffer.copy_(values)`), or make the chain and the "
                "pipeline anew: ps.chain(model, example)"
            )

    def state(self, training: bool) -> int:
        """Return a number that identifies the Python state; `refresh` changes it with the state."""
        return self._graphs[training][0].number

    @property
    def is_known(self) -> bool:
        """Whether there is a graph for training."""
        return bool(self._graphs[True][0].by_kind)

    def buffer(self, first: str) -> Tensor:
        """Return a buffer that no graph changes, initialised if the model is on the meta device.

        Raises:
            ChainError: no method of its module initialises it.
        """
        with self._lock:
            tensor = self.tensors[first]
            if tensor.is_meta and first not in self._drawn:
                self._drawn |= initial_values(
                    self.skeleton, self.names, {first: tensor}, torch.device("cpu")
                )
            return self._drawn.get(first, tensor)

    def draws(self, layer: int) -> bool:
        """Return whether a layer may draw random numbers, in any graph captured so far."""
        return layer in self._drawing

    def all(self) -> list[Variant]:
        """Return the graphs for the present Python state."""
        variants: list[Variant] = []
        with self._lock:
            for training in (True, False):
                for same_kind in self._graphs[training][0].by_kind.values():
                    variants += same_kind
        return variants

    @staticmethod
    def _exact_key(form: Form) -> tuple[object, ...]:
        """Return the key of a form with all its sizes."""
        leaves = [
            (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in form.leaves
        ]
        return _dtype_context(), form.spec, tuple(leaves)

    @staticmethod
    def _kind(form: Form) -> tuple[object, ...]:
        """Return the key of a form without its sizes."""
        return _dtype_context(), form.kind

    def _capture(self, form: Form, training: bool) -> Capture:
        """Trace the model for inputs of a form, and clean the graph."""
        mode = "training" if training else "evaluation"
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in form.tensors)
        with announced(f"tracing {self.model_name} in {mode} for inputs of {shapes}"):
            self._copy_model()
            captured = capture(self.skeleton, form, training=training, caches=self._written)
            clean(captured)
        return captured

    def _copy_model(self) -> None:
        """Copy the model's present Python state to the skeleton.

        Attributes that no graph has read so far were not watched and may have changed.
        """
        if self._is_skeleton_current:
            return
        try:
            self.skeleton = skeleton_of(self.model, self.skeleton, self._written)
        except ChainError:
            # The model has a new attribute that cannot be copied. Use the previous skeleton, unless
            # an attribute that graphs have read has changed.
            if self._graphs[True][0].why or self._graphs[False][0].why:
                raise

    def _add(self, form: Form, training: bool, captured: Capture, flow: Flow) -> Variant:
        """Add a graph to those of its kind, and watch the state that its forward has read."""
        ranges = segments_of(flow, self.skeleton, self.keys, self.home)
        segments = tuple(Segment.of(flow, ops) for ops in ranges)
        variant = Variant(captured, flow, segments, self.buffer)
        self._check_held(variant)
        self._drawing |= {index for index, segment in enumerate(segments) if segment.draws}
        graphs = self._graphs[training][0]
        graphs.by_kind.setdefault(self._kind(form), []).append(variant)
        for path, names in captured.reads.written.items():
            self._written.setdefault(path, set()).update(names)
        for path, names in captured.reads.names.items():
            graphs.reads.setdefault(path, set()).update(names)
        graphs.watch = Watch(self.model, graphs.reads, modes=training, ignored=self._written)
        return variant

    def _check_held(self, variant: Variant) -> None:
        """Check that every op uses only tensors of its own layer.

        Raises:
            ChainError: an op uses a tensor that another layer has.
        """
        for layer, segment in enumerate(variant.segments if self.holds else ()):
            for node in segment.weights:
                first = variant.flow.weights[node]
                if first not in self.holds[layer]:
                    raise ChainError(
                        f"for inputs of this form, layer {layer} uses {first}, which another layer "
                        "holds: make the chain with an example of this form"
                    )


def _dtype_context() -> object:
    """Return the settings outside the model on which it depends: default dtype and autocast."""
    autocast = tuple(
        (kind, torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    )
    return torch.get_default_dtype(), autocast
