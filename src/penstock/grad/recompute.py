"""Recomputation: layers run again before their backward instead of keeping activations.

    forward     | layer  | segment a                       | layer  | segment b                 |
    saves         all      its input, and the buffers as     all      likewise
                           they were before it ran
    backward      ...      the first use of a saved tensor   ...      runs again first; its
                           runs the segment again, which              activations are freed as
                           restores all saved tensors                 the graph releases them

Source: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost. The early stop of the
second forward, at the last saved tensor that is still needed, is that of
torch.utils.checkpoint(use_reentrant=False).

Differences from torch.utils.checkpoint:

- torch runs a segment again for every traversal of the graph. A split backward traverses the graph
  once for the inputs and once for each group of weights, and would pay a forward for each. Here
  restored tensors stay until the graph releases them, so that a segment runs again once.
- Buffers are not updated twice.
- Layers may change their inputs in place.
- A saved tensor that is changed in place raises the error that torch raises without recomputation.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from penstock.errors import RunError
from penstock.grad.attributes import Attributes, Values
from penstock.grad.buffers import Buffers, Contents
from penstock.grad.fingerprint import Fingerprint, check_equal, fingerprint
from penstock.grad.saved_version import SavedVersion
from penstock.plan.segments import segments
from penstock.values.deferred_checks import DeferredChecks
from penstock.values.rare_checks import is_due
from penstock.values.storage import copy_of, overlapping_pairs
from penstock.values.structure import Structure, flatten, unflatten


class Layer(Protocol):
    """A layer of the chain, with the module whose buffers the second forward must not change."""

    @property
    def index(self) -> int:
        """Index of the layer in the chain."""

    @property
    def module(self) -> nn.Module:
        """The module that runs."""


#: Number of saved tensors that the first forward holds before it takes their fingerprints. Some ops
#: fill a tensor after saving it, so that a fingerprint must wait until the op has finished; no op
#: saves more tensors than this.
_FINGERPRINT_DELAY = 8

#: Number of tensors that an op may save if it fills one of them after saving it.
_MAX_SAVED_BY_OP = 3

L = TypeVar("L", bound=Layer)


class Recomputing(Generic[L]):
    """Layers of which some run again before their backward.

    It keeps no data of a forward. It remembers which segments change their inputs in place, so that
    the inputs have to be copied (assumed until known), and which large buffers change.

    Args:
        layers: the layers, in order.
        recomputed: indices of the recomputed layers.
        starts: layers among `recomputed` that begin a new segment.
        checks: receives the results of comparisons that are read later; None to read all at once.
    """

    def __init__(
        self,
        layers: Sequence[L],
        recomputed: Collection[int],
        starts: Collection[int] = (),
        checks: DeferredChecks | None = None,
    ) -> None:
        positions = {layer.index: position for position, layer in enumerate(layers)}
        recomputed_positions = sorted(
            positions[index] for index in recomputed if index in positions
        )
        segment_starts = {positions[index] for index in starts if index in positions}
        self._layers = list(layers)
        self._parts: list[L | _Segment[L]] = []
        next_layer = 0
        for first, end in segments(recomputed_positions, segment_starts):
            self._parts += self._layers[next_layer:first]
            self._parts.append(_Segment(self._layers[first:end], checks))
            next_layer = end
        self._parts += self._layers[next_layer:]

    def allow_weight_changes(self) -> None:
        """Do not compare second forwards with first ones, since they may read other weights."""
        for part in self._parts:
            if isinstance(part, _Segment):
                part.compares = False

    def run(self, value: Any, call: Callable[[L, Any], Any]) -> Any:
        """Run the layers on `value`; the backward runs those in `recomputed` again.

        Args:
            value: input of the first layer: a tensor, or nested values with tensors and constants.
            call: runs one layer on a value: once now, and once during the backward, on the thread
                of the backward. It must make both runs draw the same random numbers.

        Returns:
            The output of the last layer.

        Raises:
            RunError: during the backward, if a layer's second forward differs from its first.
        """
        recomputes = torch.is_grad_enabled()
        for part in self._parts if recomputes else self._layers:
            value = part.forward(value, call) if isinstance(part, _Segment) else call(part, value)
        return value


class _Segment(Generic[L]):
    """Consecutive layers that are recomputed together."""

    def __init__(self, layers: Sequence[L], checks: DeferredChecks | None = None) -> None:
        self.layers, self.checks = layers, checks
        self.buffers = Buffers([module for layer in layers for module in layer.module.modules()])
        self.attributes = Attributes(layer.module for layer in layers)
        self._count = 0
        #: Whether second forwards are compared with first ones.
        self.compares = True
        # Whether the layers change their input in place, by training mode.
        self._changes_input: dict[bool, bool] = {}

    def forward(self, value: Any, call: Callable[[L, Any], Any]) -> Any:
        """Run the layers on `value`, and keep only `value` for the backward."""
        training = self.layers[0].module.training
        leaves, form = flatten(value)
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        copies_input = self._changes_input.get(training, True)
        versions = [leaf._version for leaf in inputs]
        shared = overlapping_pairs(inputs)
        forward = _Forward(self, call, _Input(leaves, form, copies_input))
        with torch.autograd.graph.saved_tensors_hooks(forward.pack, _unpack):
            for layer in self.layers:
                value = call(layer, value)
        forward.finish()
        if training not in self._changes_input or shared:
            changed = [
                leaf._version != version for leaf, version in zip(inputs, versions, strict=True)
            ]
            self._changes_input.setdefault(training, any(changed))
            self._check_shared(changed, shared)
        return value

    def _check_shared(self, changed: Sequence[bool], shared: Sequence[tuple[int, int]]) -> None:
        """Raise an error if inputs that share memory are changed in place.

        Args:
            changed: for each input tensor, whether it was changed.
            shared: pairs of indices of input tensors that share memory.
        """
        if any(changed[first] or changed[second] for first, second in shared):
            raise RunError(
                f"{self.name}: two of the input tensors share memory, and one of them is changed "
                "in place, which cannot be repeated: pass a clone() of one of the two, or exclude "
                "the layers from recomputation"
            )

    def is_sampled(self) -> bool:
        """Return whether to compare all saved tensors of the next forward.

        They are compared in forwards 1, 2, 4, 8 and so on, to limit the cost.
        """
        self._count += 1
        return is_due(self._count)

    @property
    def name(self) -> str:
        """Its layers, for messages."""
        first, last = self.layers[0].index, self.layers[-1].index
        return f"layer {first}" if first == last else f"layers {first} to {last}"


class _SaveForBackward(torch.autograd.Function):
    """Save tensors by autograd itself, so that saved-tensor hooks of callers see them.

    Such hooks may count the tensors or offload them. Nothing depends on the output, so there is no
    backward.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        """Save `tensors`, and return a tensor whose grad_fn holds them."""
        ctx.save_for_backward(*tensors)
        return torch.empty_like(anchor)


