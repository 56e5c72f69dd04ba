"""A stage on its rank: layers, what they keep between a forward and its backward, and their update."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import SettingError
from penstock.grad.split import PendingWeights, input_grad, weight_grad
from penstock.optim.update import Update
from penstock.runtime.batch import Batch
from penstock.runtime.buffers import Buffers, Contents
from penstock.runtime.eviction import Saved
from penstock.runtime.held import Held
from penstock.runtime.past import Past, Pasts, tensors_of
from penstock.simulate.simulate import recomputes
from penstock.tracing.randomness import drawing, may_draw, seed_generators, stream_seed
from penstock.tracing.slices import has_past
from penstock.transport.payload import Payload

Loss = Callable[[Any, Any], Tensor]

#: Step and micro-batch: several batches may be under way.
_Key = tuple[int, int]


@dataclass(frozen=True)
class StageLayer:
    """A layer's place in the whole chain, its name and its module."""

    index: int
    name: str
    module: nn.Module


@dataclass
class _Kept:
    """What one micro-batch keeps on a stage: its inputs as leaves, and the roots of its graph, its outputs and then its past.

    Without `roots` it will be recomputed, from these inputs and the buffers that its forward saw. `found` has more leaves, where it
    is a slice: what it found of the slices before. `size` is in bytes.
    """

    inputs: Payload
    found: dict[int, Any]
    roots: list[Tensor] | None
    buffers: Contents
    saved: Saved | None = None
    size: int = 0


