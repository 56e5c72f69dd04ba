"""All graphs of one model: for training and evaluation, and for inputs whose form or shapes another
graph is not right for.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from penstock.errors import ChainError
from penstock.tracing.capture import Capture, Form, capture, skeleton_of
from penstock.tracing.cuts import Key, layer_keys, segments_of
from penstock.tracing.flow import Flow, changed_tensors, clean, flow_of
from penstock.tracing.initialise import drawn
from penstock.tracing.quiet import announced
from penstock.tracing.segments import Segment, remade
from penstock.tracing.watch import Change, Watch

_LOG = logging.getLogger("penstock")


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


@dataclass(eq=False)
class _Store:
    """The graphs of a model as long as its Python state is the same, in training or in evaluation.

    Attributes:
        number: of the stores before it.
        known: graphs by the kind of the inputs.
        exact: by their form and shapes.
        reads: by the path of a module, the attributes that the graphs have been made with.
        watch: whether these are as they were.
        why: the changes that have led to this store, in words.
    """

    number: int = 0
    known: dict[tuple[object, ...], list[Variant]] = field(default_factory=dict)
    exact: dict[tuple[object, ...], Variant] = field(default_factory=dict)
    reads: dict[str, set[str]] = field(default_factory=dict)
    watch: Watch | None = None
    why: str = ""


#: States of a model whose graphs are kept for when they come back.
_STATES = 8


class Variants:
    """Finds the graph for a micro-batch, or makes it.

    Attributes:
        model: the user's own, whose Python state the graphs depend on.
        skeleton: the model on the meta device.
        tensors: the model's parameters and buffers by the first of their names.
        names: of every name, the first.
        keys: of the layers.
        home: of weights that are in one layer alone, which.
        steady: buffers that no graph changes.
        holds: by layer, the first names of the tensors that it has; empty until layers are made.
        example: the form of the example, its tensors on the meta device.
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
        self._stores = {True: [_Store()], False: [_Store()]}
        self._written: dict[str, set[str]] = {}
        self._drawing: set[int] = set()
        self._drawn: dict[str, Tensor] = {}
        self._states = 0
        self._fresh = True  # the skeleton has just been made
        self._lock = threading.RLock()

    def __deepcopy__(self, memo: dict[int, object]) -> Variants:
        """Copies of layers share the graphs, which nothing changes."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Graphs do not travel to other processes: they are made anew there, as they are asked for."""
        stores = {training: [_Store(rows[0].number)] for training, rows in self._stores.items()}
        return {**self.__dict__, "_stores": stores, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()

    def begin(self, form: Form) -> list[Flow]:
        """Make the graphs for training and evaluation, and let them say what the layers are."""
        self.example = form.on_meta()
        captured = [self._capture(form, training) for training in (True, False)]
        changed = {name for each in captured for name in changed_tensors(each, self.names)}
        self.steady = {
            name for name, tensor in self.tensors.items() if not isinstance(tensor, nn.Parameter)
        } - changed
        flows = [flow_of(each, self.names, self.steady) for each in captured]
        self.keys = tuple(layer_keys(flows, self.skeleton))
        for training, each, flow in zip((True, False), captured, flows, strict=True):
            self._add(form, training, each, flow)
        self._fresh = False
        return flows

    def find(self, form: Form, training: bool) -> Variant:
        """The graph for inputs of a form and shape.

        Raises:
            ChainError: there is none, and none can be made.
        """
        exact = self._exact_key(form)
        store = self._stores[training][0]
        found = store.exact.get(exact)
        if found is not None:
            return found
        with self._lock:
            known = store.known.get(self._kind(form), [])
            tensors = form.tensors
            found = next(
                (variant for variant in known if variant.captured.domain.has(tensors)), None
            )
            if found is None:
                found = self._made(form, training, store)
            if len(store.exact) > 4096:
                store.exact.clear()
            store.exact[exact] = found
        return found

    def _made(self, form: Form, training: bool, store: _Store) -> Variant:
        try:
            return self._captured(form, training)
        except ChainError as error:
            if not store.why:
                raise
            raise ChainError(
                f"since the chain was made, {store.why}, and its layers cannot be traced as it is now: {error}. "
                "Make the chain and the pipeline anew: ps.chain(model, example)"
            ) from error

    def _captured(self, form: Form, training: bool) -> Variant:
        captured = self._capture(form, training)
        if changed_tensors(captured, self.names) & self.steady:
            raise ChainError(
                f"for inputs of this form {self.model_name} changes buffers that it does not change for the example: make "
                "the chain with an example of this form"
            )
        return self._add(form, training, captured, flow_of(captured, self.names, self.steady))

    def is_current(self, training: bool) -> bool:
        """Whether the model's Python state is surely the one that the graphs were made with. Fast:
        it is asked before every batch.
        """
        watch = self._stores[training][0].watch
        return watch is None or watch.unchanged()

    def has(self, form: Form, training: bool) -> bool:
        """Whether `find` has nothing to trace."""
        store = self._stores[training][0]
        return self._exact_key(form) in store.exact or any(
            variant.captured.domain.has(form.tensors)
            for variant in store.known.get(self._kind(form), [])
        )

    @property
    def drawing(self) -> frozenset[int]:
        """The layers that could draw random numbers in a graph that is known."""
        return frozenset(self._drawing)

    def refresh(self, training: bool) -> bool:
        """Go by the model's Python state as it is now. Fast while it is as it was.

        Returns:
            Whether it has changed, so that other graphs are in use from here on.

        Raises:
            ChainError: the model has other submodules, parameters, buffers or hooks on its
            backward.
        """
        watch = self._stores[training][0].watch
        if watch is None or watch.unchanged():
            return False
        with self._lock:
            changes = watch.changes()
            if not changes:
                watch.renew()
                return False
            self._check_structure(changes)
            stores = self._stores[training]
            for place, store in enumerate(stores):
                if store.watch is not None and not store.watch.changes():
                    store.watch.renew()
                    stores.insert(0, stores.pop(place))
                    return True
            self._states += 1
            why = "; ".join(change.text for change in changes[:4])
            stores.insert(0, _Store(self._states, why=why))
            del stores[_STATES:]
        _LOG.info("%s is traced anew: %s", self.model_name, why)
        return True

    def _check_structure(self, changes: Sequence[Change]) -> None:
        found = [change.text for change in changes if not change.traceable]
        if found:
            raise ChainError(
                f"{self.model_name} is not the model that was traced: {'; '.join(found)}. The layers of a chain hold the modules "
                "and tensors that the model had when the chain was made, so this would not be trained. Undo the change (new "
                "values of a tensor are written in place: `buffer.copy_(values)`), or make the chain and the pipeline anew: "
                "ps.chain(model, example)"
            )

    def state(self, training: bool) -> int:
        """A number of the model's Python state: another one whenever `refresh` has found a new
        state.
        """
        return self._stores[training][0].number

    @property
    def is_known(self) -> bool:
        """Whether there is a graph for training."""
        return bool(self._stores[True][0].known)

    def buffer(self, first: str) -> Tensor:
        """A buffer that no graph changes; of a model on the meta device, with the values that its
        module gives it.

        Raises:
            ChainError: the module gives it none.
        """
        with self._lock:
            tensor = self.tensors[first]
            if tensor.is_meta and first not in self._drawn:
                self._drawn |= drawn(
                    self.skeleton, self.names, {first: tensor}, torch.device("cpu")
                )
            return self._drawn.get(first, tensor)

    def draws(self, layer: int) -> bool:
        """Whether a layer could draw random numbers in any graph that has been known."""
        return layer in self._drawing

    def all(self) -> list[Variant]:
        """The graphs that there are."""
        with self._lock:
            return [
                variant
                for training in (True, False)
                for known in self._stores[training][0].known.values()
                for variant in known
            ]

    @staticmethod
    def _exact_key(form: Form) -> tuple[object, ...]:
        leaves = [
            (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in form.leaves
        ]
        return _surroundings(), form.spec, tuple(leaves)

    @staticmethod
    def _kind(form: Form) -> tuple[object, ...]:
        return _surroundings(), form.kind

    def _capture(self, form: Form, training: bool) -> Capture:
        mode = "training" if training else "evaluation"
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in form.tensors)
        with announced(f"tracing {self.model_name} in {mode} for inputs of {shapes}"):
            self._copy_model()
            captured = capture(self.skeleton, form, training=training, caches=self._written)
            clean(captured)
        return captured

    def _copy_model(self) -> None:
        """Let the skeleton have the Python state that the model has now: what no graph has read so
        far was not watched.
        """
        if self._fresh:
            return
        try:
            self.skeleton = skeleton_of(self.model, self.skeleton, self._written)
        except ChainError:
            # The model keeps something new that cannot be copied. What graphs have read is as it
            # was, or this is a new state.
            if self._stores[True][0].why or self._stores[False][0].why:
                raise

    def _add(self, form: Form, training: bool, captured: Capture, flow: Flow) -> Variant:
        ranges = segments_of(flow, self.skeleton, self.keys, self.home)
        made = Variant(captured, flow, tuple(Segment.of(flow, ops) for ops in ranges), self.buffer)
        self._check_held(made)
        self._drawing |= {index for index, segment in enumerate(made.segments) if segment.draws}
        store = self._stores[training][0]
        store.known.setdefault(self._kind(form), []).append(made)
        for path, names in captured.reads.written.items():
            self._written.setdefault(path, set()).update(names)
        for path, names in captured.reads.names.items():
            store.reads.setdefault(path, set()).update(names)
        store.watch = Watch(self.model, store.reads, modes=training, ignored=self._written)
        return made

    def _check_held(self, made: Variant) -> None:
        """Every layer has the tensors that its ops use.

        Raises:
            ChainError: another layer has one.
        """
        for layer, segment in enumerate(made.segments if self.holds else ()):
            for node in segment.weights:
                first = made.flow.weights[node]
                if first not in self.holds[layer]:
                    raise ChainError(
                        f"for inputs of this form, layer {layer} uses {first}, which another layer holds: make the chain with an "
                        "example of this form"
                    )


def _surroundings() -> object:
    """What of the surroundings changes what a model does."""
    mixed = tuple(
        (kind, torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    )
    return torch.get_default_dtype(), mixed
