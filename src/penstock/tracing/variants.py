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
from penstock.tracing.capture import capture
from penstock.tracing.cuts import Key, layer_keys, segments_of
from penstock.tracing.flow import Flow, changed_tensors, clean, flow_of
from penstock.tracing.form import Form
from penstock.tracing.graph_export import Capture
from penstock.tracing.graph_segments import Segment, recomputation
from penstock.tracing.python_state.state_watch import Change, Watch
from penstock.tracing.skeleton import skeleton_of

_LOG = logging.getLogger("penstock")


#: A function that recomputes values, and its arguments after the device; see `recomputation`.
Recomputation = tuple[Callable[..., tuple[Any, ...]], list[fx.Node]]


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
    _recomputations: dict[tuple[fx.Node, ...], Recomputation] = field(default_factory=dict)
    _copies: dict[tuple[fx.Node, torch.device], tuple[int, Tensor]] = field(default_factory=dict)

    @cached_property
    def output(self) -> Callable[[Sequence[Any]], Any]:
        """The function from the computed outputs to the model's own output."""
        return self.captured.outputs.value

    def recomputation_function(self, targets: tuple[fx.Node, ...]) -> Recomputation:
        """Return the function that recomputes some values; created once."""
        if targets not in self._recomputations:
            self._recomputations[targets] = recomputation(self.flow, targets)
        return self._recomputations[targets]

    def value_on(self, node: fx.Node, device: torch.device) -> Any:
        """Return a constant, or a buffer that no graph changes, on a device.

        Copies on other devices are renewed when the tensor changes.
        """
        if node in self.flow.constants:
            value = self.flow.constants[node]
        else:
            value = self.steady(self.flow.weights[node])
        if not isinstance(value, Tensor) or value.device == device:
            return value
        stored = self._copies.get((node, device))
        if stored is None or stored[0] != value._version:
            stored = self._copies[node, device] = value._version, value.to(device)
        return stored[1]


@dataclass(eq=False)
class _StateGraphs:
    """The graphs of a model for one Python state, in training or in evaluation.

    Attributes:
        number: identifies the state.
        why: the changes that have led to this state, as text.
        by_kind: graphs by the kind of the inputs, which is their form without sizes. Each graph
            serves a domain of sizes.
        exact: graphs by form and sizes of the inputs. Only a shortcut to `by_kind`.
        reads: by the path of a module, the attributes that the forwards have read.
        watch: detects changes of these attributes; None until a graph has been captured.
    """

    number: int = 0
    why: str = ""
    by_kind: dict[tuple[object, ...], list[Variant]] = field(default_factory=dict)
    exact: dict[tuple[object, ...], Variant] = field(default_factory=dict)
    reads: dict[str, set[str]] = field(default_factory=dict)
    watch: Watch | None = None

    def look_up(self, form: Form) -> Variant | None:
        """Return the graph whose domain contains inputs of a form; None if there is none."""
        tensors = form.tensors
        for variant in self.by_kind.get(_kind(form), []):
            if variant.captured.domain.has(tensors):
                return variant
        return None

    def store_exact(self, key: tuple[object, ...], variant: Variant) -> None:
        """Store the graph for inputs of certain sizes."""
        # What is dropped here is looked up by its kind again.
        if len(self.exact) > _MAX_EXACT:
            self.exact.clear()
        self.exact[key] = variant


#: Number of earlier Python states whose graphs are stored, in case a state recurs.
_MAX_STATES = 8

#: Maximum number of changes that a message lists.
_MAX_LISTED = 4

#: Maximum number of input shapes for which graphs are looked up directly.
_MAX_EXACT = 4096


