"""Layers that run again before their backward, instead of keeping what their forward has saved:
segment by segment.

    forward    | kept | segment a                     | kept | segment b                     |
    keeps        all    its input, and the buffers it   all
                        saw before it changed them
    backward     ...    once the first saved tensor     ...    runs again first: what comes back is
                 held for this
                        of it is asked for, it runs            segment alone, and goes as the graph
                                                               lets go of it
                        again, and fills all others

Source: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost.
torch.utils.checkpoint(use_reentrant=False) does the same, and is where the second forward's stop at
the last tensor that is still wanted comes from. It runs a segment again for every walk over the
graph, though: a backward in two parts, which walks it once for the inputs and once for each group
of weights, would pay as many forwards. Here what came back stays until the graph lets go of it, so
it runs once whatever walks there are. Buffers are not changed twice, layers may change what they
are given in place, and what was saved and is then changed in place is refused as torch refuses it
where nothing is recomputed.
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
from penstock.grad.fingerprint import Fingerprint, difference, fingerprint
from penstock.grad.saved import SavedVersion
from penstock.plan.segments import segments
from penstock.values.memory import copy_of, overlapping
from penstock.values.structure import Structure, flatten, unflatten


class Layer(Protocol):
    """A layer: its place in the whole chain, and its module, whose buffers a second forward leaves
    alone.
    """

    @property
    def index(self) -> int:
        """Its place in the chain."""

    @property
    def module(self) -> nn.Module:
        """What has the buffers."""


#: Saved tensors that a first forward holds until their fingerprints are taken: as many as one op
#: saves, and more.
_RECENT = 8

#: Saved tensors that one op may have, where it fills one of them only afterwards.
_OF_ONE_OP = 3

L = TypeVar("L", bound=Layer)


def run(
    layers: Sequence[L],
    value: Any,
    recomputed: Collection[int],
    call: Callable[[L, Any], Any],
    *,
    starts: Collection[int] = (),
) -> Any:
    """What the layers make of `value`, those in `recomputed` so that their backward runs them
    again.

    For one forward; `Recomputing` is the same for many, and finds out once what these layers do.

    Args:
        layers: in order.
        value: what the first takes: a tensor, or tensors and others in nested values.
        recomputed: indices of layers; of consecutive ones nothing is kept but what the first takes.
        call: runs one layer on a value; once now, and once in the backward, on the thread that runs
        that. It sees to it that both
            draw the same random numbers.
        starts: layers among `recomputed` that begin a segment of their own.

    Raises:
        RunError: in the backward, where a layer's second forward is not like its first.
    """
    return Recomputing(layers, recomputed, starts).run(value, call)


class Recomputing(Generic[L]):
    """Layers of which some run again before their backward.

    It keeps nothing of a forward, only what it has found out about the layers: which of them change
    what they are given, so that a copy has to be kept (until that is known, one is), and which of
    the large buffers are ever changed.
    """

    def __init__(
        self, layers: Sequence[L], recomputed: Collection[int], starts: Collection[int] = ()
    ) -> None:
        own = {layer.index: place for place, layer in enumerate(layers)}
        places = sorted(own[index] for index in recomputed if index in own)
        cut = {own[index] for index in starts if index in own}
        self._layers = list(layers)
        self._parts: list[L | _Segment[L]] = []
        at = 0
        for first, end in segments(places, cut):
            self._parts += self._layers[at:first]
            self._parts.append(_Segment(self._layers[first:end]))
            at = end
        self._parts += self._layers[at:]

    def allow_other_weights(self) -> None:
        """Do not compare second forwards with first ones: they may read other weights."""
        for part in self._parts:
            if isinstance(part, _Segment):
                part.compares = False

    def run(self, value: Any, call: Callable[[L, Any], Any]) -> Any:
        """As the function `run`."""
        again = torch.is_grad_enabled()
        for part in self._parts if again else self._layers:
            value = part.forward(value, call) if isinstance(part, _Segment) else call(part, value)
        return value


class _Segment(Generic[L]):
    """Consecutive layers that run again together."""

    def __init__(self, layers: Sequence[L]) -> None:
        self.layers = layers
        self.buffers = Buffers([module for layer in layers for module in layer.module.modules()])
        self.attributes = Attributes(layer.module for layer in layers)
        self._count = 0
        #: Whether second forwards are compared with first ones.
        self.compares = True
        # By training or not: layers may do other things in evaluation.
        self._changes_input: dict[bool, bool] = {}

    def forward(self, value: Any, call: Callable[[L, Any], Any]) -> Any:
        """The layers on `value`, of which only that is kept."""
        training = self.layers[0].module.training
        leaves, form = flatten(value)
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        changes = self._changes_input.get(training, True)
        versions = [leaf._version for leaf in given]
        shared = overlapping(given)
        forward = _Forward(self, call, _Input(leaves, form, changes))
        with torch.autograd.graph.saved_tensors_hooks(forward.pack, _unpack):
            for layer in self.layers:
                value = call(layer, value)
        forward.finish()
        if training not in self._changes_input or shared:
            changed = [
                leaf._version != before for leaf, before in zip(given, versions, strict=True)
            ]
            self._changes_input.setdefault(training, any(changed))
            if any(changed[one] or changed[other] for one, other in shared):
                raise RunError(
                    f"{self.name}: two of the tensors that it is given share memory, and one of them is changed in place, which "
                    "cannot be done twice: pass a clone() of one of the two, or leave it out of what is recomputed"
                )
        return value

    def is_sampled(self) -> bool:
        """Whether all saved tensors of the next forward are compared: those of forwards 1, 2, 4, 8
        and so on are.
        """
        self._count += 1
        return self._count & (self._count - 1) == 0

    @property
    def name(self) -> str:
        """Where it stands, for messages."""
        first, last = self.layers[0].index, self.layers[-1].index
        return f"layer {first}" if first == last else f"layers {first} to {last}"


class _Keep(torch.autograd.Function):
    """Keeps tensors as autograd keeps them, so that whoever has put hooks around the whole (to
    count, or to hand away) has these too.

    Nothing leads to it: it has no backward.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty_like(anchor)


