"""Layers that run again before their backward, instead of keeping what their forward has saved: segment by segment.

    forward    | kept | segment a                     | kept | segment b                     |
    keeps        all    its input, and the buffers it   all
                        saw before it changed them
    backward     ...    once the first saved tensor     ...    runs again first: what comes back is held for this
                        of it is asked for, it runs            segment alone, and goes as the graph lets go of it
                        again, and fills all others

Source: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost. torch.utils.checkpoint(use_reentrant=False) does the same, and
is where the second forward's stop at the last tensor that is still wanted comes from. It runs a segment again for every walk over the
graph, though: a backward in two parts, which walks it once for the inputs and once for each group of weights, would pay as many
forwards. Here what came back stays until the graph lets go of it, so it runs once whatever walks there are. Buffers are not changed
twice, layers may change what they are given in place, and what was saved and is then changed in place is refused as torch refuses
it where nothing is recomputed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from penstock.errors import RunError
from penstock.grad.buffers import Buffers, Contents
from penstock.plan.segments import segments
from penstock.values.memory import copy_of, overlapping
from penstock.values.structure import Structure, flatten, unflatten


class Layer(Protocol):
    """A layer: its place in the whole chain, and its module, whose buffers a second forward leaves alone."""

    @property
    def index(self) -> int:
        """Its place in the chain."""

    @property
    def module(self) -> nn.Module:
        """What has the buffers."""


L = TypeVar("L", bound=Layer)


def run(layers: Sequence[L], value: Any, recomputed: Collection[int], call: Callable[[L, Any], Any], *,
        starts: Collection[int] = ()) -> Any:  # fmt: skip
    """What the layers make of `value`, those in `recomputed` so that their backward runs them again.

    For one forward; `Recomputing` is the same for many, and finds out once what these layers do.

    Args:
        layers: in order.
        value: what the first takes: a tensor, or tensors and others in nested values.
        recomputed: indices of layers; of consecutive ones nothing is kept but what the first takes.
        call: runs one layer on a value; once now, and once in the backward, on the thread that runs that. It sees to it that both
            draw the same random numbers.
        starts: layers among `recomputed` that begin a segment of their own.

    Raises:
        RunError: in the backward, where a layer's second forward is not like its first.
    """
    return Recomputing(layers, recomputed, starts).run(value, call)


class Recomputing(Generic[L]):
    """Layers of which some run again before their backward.

    It keeps nothing of a forward, only what it has found out about the layers: which of them change what they are given, so that a copy
    has to be kept (until that is known, one is), and which of the large buffers are ever changed.
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
        forward.done = True
        if training not in self._changes_input or shared:
            changed = [
                leaf._version != before for leaf, before in zip(given, versions, strict=True)
            ]
            self._changes_input.setdefault(training, any(changed))
            if any(changed[one] or changed[other] for one, other in shared):
                raise RunError(f"{self.name}: two of the tensors that it is given share memory, and one of them is changed in place, which "
                               "cannot be done twice: pass a clone() of one of the two, or leave it out of what is recomputed")  # fmt: skip
        return value

    @property
    def name(self) -> str:
        """Where it stands, for messages."""
        first, last = self.layers[0].index, self.layers[-1].index
        return f"layer {first}" if first == last else f"layers {first} to {last}"