class Variants:
    """Finds the graph for a micro-batch, or captures it.

    Graphs are found in three steps: by mode (training or evaluation), by the model's Python state
    (`refresh` selects it), and by form and sizes of the inputs (`find`).

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
        # By mode, the graphs of several Python states; the first is the present one.
        self._states = {training: [_StateGraphs()] for training in (True, False)}
        self._last_state = 0
        # By the path of a module, the attributes that forwards set before they read them.
        self._written: dict[str, set[str]] = {}
        self._random_layers: set[int] = set()
        self._initialised_buffers: dict[str, Tensor] = {}
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
        states = {}
        for training in (True, False):
            states[training] = [_StateGraphs(self._present(training).number)]
        return {**self.__dict__, "_states": states, "_lock": None}

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
        """Return the graph for inputs of a form and sizes, captured if necessary.

        Raises:
            ChainError: it cannot be captured.
        """
        key = _exact_key(form)
        graphs = self._present(training)
        # Without the lock: this is the usual case, and a look-up in a dict is atomic.
        variant = graphs.exact.get(key)
        if variant is not None:
            return variant
        with self._lock:
            variant = graphs.look_up(form) or self._capture_variant(form, training, graphs)
            graphs.store_exact(key, variant)
        return variant

    def has(self, form: Form, training: bool) -> bool:
        """Return whether `find` has a graph and need not capture one."""
        graphs = self._present(training)
        return _exact_key(form) in graphs.exact or graphs.look_up(form) is not None

    def all(self) -> list[Variant]:
        """Return the graphs for the present Python state."""
        variants: list[Variant] = []
        with self._lock:
            for training in (True, False):
                for same_kind in self._present(training).by_kind.values():
                    variants += same_kind
        return variants

    @property
    def is_known(self) -> bool:
        """Whether there is a graph for training."""
        return bool(self._present(training=True).by_kind)

    @property
    def drawing(self) -> frozenset[int]:
        """The layers that may draw random numbers, in any graph captured so far."""
        return frozenset(self._random_layers)

    def buffer(self, first: str) -> Tensor:
        """Return a buffer that no graph changes, initialised if the model is on the meta device.

        Raises:
            ChainError: no method of its module initialises it.
        """
        with self._lock:
            tensor = self.tensors[first]
            if tensor.is_meta and first not in self._initialised_buffers:
                self._initialised_buffers |= initial_values(
                    self.skeleton, self.names, {first: tensor}, torch.device("cpu")
                )
            return self._initialised_buffers.get(first, tensor)

    def state(self, training: bool) -> int:
        """Return a number that identifies the Python state; `refresh` changes it with the state."""
        return self._present(training).number

    def is_current(self, training: bool) -> bool:
        """Return whether the model's Python state is certain not to have changed.

        Fast, since it is called before every batch.
        """
        watch = self._present(training).watch
        return watch is None or watch.unchanged()

    def refresh(self, training: bool) -> bool:
        """Select the graphs for the model's present Python state. Fast if it has not changed.

        If the state is one of the last few, its graphs are used again; otherwise there are none
        yet, and `find` captures them.

        Returns:
            Whether it has changed, so that other graphs are used from now on.

        Raises:
            ChainError: the model has other submodules, parameters, buffers or backward hooks.
        """
        watch = self._present(training).watch
        if watch is None or watch.unchanged():
            return False
        with self._lock:
            changes = watch.changes()
            if not changes:
                watch.renew()
                return False
            self._check_structure(changes)
            states = self._states[training]
            for index, graphs in enumerate(states):
                if graphs.watch is not None and not graphs.watch.changes():
                    graphs.watch.renew()
                    states.insert(0, states.pop(index))
                    return True
            self._last_state += 1
            why = "; ".join(change.text for change in changes[:_MAX_LISTED])
            states.insert(0, _StateGraphs(self._last_state, why))
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

    def _present(self, training: bool) -> _StateGraphs:
        """Return the graphs for the present Python state."""
        return self._states[training][0]

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
            if any(self._present(training).why for training in (True, False)):
                raise

    def _add(self, form: Form, training: bool, captured: Capture, flow: Flow) -> Variant:
        """Add a graph to those of its kind, and watch the state that its forward has read."""
        ranges = segments_of(flow, self.skeleton, self.keys, self.home)
        segments = tuple(Segment.of(flow, ops) for ops in ranges)
        variant = Variant(captured, flow, segments, self.buffer)
        self._check_held(variant)
        self._random_layers |= {index for index, segment in enumerate(segments) if segment.draws}
        graphs = self._present(training)
        graphs.by_kind.setdefault(_kind(form), []).append(variant)
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
        if not self.holds:
            return
        for layer, segment in enumerate(variant.segments):
            for node in segment.weights:
                first = variant.flow.weights[node]
                if first not in self.holds[layer]:
                    raise ChainError(held_elsewhere(layer, first))


def held_elsewhere(layer: int, first: str) -> str:
    """Return the message on a layer that uses a tensor, given by its first name, of another."""
    return (
        f"for inputs of this form, layer {layer} uses {first}, which another layer holds: make the "
        "chain with an example of this form"
    )


def _exact_key(form: Form) -> tuple[object, ...]:
    """Return the key of a form with all its sizes."""
    leaves = [
        (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in form.leaves
    ]
    return _dtype_context(), form.spec, tuple(leaves)


def _kind(form: Form) -> tuple[object, ...]:
    """Return the key of a form without its sizes."""
    return _dtype_context(), form.kind


def _dtype_context() -> object:
    """Return the settings outside the model on which it depends: default dtype and autocast."""
    autocast = tuple(
        (kind, torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    )
    return torch.get_default_dtype(), autocast