class _Input:
    """Input of a segment, kept for its second forward.

    A tensor that occurs several times in the input is a single tensor in the restored input too.
    """

    def __init__(self, leaves: Sequence[Any], form: Structure, is_changed: bool) -> None:
        self._form, self._is_changed = form, is_changed
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._requires_grad = [tensor.requires_grad for tensor in tensors]
        self._leaves = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        kept_tensors = [tensor.detach() for tensor in tensors]
        if is_changed:
            kept_tensors = [copy_of(tensor) for tensor in kept_tensors]
        anchor = torch.empty(0, requires_grad=True)
        # The output is held, not its node alone: torch 2.11 frees what a node has saved with its
        # last output.
        self._output: Tensor = _SaveForBackward.apply(anchor, *kept_tensors)  # type: ignore[no-untyped-call]
        self.devices = sorted({"cpu", *(tensor.device.type for tensor in tensors)})

    def restore(self) -> Any:
        """Return the input with new tensors.

        They are leaves, or copies of leaves where the layers change their input in place, which
        autograd allows only for tensors that are no leaves.
        """
        node: Any = self._output.grad_fn
        tensors = [
            saved.detach().requires_grad_(requires_grad)
            for saved, requires_grad in zip(node.saved_tensors, self._requires_grad, strict=True)
        ]
        if self._is_changed:
            tensors = [copy_of(tensor) for tensor in tensors]
        remaining = iter(tensors)
        leaves = [next(remaining) if leaf is _TENSOR else leaf for leaf in self._leaves]
        return unflatten(self._form, leaves)