class _Input:
    """What a segment was given, to be given again: one tensor that stands in several places is one
    again.
    """

    def __init__(self, leaves: Sequence[Any], form: Structure, changes: bool) -> None:
        self._form, self._changes = form, changes
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._wants_grad = [tensor.requires_grad for tensor in tensors]
        self._leaves = [_PLACE if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        kept = [tensor.detach() for tensor in tensors]
        anchor = torch.empty(0, requires_grad=True)
        # The output is held, not its node: torch 2.11 frees what a node has saved with its last output.
        self._output: Tensor = _Keep.apply(  # type: ignore[no-untyped-call]  # torch's
            anchor, *([copy_of(each) for each in kept] if changes else kept)
        )
        self.devices = sorted({"cpu", *(tensor.device.type for tensor in tensors)})

    def again(self) -> Any:
        """The value, its tensors as leaves, or where the layers change them in place, as copies of
        leaves.
        """
        node: Any = self._output.grad_fn
        tensors = [
            kept.detach().requires_grad_(wanted)
            for kept, wanted in zip(node.saved_tensors, self._wants_grad, strict=True)
        ]
        if self._changes:
            tensors = [copy_of(tensor) for tensor in tensors]
        kept = iter(tensors)
        leaves = [next(kept) if leaf is _PLACE else leaf for leaf in self._leaves]
        return unflatten(self._form, leaves)


#: Stands for a tensor among the leaves.
_PLACE = object()


class _Slot:
    """One saved tensor's place in the graph: empty until the layers have run again. With the
    graph's node it goes.
    """

    __slots__ = ("__weakref__", "first", "form", "forward", "saved")

    def __init__(self, forward: _Forward, tensor: Tensor) -> None:
        self.forward, self.form = forward, (tensor.shape, tensor.dtype)
        self.first = SavedVersion(tensor, holds=False)
        self.saved: SavedVersion | None = None


class _Forward:
    """One forward of a segment: what it needs to run again, and the slots that wait for it."""

    def __init__(
        self, segment: _Segment[Any], call: Callable[[Any, Any], Any], given: _Input
    ) -> None:
        self._segment, self._call = segment, call
        self._given: _Input | None = given
        self._contents: Contents = segment.buffers.contents()
        self._attributes: Values = segment.attributes.contents()
        self._fingerprints: dict[int, Fingerprint] = {}
        # Saved tensors whose fingerprints are still to be taken: some ops fill what they save after
        # it was saved.
        self._recent: deque[tuple[int, _Slot, Tensor]] = deque()
        self._sampled = segment.is_sampled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in given.devices
        ]
        self._caches = torch.is_autocast_cache_enabled()
        self._slots: list[weakref.ref[_Slot]] = []
        self._filled = self._wanted = self._since_filled = 0
        self.done = False

    def pack(self, tensor: Tensor) -> _Slot:
        """In the place of a tensor that would be saved."""
        slot = _Slot(self, tensor)
        if not _is_weight(tensor) and (self._sampled or tensor.is_floating_point()):
            self._recent.append((len(self._slots), slot, tensor.detach()))
            if len(self._recent) > _RECENT:
                oldest = self._recent.popleft()
                if self._sampled:
                    self._take_fingerprint(*oldest)
        self._slots.append(weakref.ref(slot))
        return slot

    def _take_fingerprint(self, place: int, slot: _Slot, tensor: Tensor) -> None:
        if self._segment.compares and slot.first.unchanged:
            self._fingerprints[place] = fingerprint([tensor])

    def finish(self) -> None:
        """The forward is over. What it has saved last depends on most of what was before: that is
        always compared.
        """
        self.done = True
        recent = list(self._recent)
        self._recent.clear()
        for entry in recent if self._sampled else recent[-1:]:
            self._take_fingerprint(*entry)

    def fill(self) -> None:
        """Run again until every slot that anybody still holds is full.

        Raises:
            RunError: the layers did something else this time.
        """
        if not self.done:
            raise RunError(
                f"{self._segment.name}: its forward walks back over its own graph, and cannot run again for its backward: "
                "leave it out of what is recomputed"
            )
        if self._given is None:
            raise self._unlike("nothing")
        given, self._given = self._given, None
        self._wanted = (
            max(place for place, slot in enumerate(self._slots) if slot() is not None) + 1
        )
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for kind, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled, self._caches))
            stack.enter_context(self._segment.buffers.as_they_were(self._contents))
            stack.enter_context(self._segment.attributes.as_they_were(self._attributes))
            value = (
                given.again()
            )  # before the hooks: putting it together is no part of the layers' forward
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._take, _same))
            try:
                for layer in self._segment.layers:
                    value = self._call(layer, value)
            except _Enough:
                pass
        self._contents, self._attributes = {}, ()
        if self._filled < self._wanted:
            raise self._unlike(f"{self._filled} of {self._wanted}")
        self._compare()

    def _compare(self) -> None:
        """Hold what was made again against the fingerprints of the first forward."""
        for place, expected in self._fingerprints.items():
            slot = self._slots[place]()
            if slot is not None and slot.saved is not None and slot.saved.unchanged:
                found = difference([slot.saved.tensor], expected)
                if found is not None:
                    raise self._unlike(found)
        self._fingerprints = {}

    def _take(self, tensor: Tensor) -> Tensor:
        """Fill the next slot, if anybody still holds it."""
        if self._filled == self._wanted:
            raise _Enough
        slot = self._slots[self._filled]()
        self._filled += 1
        if slot is not None:
            if slot.form != (tensor.shape, tensor.dtype):
                raise self._unlike(
                    f"one of shape {tuple(tensor.shape)} and {tensor.dtype} for one of {tuple(slot.form[0])} and "
                    f"{slot.form[1]}"
                )
            slot.saved = SavedVersion(tensor, holds=True)
        # What wants a gradient is complete when it is saved. Other tensors, such as the noise of
        # rrelu, may be filled by the op that saves
        # them, which then has to run to its end: to the next that is saved.
        self._since_filled = self._since_filled + 1 if tensor.requires_grad else 0
        if self._filled == self._wanted and self._since_filled >= min(self._filled, _OF_ONE_OP):
            raise _Enough
        return tensor.detach()  # the tensor itself would hold its own node

    def _unlike(self, found: str) -> RunError:
        return RunError(
            f"{self._segment.name}: run again for the backward, its forward is not like the first: of the tensors that were "
            f"saved then it made {found}. A second forward has the buffers, the plain attributes and the random numbers of "
            "torch, random and numpy.random that the first had; other state (global variables, lists, a generator of its "
            "own) cannot be had twice: leave it out of what is recomputed"
        )


class _Enough(Exception):  # nothing is wrong: all slots are full
    """Ends a second forward."""


def _unpack(slot: _Slot) -> Tensor:
    """What was to be saved, made again if need be."""
    where = f"{slot.forward._segment.name}: "
    slot.first.check(where)
    if slot.saved is None:
        slot.forward.fill()
    if slot.saved is None:
        raise slot.forward._unlike("all but one")
    slot.saved.check(where)
    return slot.saved.tensor


def _is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a leaf that wants a gradient, or a view of one: weights, which no forward
    makes.
    """
    base = tensor._base if tensor._is_view() else tensor
    return base is not None and base.is_leaf and base.requires_grad


def _same(tensor: Tensor) -> Tensor:
    return tensor