@dataclass
class Stage:
    """Runs ops of one stage. Knows nothing of schedules, ranks or links.

    `evicted`: micro-batches that `evict` will be asked for. `held`: what counts what is kept, for all stages of a rank.
    """

    index: int
    layers: Sequence[StageLayer]
    device: torch.device
    update: Update
    seed: int
    recompute: str = "never"
    loss: Loss | None = None
    evicted: Collection[int] = ()
    held: Held = field(default_factory=Held)
    _kept: dict[_Key, _Kept] = field(default_factory=dict)
    _pending: dict[_Key, tuple[PendingWeights, int]] = field(default_factory=dict)
    _pasts: Pasts = field(default_factory=Pasts)

    def __post_init__(self) -> None:
        self._drawing = {layer.index for layer in self.layers if may_draw(layer.module)}
        self._handing_on = {layer.index for layer in self.layers if has_past(layer.module)}
        self._buffers = Buffers(list(self.modules()))
        # By training or not, whether the layers change what they are given. Not known before they have run once: the flag
        # `inplace` tells only of some of torch's own, and a layer may hand on its input, or a view of it, to one that does.
        self._changes_input: dict[bool, bool] = {}

    def weight_bytes(self) -> int:
        """Bytes of parameters and buffers."""
        tensors = (t for module in self.modules() for t in (*module._parameters.values(), *module._buffers.values()))
        return sum({id(tensor): tensor.nbytes for tensor in tensors if tensor is not None}.values())

    def modules(self) -> Iterator[nn.Module]:
        """All modules of the stage."""
        for layer in self.layers:
            yield from layer.module.modules()

    def forward(self, batch: Batch, micro_batch: int, arrived: Payload | None) -> Payload | None:
        """F: run the layers on one micro-batch.

        Args:
            batch: the batch; its inputs feed the first stage, its targets the loss of the last.
            micro_batch: which one, or which slice of one.
            arrived: what the stage before sent; None on the first stage.

        Returns:
            What the next stage takes; None on the last.
        """
        source = Payload.of(batch.inputs[micro_batch]) if arrived is None else arrived
        wants = source.wants_grad if arrived is not None and batch.training else (False,) * len(source.tensors)
        leaves = [tensor.detach().to(self.device) for tensor in source.tensors]
        for leaf, wanted in zip(leaves, wants, strict=True):
            leaf.requires_grad_(wanted)
        inputs = source.with_tensors(leaves)
        again = batch.training and recomputes(self.recompute, *batch.place(micro_batch))
        buffers = self._buffers.contents() if again else {}
        after = batch.next_slice(micro_batch)
        past = Past(self._pasts.waiting.pop(micro_batch, {}), keeps=after is not None)
        keeps = batch.training and not again
        saved = Saved(self._weights()) if keeps and micro_batch in self.evicted else None
        with (
            self._looking(batch, micro_batch, inputs, keeps),
            torch.set_grad_enabled(keeps),
            saved.saving() if saved else nullcontext(),
        ):
            output = self._run(batch, micro_batch, inputs, past)
        if self.loss is not None:
            result = None
            roots = [output] if isinstance(output, Tensor) and output.requires_grad else []
        else:
            flags = self._grad_flags(output, inputs) if again else None
            result = Payload.of(output, flags)
            roots = [tensor for tensor in result.tensors if tensor.requires_grad]
        if after is not None:
            left = tensors_of(past.left)
            roots += [tensor for tensor in left if tensor.requires_grad]
            flags = self._grad_flags(left, inputs) if again else tuple(tensor.requires_grad for tensor in left)
            self._pasts.leave(after, past.left, flags)
        if batch.training:
            size = sum(leaf.nbytes for leaf in leaves) if again else self.held.size(self._form(batch, micro_batch))
            self._kept[batch.step, micro_batch] = _Kept(inputs, past.found, None if again else roots, buffers, saved, size)
            self.held.take(size)
        return result

    def backward(self, batch: Batch, micro_batch: int, arrived: Payload | None) -> Payload:
        """B: gradients of weights and inputs. Takes the gradients of what `forward` returned, returns those of what it took."""
        leaves, past, roots, grads, size = self._roots(batch, micro_batch, arrived)
        live = [(root, grad) for root, grad in zip(roots, grads, strict=True) if grad is not None]
        if live:
            torch.autograd.backward([root for root, _ in live], [grad for _, grad in live])
        self._pasts.give_back(micro_batch, [leaf.grad for leaf in past])
        self.held.give(size)
        return Payload.flat([leaf.grad for leaf in leaves])

    def input_grad(self, batch: Batch, micro_batch: int, arrived: Payload | None) -> Payload:
        """I: gradients of the inputs only; W has to follow."""
        leaves, past, roots, grads, size = self._roots(batch, micro_batch, arrived)
        found, pending = input_grad(roots, grads, [*leaves, *past])
        self._pending[batch.step, micro_batch] = pending, size
        self._pasts.give_back(micro_batch, found[len(leaves) :])
        return Payload.flat(found[: len(leaves)])

    def weight_grad(self, batch: Batch, micro_batch: int) -> None:
        """W: gradients of the weights, from what I left."""
        pending, size = self._pending.pop((batch.step, micro_batch))
        weight_grad(pending)
        self.held.give(size)

    def evict(self, batch: Batch, micro_batch: int) -> Payload:
        """E: give what the forward has saved away. What will be recomputed has saved nothing."""
        kept = self._kept[batch.step, micro_batch]
        self.held.give(kept.size)
        saved = kept.saved
        content = torch.empty(0, dtype=torch.uint8) if saved is None else saved.take_out()
        return Payload.of(content, (False,))

    def load(self, batch: Batch, micro_batch: int, arrived: Payload) -> None:
        """L: take it back."""
        kept = self._kept[batch.step, micro_batch]
        self.held.take(kept.size)
        saved = kept.saved
        if saved is not None:
            saved.put_back(arrived.tensors[0])

    def forget(self) -> None:
        """Drop what unfinished batches have kept."""
        self._kept.clear()
        self.held.begin()
        self._pending.clear()
        self._pasts.clear()

    def _weights(self) -> frozenset[int]:
        """Where the memory of parameters and buffers begins."""
        tensors = (t for module in self.modules() for t in (*module._parameters.values(), *module._buffers.values()))
        return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors if tensor is not None)

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

    def _run(self, batch: Batch, micro_batch: int, inputs: Payload, past: Past) -> Any:
        """The layers, and on the last stage the loss or the outputs' delivery. Random numbers depend on what, not on where."""
        copies: list[Tensor] = []
        if self._changes_input.get(batch.training, True):
            # Autograd forbids changing a leaf in place, and nobody else may see such a change.
            copies = [tensor.clone() for tensor in inputs.tensors]
            inputs = inputs.with_tensors(copies)
        value = inputs.value()
        seeded = self._drawing if batch.training else set()
        with drawing(self.device) if seeded else nullcontext():
            for layer in self.layers:
                if layer.index in seeded:
                    seed_generators(self.device, stream_seed(self.seed, batch.step, layer.index, micro_batch))
                if batch.cuts_tokens and layer.index in self._handing_on:
                    value = past.run(layer.index, layer.name, layer.module, value)
                else:
                    value = layer.module(value)
        past.check_unchanged()
        if batch.training not in self._changes_input:
            self._changes_input[batch.training] = any(copy._version for copy in copies)
        return value if self.loss is None else self._deliver(batch, micro_batch, value)

    def _deliver(self, batch: Batch, micro_batch: int, value: Any) -> Any:
        """The micro-batch's share of the batch's mean loss; without targets, its outputs are kept for the caller."""
        if batch.targets is None:
            batch.outputs[micro_batch] = value
            return None
        assert self.loss is not None
        target = pytree.tree_map(
            lambda leaf: leaf.to(self.device) if isinstance(leaf, Tensor) else leaf, batch.targets[micro_batch]
        )
        loss = self.loss(value, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise SettingError(f"the loss must be one number, the mean over the samples it is given; this one is {shape}")
        share = loss.reshape(()) * batch.shares[micro_batch]
        batch.losses.setdefault(micro_batch, share.detach())
        return share

    def _grad_flags(self, output: Any, inputs: Payload) -> tuple[bool, ...]:
        """Which outputs want a gradient when the forward ran without a graph: any float one, if anything here is trained."""
        trained = any(inputs.wants_grad) or bool(self.update.parameters)
        return tuple(
            trained and (leaf.is_floating_point() or leaf.is_complex())
            for leaf in pytree.tree_leaves(output)
            if isinstance(leaf, Tensor)
        )

    def _form(self, batch: Batch, micro_batch: int) -> str:
        """A name that graphs of the same shapes share."""
        return f"{self.index}/{batch.forms[micro_batch]}"

    def _looking(self, batch: Batch, micro_batch: int, inputs: Payload, keeps: bool) -> AbstractContextManager[None]:
        """Let what is held of a new form be counted. What can be evicted is held by something else; it counts as much."""
        if not keeps:
            return nullcontext()
        # The first graph may be of copies of the inputs, see `_run`.
        final = batch.training in self._changes_input
        found = () if batch.targets is None or self.loss is None else pytree.tree_leaves(batch.targets[micro_batch])
        targets = [leaf for leaf in found if isinstance(leaf, Tensor)]
        return self.held.looking(self._form(batch, micro_batch), inputs.tensors, self._weights(), targets, final)

    def _roots(
        self, batch: Batch, micro_batch: int, arrived: Payload | None
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor | None], int]:
        """Leaves that want gradients, among the inputs and in the past that was found; the graph's roots, and their gradients; and how
        many bytes it holds.

        Recomputes the graph if needed.
        """
        kept = self._kept.pop((batch.step, micro_batch))
        leaves = [leaf for leaf in kept.inputs.tensors if leaf.requires_grad]
        past_leaves = [leaf for leaf in tensors_of(kept.found) if leaf.requires_grad]
        grads: list[Tensor | None] = [] if arrived is None else [_to(leaf, self.device) for leaf in arrived.leaves]
        after = batch.next_slice(micro_batch)
        grads_of_past = self._pasts.take_back(after)
        if kept.roots is not None:
            roots = kept.roots
        else:
            past = Past(kept.found, keeps=after is not None)
            looking = self._looking(batch, micro_batch, kept.inputs, keeps=True)
            with looking, torch.enable_grad(), self._buffers.as_they_were(kept.buffers):
                output = self._run(batch, micro_batch, kept.inputs, past)
            full = self.held.size(self._form(batch, micro_batch))
            self.held.take(full - kept.size)
            kept.size = full
            roots = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            if self.loss is None:
                flags = self._grad_flags(output, kept.inputs)
                roots = [root for root, flag in zip(roots, flags, strict=True) if flag]
            left = tensors_of(past.left)
            roots += [root for root, flag in zip(left, self._grad_flags(left, kept.inputs), strict=True) if flag]
        if self.loss is not None:
            grads = [torch.ones_like(root) for root in roots[: len(roots) - len(grads_of_past)]]
        pairs = [(root, grad) for root, grad in zip(roots, [*grads, *grads_of_past], strict=True) if root.requires_grad]
        return leaves, past_leaves, [root for root, _ in pairs], [grad for _, grad in pairs], kept.size


def _to(leaf: Tensor | None, device: torch.device) -> Tensor | None:
    return None if leaf is None else leaf.to(device)