class _Keep(torch.autograd.Function):
    """Keeps tensors as autograd keeps them, so that whoever has put hooks around the whole (to count, or to hand away) has these too.

    Nothing leads to it: it has no backward.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty_like(anchor)


class _Input:
    """What a segment was given, to be given again: one tensor that stands in several places is one again."""

    def __init__(self, leaves: Sequence[Any], form: Structure, changes: bool) -> None:
        self._form, self._changes = form, changes
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._wants_grad = [tensor.requires_grad for tensor in tensors]
        self._leaves = [_PLACE if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        kept = [tensor.detach() for tensor in tensors]
        anchor = torch.empty(0, requires_grad=True)
        saved = _Keep.apply(anchor, *([copy_of(each) for each in kept] if changes else kept))  # type: ignore[no-untyped-call]  # torch's
        self._node: Any = saved.grad_fn
        self.devices = sorted({"cpu", *(tensor.device.type for tensor in tensors)})

    def again(self) -> Any:
        """The value, its tensors as leaves, or where the layers change them in place, as copies of leaves."""
        tensors = [
            kept.detach().requires_grad_(wanted)
            for kept, wanted in zip(self._node.saved_tensors, self._wants_grad, strict=True)
        ]
        if self._changes:
            tensors = [copy_of(tensor) for tensor in tensors]
        kept = iter(tensors)
        leaves = [next(kept) if leaf is _PLACE else leaf for leaf in self._leaves]
        return unflatten(self._form, leaves)


#: Stands for a tensor among the leaves.
_PLACE = object()


class _Slot:
    """One saved tensor's place in the graph: empty until the layers have run again. With the graph's node it goes."""

    __slots__ = ("__weakref__", "form", "forward", "tensor", "version")

    def __init__(self, forward: _Forward, tensor: Tensor) -> None:
        self.forward, self.form = forward, (tensor.shape, tensor.dtype)
        self.tensor: Tensor | None = None
        self.version = 0


class _Forward:
    """One forward of a segment: what it needs to run again, and the slots that wait for it."""

    def __init__(
        self, segment: _Segment[Any], call: Callable[[Any, Any], Any], given: _Input
    ) -> None:
        self._segment, self._call = segment, call
        self._given: _Input | None = given
        self._contents: Contents = segment.buffers.contents()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in given.devices
        ]
        self._caches = torch.is_autocast_cache_enabled()
        self._slots: list[weakref.ref[_Slot]] = []
        self._filled = self._wanted = 0
        self.done = False

    def pack(self, tensor: Tensor) -> _Slot:
        """In the place of a tensor that would be saved."""
        slot = _Slot(self, tensor)
        self._slots.append(weakref.ref(slot))
        return slot

    def fill(self) -> None:
        """Run again until every slot that anybody still holds is full.

        Raises:
            RunError: the layers did something else this time.
        """
        if not self.done:
            raise RunError(f"{self._segment.name}: its forward walks back over its own graph, and cannot run again for its backward: "
                           "leave it out of what is recomputed")  # fmt: skip
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
            value = (
                given.again()
            )  # before the hooks: putting it together is no part of the layers' forward
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._take, _same))
            try:
                for layer in self._segment.layers:
                    value = self._call(layer, value)
            except _Enough:
                pass
        self._contents = {}
        if self._filled < self._wanted:
            raise self._unlike(f"{self._filled} of {self._wanted}")

    def _take(self, tensor: Tensor) -> Tensor:
        """Fill the next slot, if anybody still holds it."""
        slot = self._slots[self._filled]()
        self._filled += 1
        if slot is not None:
            if slot.form != (tensor.shape, tensor.dtype):
                raise self._unlike(f"one of shape {tuple(tensor.shape)} and {tensor.dtype} for one of {tuple(slot.form[0])} and "
                                   f"{slot.form[1]}")  # fmt: skip
            slot.tensor, slot.version = tensor.detach(), tensor._version
        if self._filled == self._wanted:
            raise _Enough
        return tensor.detach()  # the tensor itself would hold its own node

    def _unlike(self, found: str) -> RunError:
        return RunError(f"{self._segment.name}: run again for the backward, its forward is not like the first: of the tensors that were "
                        f"saved then it made {found}. Random numbers that the seed does not set, or state that is in no buffer, cannot "
                        "be had twice: leave it out of what is recomputed")  # fmt: skip


class _Enough(Exception):  # nothing is wrong: all slots are full
    """Ends a second forward."""


def _unpack(slot: _Slot) -> Tensor:
    """What was to be saved, made again if need be."""
    if slot.tensor is None:
        slot.forward.fill()
    if slot.tensor is None:
        raise slot.forward._unlike("all but one")
    if slot.tensor._version != slot.version:
        raise RunError(f"{slot.forward._segment.name}: a tensor of shape {tuple(slot.form[0])} that the backward needs was changed in "
                       f"place after it was saved: it is at version {slot.tensor._version}, not {slot.version}")  # fmt: skip
    return slot.tensor


def _same(tensor: Tensor) -> Tensor:
    return tensor