#: Placeholder for a tensor in a list of leaves.
_TENSOR = object()


class _Slot:
    """Placeholder in the graph for one saved tensor: empty until the segment has run again.

    It is freed together with its graph node.
    """

    __slots__ = ("__weakref__", "first", "form", "forward", "saved")

    def __init__(self, forward: _Forward, tensor: Tensor) -> None:
        self.forward, self.form = forward, (tensor.shape, tensor.dtype)
        self.first = SavedVersion(tensor, holds=False)
        self.saved: SavedVersion | None = None


class _Forward:
    """One forward of a segment: what its second forward needs, and the slots that it will fill."""

    def __init__(
        self, segment: _Segment[Any], call: Callable[[Any, Any], Any], inputs: _Input
    ) -> None:
        self._segment, self._call = segment, call
        self._inputs: _Input | None = inputs
        self._buffers: Contents = segment.buffers.contents()
        self._attributes: Values = segment.attributes.contents()
        self._fingerprints: dict[int, Fingerprint] = {}
        # Saved tensors whose fingerprints are still to be taken, see `_FINGERPRINT_DELAY`.
        self._recent: deque[tuple[int, _Slot, Tensor]] = deque()
        self._is_sampled = segment.is_sampled()
        self._autocast = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in inputs.devices
        ]
        self._autocast_caches = torch.is_autocast_cache_enabled()
        self._slots: list[weakref.ref[_Slot]] = []
        # Of the second forward: slots passed so far, slots needed, and consecutive saved tensors
        # that were complete when they were saved.
        self._filled = self._needed = self._consecutive_complete = 0
        self.done = False

    def pack(self, tensor: Tensor) -> _Slot:
        """Return a slot to be saved in place of `tensor`."""
        slot = _Slot(self, tensor)
        if not _is_weight(tensor) and (self._is_sampled or tensor.is_floating_point()):
            self._recent.append((len(self._slots), slot, tensor.detach()))
            if len(self._recent) > _FINGERPRINT_DELAY:
                oldest = self._recent.popleft()
                if self._is_sampled:
                    self._take_fingerprint(*oldest)
        self._slots.append(weakref.ref(slot))
        return slot

    def _take_fingerprint(self, index: int, slot: _Slot, tensor: Tensor) -> None:
        if self._segment.compares and slot.first.unchanged:
            self._fingerprints[index] = fingerprint([tensor])

    def finish(self) -> None:
        """End the first forward, and take the fingerprints that are still due.

        The last saved tensor depends on most of the computation before it, so its fingerprint is
        taken in every forward, not only in sampled ones.
        """
        self.done = True
        recent = list(self._recent)
        self._recent.clear()
        for entry in recent if self._is_sampled else recent[-1:]:
            self._take_fingerprint(*entry)

    def fill(self) -> None:
        """Run the segment again until every slot that the graph still holds is filled.

        Raises:
            RunError: the second forward differs from the first.
        """
        if not self.done:
            raise RunError(
                f"{self._segment.name}: the forward runs a backward through its own graph, so it "
                "cannot run again for its backward: exclude it from recomputation"
            )
        if self._inputs is None:
            raise self._mismatch("nothing")
        inputs, self._inputs = self._inputs, None
        live = (index for index, slot in enumerate(self._slots) if slot() is not None)
        self._needed = max(live) + 1
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for device, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(device, dtype, enabled, self._autocast_caches))
            stack.enter_context(self._segment.buffers.with_contents(self._buffers))
            stack.enter_context(self._segment.attributes.with_contents(self._attributes))
            # Before the hooks, since copies of the input are no part of the layers' forward.
            value = inputs.restore()
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._fill_next, _same))
            try:
                for layer in self._segment.layers:
                    value = self._call(layer, value)
            except _AllSlotsFilled:
                # The rest of the segment computes nothing that the backward needs.
                pass
        self._buffers, self._attributes = {}, ()
        if self._filled < self._needed:
            raise self._mismatch(f"{self._filled} of {self._needed}")
        self._compare()

    def _compare(self) -> None:
        """Compare the recomputed tensors with the fingerprints of the first forward."""
        for index, expected in self._fingerprints.items():
            slot = self._slots[index]()
            if slot is not None and slot.saved is not None and slot.saved.unchanged:
                recomputed = [slot.saved.tensor]
                check_equal(recomputed, expected, self._segment.checks, self._mismatch)
        self._fingerprints = {}

    def _fill_next(self, tensor: Tensor) -> Tensor:
        """Put a tensor that the second forward saves into the next slot, if that still exists."""
        if self._filled == self._needed:
            raise _AllSlotsFilled
        slot = self._slots[self._filled]()
        self._filled += 1
        if slot is not None:
            if slot.form != (tensor.shape, tensor.dtype):
                raise self._mismatch(
                    f"one of shape {tuple(tensor.shape)} and {tensor.dtype} for one of "
                    f"{tuple(slot.form[0])} and {slot.form[1]}"
                )
            slot.saved = SavedVersion(tensor, holds=True)
        # A tensor that requires a gradient is complete when it is saved. Other tensors, such as the
        # noise of rrelu, may be filled by the op after it has saved them, so that op must not be
        # interrupted: the forward ends only if no tensor that this op may have saved is of that
        # kind, or else when the next tensor is saved.
        complete = self._consecutive_complete + 1 if tensor.requires_grad else 0
        self._consecutive_complete = complete
        if self._filled == self._needed and complete >= min(self._filled, _MAX_SAVED_BY_OP):
            raise _AllSlotsFilled
        return tensor.detach()  # the tensor itself would hold its own node

    def _mismatch(self, recomputed: str) -> RunError:
        """Return the error for a second forward that has saved other tensors than the first."""
        return RunError(
            f"{self._segment.name}: recomputed for the backward, its forward differs from the "
            f"first: of the tensors saved then it computed {recomputed}. The second forward gets "
            "the buffers, the plain attributes and the random numbers of torch, random and "
            "numpy.random that the first one had; other state (global variables, lists, a "
            "generator of its own) cannot be restored: exclude the layer from recomputation"
        )


class _AllSlotsFilled(Exception):  # not an error
    """Ends the second forward early, because it has computed all tensors that are needed."""


def _unpack(slot: _Slot) -> Tensor:
    """Return the tensor of a slot, after running the segment again if necessary."""
    where = f"{slot.forward._segment.name}: "
    slot.first.check(where)
    if slot.saved is None:
        slot.forward.fill()
    assert slot.saved is not None  # `fill` has filled every slot that the graph holds, this one too
    slot.saved.check(where)
    return slot.saved.tensor


def _is_weight(tensor: Tensor) -> bool:
    """Return whether a tensor is a leaf that requires a gradient, or a view of one."""
    base = tensor._base if tensor._is_view() else tensor
    return base is not None and base.is_leaf and base.requires_grad


def _same(tensor: Tensor) -> Tensor:
    return tensor
