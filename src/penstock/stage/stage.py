"""A stage on its rank: its layers, what they save from a forward to its backward, and their update."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.batches.batch import Batch
from penstock.batches.device_batch import INPUTS, device_batch, moved
from penstock.grad.full_backward import whole_grad
from penstock.grad.split import PendingWeights, input_grad, weight_grad
from penstock.losses.stage_loss import Loss, LossOptions, StageLoss, Starts, total
from penstock.modules.recomputing import checkpointing, recomputing
from penstock.modules.side_loss import collect_side_losses, collecting_side_losses
from penstock.optim.update import Update
from penstock.simulate.simulate import recomputes
from penstock.stage.activation_meter import ActivationMeter
from penstock.stage.boundary_checks import InPlaceChanges, check_devices, check_same_requires_grad
from penstock.stage.eviction import Saved
from penstock.stage.foreign_parameters import Reach
from penstock.stage.saved_forward import FastForward, InputGrads, SavedForward
from penstock.stage.second_forward import SecondForwards
from penstock.stage.slice_state import SliceState, SliceStates, tensors_of
from penstock.stage.stage_layers import StageLayer, StageLayers
from penstock.stage.stage_random import Place
from penstock.transport.payload import Payload

__all__ = ["Loss", "Stage", "StageLayer"]

#: Step and micro-batch: several batches may be under way.
_Key = tuple[int, int]

#: Under this key side losses of the stages before travel beside what they made.
_SIDE = "penstock.side_loss"

#: Forms of micro-batches that are remembered.
_MOST_FORMS = 4096

_NO_GRADS = Payload("*", (), ())
_NO_SLICE_STATE = SliceState(keeps=False)
_NO_CONTEXT = nullcontext()


@dataclass
class Stage:
    """Runs the ops of one stage, whatever the schedule, the rank and the links.

    Attributes:
        evicted: micro-batches that `evict` will be called for.
        held: the activation meter of the rank, shared by its stages.
        entry, exit, recomputed, segment_starts, compile, offload: see `StageLayers`.
        autocast: dtype of mixed precision.
        loss_scale: factor of the gradients; the reported loss is without it.
        reach: checks that gradients lead to parameters of this stage only.
    """

    index: int
    layers: Sequence[StageLayer]
    device: torch.device
    update: Update
    seed: int
    recompute: str = "never"
    loss: Loss | None = None
    evicted: Collection[int] = ()
    held: ActivationMeter = field(default_factory=ActivationMeter)
    entry: nn.Module | None = None
    exit: Callable[[Any], Any] | None = None
    autocast: torch.dtype | None = None
    loss_scale: float = 1.0
    recomputed: frozenset[int] = frozenset()
    segment_starts: frozenset[int] = frozenset()
    compile: Mapping[str, Any] | None = None
    offload: bool = False
    reach: Reach | None = None
    loss_options: LossOptions = field(default_factory=LossOptions)
    _saved: dict[_Key, SavedForward | FastForward] = field(default_factory=dict)
    _pending: dict[_Key, tuple[PendingWeights, int]] = field(default_factory=dict)
    _pasts: SliceStates = field(default_factory=SliceStates)

    def __post_init__(self) -> None:
        self._running = StageLayers(
            self.layers,
            self.device,
            self.seed,
            self.entry,
            self.exit,
            self.recomputed,
            self.segment_starts,
            self.compile,
            self.offload,
        )
        self._in_place = InPlaceChanges()
        names = [layer.name for layer in self.layers]
        where = f"layers {names[0]} to {names[-1]}" if len(names) > 1 else f"layer {names[0]}"
        self._again = SecondForwards(
            [layer.module for layer in self.layers],
            [] if self.entry is None else [self.entry],
            f"stage {self.index}, {where}",
        )
        # Forms of micro-batches that take the fast path, and the bytes that each saves.
        self._fast_path_bytes: dict[str, int] = {}
        # Forms of micro-batches whose input gradients have the memory layout of the inputs.
        self._same_layouts: set[str] = set()
        self._compares = True
        self._on_host = self.device.type == "cpu"
        self._starts = Starts()
        self._losses: StageLoss | None = None
        if self.loss is not None:
            modules = [layer.module for layer in self.layers]
            self._losses = StageLoss(self.loss, self.device, self.loss_options, self.seed, modules)

    def tensors(self) -> Iterator[Tensor]:
        """Yield all parameters and buffers; one that two modules share is yielded twice."""
        for module in self.modules():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    yield tensor

    def modules(self) -> Iterator[nn.Module]:
        """All modules of the stage."""
        return self._running.modules()

    def evaluation_mode(self) -> AbstractContextManager[None]:
        """Run layers in evaluation mode; restore the mode of every module afterwards."""
        return self._running.evaluation_mode()

    def allow_weight_changes(self) -> None:
        """Do not compare recomputed forwards with the first ones.

        The weight rules of asynchronous schedules may let a backward read newer weights than its
        forward has read. Recomputed values then differ, as in their papers.
        """
        self._compares = False
        self._running.allow_weight_changes()

    def renew(self) -> None:
        """Forget what was observed of the layers, because a traced model has been traced again."""
        self._running.renew()
        if not self._compares:
            self._running.allow_weight_changes()
        self._in_place = InPlaceChanges()
        self._fast_path_bytes.clear()
        self._same_layouts.clear()

    def forward(self, batch: Batch, micro_batch: int, arrived: Payload | None) -> Payload | None:
        """F: run the layers on one micro-batch.

        Args:
            batch: the batch; its inputs feed the first stage, its targets the loss of the last.
            micro_batch: which one, or which slice of one.
            arrived: what the stage before sent; None on the first stage.

        Returns:
            What the next stage takes; None on the last.
        """
        size = self._fast_path_bytes.get(batch.forms[micro_batch])
        if size is not None and (arrived is None or arrived.structure == ""):
            return self._fast_forward(batch, micro_batch, arrived, size)
        inputs = self._leaves(batch, micro_batch, arrived)
        recomputed = batch.training and recomputes(self.recompute, *batch.place(micro_batch))
        first = self._again.first() if recomputed else None
        next_slice = batch.next_slice(micro_batch)
        past = SliceState(self._pasts.waiting.pop(micro_batch, {}), keeps=next_slice is not None)
        keeps = batch.training and not recomputed
        saved = Saved(self._running.weights()) if keeps and micro_batch in self.evicted else None
        # With a graph also where it is run again: which outputs want a gradient is known from that
        # alone, and kernels are chosen by it.
        with (
            self._measuring(batch, micro_batch, inputs, keeps),
            torch.set_grad_enabled(batch.training),
            checkpointing() if recomputed else nullcontext(),
            saved.saving() if saved else nullcontext(),
        ):
            result, loss_roots, loss = self._run(batch, micro_batch, inputs, past)
        outputs = [] if result is None else result.tensors
        carried = [] if next_slice is None else tensors_of(past.outgoing)
        if first is not None and self._compares:
            first.note([*outputs, *loss_roots, *carried])
        flags = tuple([tensor.requires_grad for tensor in (*outputs, *carried)])
        roots = [tensor for tensor in outputs if tensor.requires_grad] + loss_roots
        roots += [tensor for tensor in carried if tensor.requires_grad]
        if next_slice is not None:
            self._pasts.store(next_slice, past.outgoing, flags[len(outputs) :])
        if recomputed and result is not None:
            result = result.with_tensors([tensor.detach() for tensor in outputs])
        if batch.training:
            size = inputs.nbytes if recomputed else self.held.size(self._form(batch, micro_batch))
            self._saved[batch.step, micro_batch] = SavedForward(
                inputs,
                past.incoming,
                None if recomputed else roots,
                len(loss_roots),
                first,
                saved,
                size,
                flags,
                None if recomputed else loss,
                self._input_grads(inputs),
            )
            self.held.take(size)
            if not (recomputed or saved or loss_roots[1:] or batch.outputs):
                self._enable_fast_path(batch, micro_batch, inputs, result, size=size)
        return result

    def _leaves(self, batch: Batch, micro_batch: int, arrived: Payload | None) -> Payload:
        """The stage's inputs as leaves of a graph of their own."""
        source = Payload.of(batch.inputs[micro_batch]) if arrived is None else arrived
        if self._on_host or arrived is not None:
            leaves = [tensor.detach().to(self.device) for tensor in source.tensors]
        else:
            leaves = device_batch(batch, self.device).views(micro_batch, source.tensors)
        if arrived is not None and batch.training:
            for leaf, requires_grad in zip(leaves, source.wants_grad, strict=True):
                leaf.requires_grad_(requires_grad)
        return source.with_tensors(leaves)

    def _input_grads(self, inputs: Payload) -> InputGrads | None:
        leaves = [leaf for leaf in inputs.tensors if leaf.requires_grad]
        return InputGrads.of(leaves) if leaves else None

    def _enable_fast_path(
        self, batch: Batch, micro_batch: int, inputs: Payload, result: Payload | None, *, size: int
    ) -> None:
        """Let the next micro-batches of this form take the fast path, if it is sufficient."""
        one_out = self.loss is not None if result is None else result.structure == ""
        settled = self._in_place.excluded(training=True) and self.held.settled(
            self._form(batch, micro_batch)
        )
        form = batch.forms[micro_batch]
        # The fast path takes the gradient of its input from `leaf.grad`, see `InputGrads`.
        alike = form in self._same_layouts or not any(inputs.wants_grad)
        if (
            settled
            and alike
            and one_out
            and inputs.structure == ""
            and not batch.cuts_tokens
            and not batch.keeps_outputs
        ):
            self._fast_path_bytes[form] = size

    def _fast_forward(
        self, batch: Batch, micro_batch: int, arrived: Payload | None, size: int
    ) -> Payload | None:
        """Run F on the fast path: one input tensor, one output tensor.

        The form of the micro-batch, of which the mode is a part, tells that this is sufficient.
        """
        leaf = None
        value = batch.inputs[micro_batch] if arrived is None else arrived.leaves[0].detach()
        if not self._on_host and arrived is None:
            value = device_batch(batch, self.device).view(INPUTS, micro_batch, value)
        elif not self._on_host:
            value = value.to(self.device)
        if arrived is not None and arrived.wants_grad[0]:
            leaf = value.requires_grad_(True)
        stage_input = value
        sides: list[Tensor] = []
        outer = collect_side_losses(sides)
        try:
            with (
                _NO_CONTEXT if torch.is_grad_enabled() else torch.enable_grad(),
                self._autocast_context(),
            ):
                value = self._running.run(batch, micro_batch, value, _NO_SLICE_STATE)
                if self._losses is not None:
                    output, value = value, self._losses.of(batch, micro_batch, value, sides)
                    if self.reach is not None and self.reach.step != batch.step:
                        self.reach.check_loss(batch, value, output)
        finally:
            collect_side_losses(outer)
        root = value if value.requires_grad else None
        self.held.take(size)
        if sides:
            return self._leave_fast_path(
                batch, micro_batch, (stage_input, leaf, root, value), sides, size
            )
        self._saved[batch.step, micro_batch] = FastForward(leaf, root, size)
        return None if self.loss is not None else Payload("", (value,), (root is not None,))

    def _leave_fast_path(
        self,
        batch: Batch,
        micro_batch: int,
        graph: tuple[Tensor, Tensor | None, Tensor | None, Tensor],
        sides: list[Tensor],
        size: int,
    ) -> Payload | None:
        """Save a forward of the fast path in which a layer had a side loss for the first time."""
        del self._fast_path_bytes[batch.forms[micro_batch]]
        stage_input, leaf, root, value = graph
        side_roots = [side for side in sides if side.requires_grad]
        roots = [] if root is None else [root]
        result = Payload.of({_SIDE: total(sides), "value": value}) if self.loss is None else None
        inputs = Payload("", (stage_input,), (leaf is not None,))
        count = len(side_roots) + (len(roots) if self.loss is not None else 0)
        self._saved[batch.step, micro_batch] = SavedForward(
            inputs, {}, [*roots, *side_roots], count, None, None, size, (), root
        )
        return result

    def backward(self, batch: Batch, micro_batch: int, arrived: Payload | None) -> Payload:
        """Run B: gradients of weights and inputs.

        Args:
            batch: the batch.
            micro_batch: number of the micro-batch or slice.
            arrived: gradients of what `forward` returned; None on the last stage.

        Returns:
            Gradients of what `forward` took.
        """
        saved = self._saved[batch.step, micro_batch]
        if type(saved) is FastForward:
            del self._saved[batch.step, micro_batch]
            return self._fast_backward(batch, micro_batch, arrived, saved)
        leaves, past, roots, grads, size = self._roots(batch, micro_batch, arrived)
        live = [(root, grad) for root, grad in zip(roots, grads, strict=True) if grad is not None]
        if live:
            with recomputing(), self._seeded_backward(batch, micro_batch):
                torch.autograd.backward([root for root, _ in live], [grad for _, grad in live])
        self._pasts.store_grads(micro_batch, [leaf.grad for leaf in past])
        self.held.give(size)
        assert isinstance(saved, SavedForward)
        if saved.input_grads is None:
            return Payload.flat([leaf.grad for leaf in leaves])
        input_grads, alike = saved.input_grads.take(leaves)
        if alike:
            if len(self._same_layouts) >= _MOST_FORMS:
                self._same_layouts.clear()
            self._same_layouts.add(batch.forms[micro_batch])
        return Payload.flat(input_grads)

    def _fast_backward(
        self, batch: Batch, micro_batch: int, arrived: Payload | None, saved: FastForward
    ) -> Payload:
        root, leaf = saved.root, saved.leaf
        if root is not None:
            grad = (
                self._first_grad(batch, micro_batch, root)
                if arrived is None
                else moved(arrived.leaves[0], self.device)
            )
            if grad is not None and self._running.draws.watches_backward:
                with self._seeded_backward(batch, micro_batch):
                    whole_grad(root, grad)
            elif grad is not None:
                whole_grad(root, grad)
        self.held.give(saved.size)
        if leaf is None:
            return _NO_GRADS
        return Payload.flat([leaf.grad])

    def input_grad(self, batch: Batch, micro_batch: int, arrived: Payload | None) -> Payload:
        """Run I: gradients of the inputs only; W has to follow."""
        leaves, past, roots, grads, size = self._roots(batch, micro_batch, arrived)
        with recomputing(), self._seeded_backward(batch, micro_batch):
            grads_of_inputs, pending = input_grad(roots, grads, [*leaves, *past])
        self._pending[batch.step, micro_batch] = pending, size
        self._pasts.store_grads(micro_batch, grads_of_inputs[len(leaves) :])
        return Payload.flat(grads_of_inputs[: len(leaves)])

    def weight_grad(self, batch: Batch, micro_batch: int) -> None:
        """Run W: gradients of the weights, from what I has saved."""
        pending, size = self._pending.pop((batch.step, micro_batch))
        with recomputing(), self._seeded_backward(batch, micro_batch, weights_only=True):
            weight_grad(pending)
        self.held.give(size)

    def evict(self, batch: Batch, micro_batch: int) -> Payload:
        """Run E: return what the forward has saved; nothing if it will be recomputed."""
        forward = self._saved[batch.step, micro_batch]
        assert isinstance(forward, SavedForward)  # what may be evicted never takes the fast path
        self.held.give(forward.size)
        saved = forward.saved
        content = torch.empty(0, dtype=torch.uint8) if saved is None else saved.take_out()
        return Payload.of(content, (False,))

    def load(self, batch: Batch, micro_batch: int, arrived: Payload) -> None:
        """Run L: take back what `evict` has returned."""
        forward = self._saved[batch.step, micro_batch]
        assert isinstance(forward, SavedForward)
        self.held.take(forward.size)
        saved = forward.saved
        if saved is not None:
            saved.put_back(arrived.tensors[0])

    def forget(self) -> None:
        """Drop what unfinished batches have saved."""
        self._saved.clear()
        self.held.begin()
        self._pending.clear()
        self._pasts.clear()

    def _run(
        self, batch: Batch, micro_batch: int, inputs: Payload, past: SliceState
    ) -> tuple[Payload | None, list[Tensor], Tensor | None]:
        """Run the layers.

        Returns:
            The output for the next stage, None on the last; the losses at which the backward
            starts on this stage, which are side losses and on the last stage the loss; the loss.
        """
        watch = self._in_place.watch([inputs], training=batch.training)
        value = watch.given[0].value()
        earlier_side: Tensor | None = None
        if type(value) is dict and _SIDE in value:
            earlier_side, value = value[_SIDE], value["value"]
        result: Payload | None = None
        loss: Tensor | None = None
        with self._autocast_context(), collecting_side_losses() as sides:
            value = self._running.run(batch, micro_batch, value, past)
            past.check_unchanged()
            watch.check()
            if self.reach is not None and batch.training:
                self.reach.check_output(self._form(batch, micro_batch), value)
            all_sides = sides if earlier_side is None else [earlier_side.to(self.device), *sides]
            loss_roots = [side for side in sides if side.requires_grad] if batch.training else []
            if self._losses is None:
                result = Payload.of(
                    {_SIDE: total(all_sides), "value": value} if all_sides else value
                )
                check_devices(result, self.device)
            else:
                loss = self._losses.of(batch, micro_batch, value, all_sides)
                if self.reach is not None:
                    self.reach.check_loss(batch, loss, value)
                if isinstance(loss, Tensor) and loss.requires_grad:
                    loss_roots.append(loss)
        return result, loss_roots, loss

    def _seeded_backward(
        self, batch: Batch, micro_batch: int, *, weights_only: bool = False
    ) -> AbstractContextManager[None]:
        """Return a context that seeds the random generators for a backward, if layers draw in it."""
        draws = self._running.draws
        if not draws.watches_backward:
            return _NO_CONTEXT
        return draws.backward(Place(batch, micro_batch), weights_only=weights_only)

    def _first_grad(
        self, batch: Batch, micro_batch: int, root: Tensor, side: bool = False
    ) -> Tensor:
        """Return the gradient at which the backward of a loss starts: its weight in the loss of the
        batch, or for a side loss the micro-batch's share; times the loss scale.
        """
        weights = batch.shares if side or batch.loss_weights is None else batch.loss_weights
        return self._starts.of(weights[micro_batch] * self.loss_scale, root)

    def _autocast_context(self) -> AbstractContextManager[None]:
        if self.autocast is None:
            return _NO_CONTEXT
        return torch.autocast(self.device.type, dtype=self.autocast)

    def _form(self, batch: Batch, micro_batch: int) -> str:
        """A name that graphs of the same shapes share."""
        return f"{self.index}/{batch.forms[micro_batch]}"

    def _measuring(
        self, batch: Batch, micro_batch: int, inputs: Payload, keeps: bool
    ) -> AbstractContextManager[None]:
        """Return a context that measures what a forward of a new form saves.

        Evicted micro-batches save through other hooks, and count as much.
        """
        form = self._form(batch, micro_batch)
        if not keeps or self.held.settled(form):
            return nullcontext()
        # The first graph may be of copies of the inputs, see `_run`.
        final = self._in_place.known(training=batch.training)
        targets = [] if self._losses is None else self._losses.targets(batch, micro_batch)
        return self.held.measuring(form, inputs.tensors, self._running.weights(), targets, final)

    def _roots(
        self, batch: Batch, micro_batch: int, arrived: Payload | None
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor | None], int]:
        """Return what a backward needs; recompute the graph if it was not saved.

        Returns:
            Leaves that require gradients, of the inputs and of the slices before; the roots of the
            graph, and their gradients; and the bytes that the graph holds.
        """
        saved = self._saved.pop((batch.step, micro_batch))
        if isinstance(saved, FastForward):
            leaves_of_input = [] if saved.leaf is None else [saved.leaf]
            if (root := saved.root) is None:
                return leaves_of_input, [], [], [], saved.size
            start = (
                self._first_grad(batch, micro_batch, root)
                if arrived is None
                else moved(arrived.leaves[0], self.device)
            )
            return leaves_of_input, [], [root], [start], saved.size
        leaves = [leaf for leaf in saved.inputs.tensors if leaf.requires_grad]
        past_leaves = [leaf for leaf in tensors_of(saved.found) if leaf.requires_grad]
        grads: list[Tensor | None] = (
            [] if arrived is None else [moved(leaf, self.device) for leaf in arrived.leaves]
        )
        next_slice = batch.next_slice(micro_batch)
        grads_of_past = self._pasts.pop_grads(next_slice)
        roots = saved.roots
        if roots is None:
            roots = self._recompute_forward(batch, micro_batch, saved)
        first = len(roots) - len(grads_of_past) - saved.own
        grads += [
            self._first_grad(batch, micro_batch, root, root is not saved.loss)
            for root in roots[first : first + saved.own]
        ]
        pairs = [
            (root, grad)
            for root, grad in zip(roots, [*grads, *grads_of_past], strict=True)
            if root.requires_grad
        ]
        return (
            leaves,
            past_leaves,
            [root for root, _ in pairs],
            [grad for _, grad in pairs],
            saved.size,
        )

    def _recompute_forward(
        self, batch: Batch, micro_batch: int, saved: SavedForward
    ) -> list[Tensor]:
        """Recompute a forward for its backward. Returns the roots of its graph.

        Raises:
            RunError: it differs from the first.
        """
        next_slice = batch.next_slice(micro_batch)
        past = SliceState(saved.found, keeps=next_slice is not None)
        looking = self._measuring(batch, micro_batch, saved.inputs, keeps=True)
        assert saved.first is not None
        with looking, torch.enable_grad(), self._again.seeing(saved.first):
            result, loss_roots, loss = self._run(batch, micro_batch, saved.inputs, past)
        full = self.held.size(self._form(batch, micro_batch))
        self.held.take(full - saved.size)
        outputs = [] if result is None else result.tensors
        carried = [] if next_slice is None else tensors_of(past.outgoing)
        self._again.check(saved.first, [*outputs, *loss_roots, *carried], micro_batch)
        check_same_requires_grad(saved.flags, [*outputs, *carried], f"stage {self.index}")
        saved.size, saved.own, saved.loss = full, len(loss_roots), loss
        roots = [tensor for tensor in outputs if tensor.requires_grad] + loss_roots
        return roots + [tensor for tensor in carried if tensor.requires_grad]
