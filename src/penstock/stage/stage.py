"""A stage on its rank: its ops, what they save from a forward to its backward, and its update."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from penstock.batches.batch import Batch
from penstock.batches.device_batch import device_batch, to_device
from penstock.grad.full_backward import whole_grad
from penstock.grad.split import PendingWeights, input_grad, weight_grad
from penstock.losses.stage_loss import Loss, LossOptions, StageLoss, Starts
from penstock.modules.recomputing import checkpointing
from penstock.optim.update import Update
from penstock.schedule.recompute import Recompute
from penstock.stage.activation_meter import ActivationMeter
from penstock.stage.boundary_checks import check_same_requires_grad
from penstock.stage.eviction import Saved
from penstock.stage.fast_path import FastPath
from penstock.stage.foreign_parameters import Reach
from penstock.stage.graph_builder import GraphBuilder
from penstock.stage.saved_forward import FastForward, InputGrads, SavedForward, roots_of, with_grad
from penstock.stage.second_forward import SecondForwards
from penstock.stage.slice_state import SliceState, SliceStates, tensors_of
from penstock.stage.stage_layers import StageLayer, StageLayers
from penstock.transport.payload import Payload

__all__ = ["Loss", "Stage", "StageLayer"]

#: Step and micro-batch: several batches may be in flight.
_Key = tuple[int, int]

_NO_GRADS = Payload("*", (), ())


@dataclass(frozen=True)
class _Backward:
    """The inputs of a backward.

    Attributes:
        leaves: inputs that require gradients.
        slice_leaves: likewise, of the state of the slices before.
        roots: the roots of the graph that require gradients.
        grads: their gradients; None where the next stage sends none.
        size: bytes that the graph holds.
    """

    leaves: list[Tensor]
    slice_leaves: list[Tensor]
    roots: list[Tensor]
    grads: list[Tensor | None]
    size: int


@dataclass
class Stage:
    """Runs the ops of one stage, whatever the schedule, the rank and the links.

    Attributes:
        index: its index.
        runner: its layers.
        update: its parameters and their optimizer.
        recompute: which micro-batches are recomputed for their backward.
        loss: the loss function, on the last stage.
        loss_options: how the loss is divided into micro-batches.
        evicted: micro-batches that `evict` will be called for.
        activation_meter: that of the rank, shared by its stages.
        autocast: dtype of mixed precision.
        reach: checks that gradients lead to parameters of this stage only.
        loss_scale: factor of the gradients; the reported loss is without it.
    """

    index: int
    runner: StageLayers
    update: Update
    recompute: Recompute = Recompute.NEVER
    loss: Loss | None = None
    loss_options: LossOptions = field(default_factory=LossOptions)
    evicted: Collection[int] = ()
    activation_meter: ActivationMeter = field(default_factory=ActivationMeter)
    autocast: torch.dtype | None = None
    reach: Reach | None = None
    loss_scale: float = 1.0
    _saved: dict[_Key, SavedForward | FastForward] = field(default_factory=dict)
    _pending: dict[_Key, tuple[PendingWeights, int]] = field(default_factory=dict)
    _slice_states: SliceStates = field(default_factory=SliceStates)

    def __post_init__(self) -> None:
        names = [layer.name for layer in self.layers]
        where = f"layers {names[0]} to {names[-1]}" if len(names) > 1 else f"layer {names[0]}"
        entry = self.runner.entry
        modules = [layer.module for layer in self.layers]
        self._second_forwards = SecondForwards(
            modules,
            [] if entry is None else [entry],
            f"stage {self.index}, {where}",
            self.runner.checks,
        )
        self._compares = True
        self._on_host = self.device.type == "cpu"
        self._starts = Starts()
        loss = None
        if self.loss is not None:
            seed = self.runner.seed
            checks = self.runner.checks
            loss = StageLoss(self.loss, self.device, self.loss_options, seed, modules, checks)
        self._builder = GraphBuilder(
            self.index, self.runner, loss, self.autocast, self.reach, self.activation_meter
        )
        self._fast_path = FastPath(self._builder, self.activation_meter)

    @property
    def layers(self) -> Sequence[StageLayer]:
        """The layers in order."""
        return self.runner.layers

    @property
    def device(self) -> torch.device:
        """The device on which the stage computes."""
        return self.runner.device

    def tensors(self) -> Iterator[Tensor]:
        """Yield all parameters and buffers; one that two modules share is yielded twice."""
        for module in self.modules():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    yield tensor

    def modules(self) -> Iterator[nn.Module]:
        """Yield all modules of the stage."""
        return self.runner.modules()

    def evaluation_mode(self) -> AbstractContextManager[None]:
        """Run layers in evaluation mode; restore the mode of every module afterwards."""
        return self.runner.evaluation_mode()

    def allow_weight_changes(self) -> None:
        """Do not compare recomputed forwards with the first ones.

        The weight rules of asynchronous schedules may let a backward read newer weights than its
        forward has read. Recomputed values then differ, as in their papers.
        """
        self._compares = False
        self.runner.allow_weight_changes()

    def prepare(self, batch: Batch) -> None:
        """Do the part of the batch's first F that needs no input, while that is on its way."""
        self.runner.draws.prepare(batch)
        if self._builder.loss is not None:
            self._builder.loss.prepare(batch)

    def renew(self) -> None:
        """Forget what was observed of the layers, because a traced model has been traced again."""
        self._builder.renew()
        if not self._compares:
            self.runner.allow_weight_changes()
        self._fast_path.clear()

    def forward(self, batch: Batch, micro_batch: int, arrived: Payload | None) -> Payload | None:
        """Run F: the layers on one micro-batch.

        Args:
            batch: the batch; its inputs feed the first stage, its targets the loss of the last.
            micro_batch: number of the micro-batch or slice.
            arrived: the value that the stage before sent; None on the first stage.

        Returns:
            The input of the next stage; None on the last.
        """
        if batch.training and not self._on_host:
            self.runner.checks.begin(batch.step)
        size = self._fast_path.bytes_by_form.get(batch.forms[micro_batch])
        # The form tells of the batch's inputs; what has arrived may be nested, with a side loss for
        # instance.
        if size is not None and (arrived is None or arrived.structure == ""):
            fast, output = self._fast_path.forward(batch, micro_batch, arrived, size)
            self.activation_meter.take(size)
            self._saved[batch.step, micro_batch] = fast
            return output
        return self._full_forward(batch, micro_batch, self._leaves(batch, micro_batch, arrived))

    def _full_forward(self, batch: Batch, micro_batch: int, inputs: Payload) -> Payload | None:
        """Run F with all that the fast path leaves out; `inputs` are leaves."""
        recomputed = batch.training and self.recompute.repeats(*batch.place(micro_batch))
        keeps_graph = batch.training and not recomputed
        first = self._second_forwards.first() if recomputed else None
        evicted = keeps_graph and micro_batch in self.evicted
        saved = Saved(self.runner.weights()) if evicted else None
        next_slice = batch.next_slice(micro_batch)
        slice_state = SliceState(
            self._slice_states.waiting.pop(micro_batch, {}), keeps=next_slice is not None
        )
        # A recomputed forward builds a graph, too: that shows which outputs require a gradient, and
        # torch chooses kernels by it.
        with (
            self._builder.measuring(batch, micro_batch, inputs) if keeps_graph else nullcontext(),
            torch.set_grad_enabled(batch.training),
            checkpointing() if recomputed else nullcontext(),
            nullcontext() if saved is None else saved.saving(),
        ):
            output, loss_roots, loss = self._builder.build(batch, micro_batch, inputs, slice_state)
        outputs = [] if output is None else output.tensors
        carried = [] if next_slice is None else tensors_of(slice_state.outgoing)
        requires_grad = tuple([tensor.requires_grad for tensor in (*outputs, *carried)])
        if next_slice is not None:
            carried_flags = requires_grad[len(outputs) :]
            self._slice_states.store(next_slice, slice_state.outgoing, carried_flags)
        if not batch.training:
            return output
        forward = self._saved[batch.step, micro_batch] = SavedForward(
            inputs,
            slice_state.incoming,
            roots=None,
            loss_root_count=len(loss_roots),
            first=first,
            saved=saved,
            size=inputs.nbytes,
            requires_grad=requires_grad,
            input_grads=InputGrads.of_inputs(inputs),
        )
        if first is not None:
            if self._compares:
                first.note([*outputs, *loss_roots, *carried])
            self.activation_meter.take(forward.size)
            # The graph ends here: the backward runs on that of the recompute.
            detached = [tensor.detach() for tensor in outputs]
            return None if output is None else output.with_tensors(detached)
        forward.roots, forward.loss = roots_of(outputs, loss_roots, carried), loss
        forward.size = self.activation_meter.size(self._builder.form(batch, micro_batch))
        self.activation_meter.take(forward.size)
        # A forward of the fast path has one root, evicts nothing and keeps no outputs of the model.
        if saved is None and len(loss_roots) < 2 and not batch.outputs:
            self._fast_path.enable(batch, micro_batch, inputs, output)
        return output

    def backward(self, batch: Batch, micro_batch: int, arrived: Payload | None) -> Payload:
        """Run B: gradients of weights and inputs.

        Args:
            batch: the batch.
            micro_batch: number of the micro-batch or slice.
            arrived: gradients of the output of `forward`; None on the last stage.

        Returns:
            Gradients of the input of `forward`.
        """
        saved = self._saved[batch.step, micro_batch]
        if type(saved) is FastForward:
            del self._saved[batch.step, micro_batch]
            return self._fast_backward(batch, micro_batch, arrived, saved)
        backward = self._backward(batch, micro_batch, arrived)
        roots, grads = [], []
        for root, grad in zip(backward.roots, backward.grads, strict=True):
            if grad is not None:
                roots.append(root)
                grads.append(grad)
        if roots:
            with self._builder.backward_context(batch, micro_batch):
                torch.autograd.backward(roots, grads)
        self._slice_states.store_grads(micro_batch, [leaf.grad for leaf in backward.slice_leaves])
        self.activation_meter.give(backward.size)
        assert isinstance(saved, SavedForward)
        if saved.input_grads is None:
            return Payload.flat([leaf.grad for leaf in backward.leaves])
        input_grads, same_layout = saved.input_grads.take(backward.leaves)
        if same_layout:
            self._fast_path.note_same_layout(batch.forms[micro_batch])
        return Payload.flat(input_grads)

    def input_grad(self, batch: Batch, micro_batch: int, arrived: Payload | None) -> Payload:
        """Run I: gradients of the inputs only; W has to follow. Arguments as for `backward`."""
        backward = self._backward(batch, micro_batch, arrived)
        leaves = [*backward.leaves, *backward.slice_leaves]
        with self._builder.backward_context(batch, micro_batch):
            grads, pending = input_grad(backward.roots, backward.grads, leaves)
        self._pending[batch.step, micro_batch] = pending, backward.size
        count = len(backward.leaves)
        self._slice_states.store_grads(micro_batch, grads[count:])
        return Payload.flat(grads[:count])

    def weight_grad(self, batch: Batch, micro_batch: int) -> None:
        """Run W: gradients of the weights, from what I has saved."""
        pending, size = self._pending.pop((batch.step, micro_batch))
        with self._builder.backward_context(batch, micro_batch, weights_only=True):
            weight_grad(pending)
        self.activation_meter.give(size)

    def evict(self, batch: Batch, micro_batch: int) -> Payload:
        """Run E: return what the forward has saved; nothing if it will be recomputed."""
        forward = self._saved[batch.step, micro_batch]
        assert isinstance(forward, SavedForward)  # what may be evicted never takes the fast path
        self.activation_meter.give(forward.size)
        saved = forward.saved
        content = torch.empty(0, dtype=torch.uint8) if saved is None else saved.take_out()
        return Payload.of(content, (False,))

    def load(self, batch: Batch, micro_batch: int, arrived: Payload) -> None:
        """Run L: take back what `evict` has returned."""
        forward = self._saved[batch.step, micro_batch]
        assert isinstance(forward, SavedForward)
        self.activation_meter.take(forward.size)
        saved = forward.saved
        if saved is not None:
            saved.put_back(arrived.tensors[0])

    @property
    def has_pending_checks(self) -> bool:
        """Whether there are results of checks that the host has not read."""
        return self.runner.checks.pending

    def read_checks(self) -> None:
        """Read the results of all checks, see `DeferredChecks`.

        Raises:
            RunError: a check has failed.
        """
        self.runner.checks.read()

    def forget(self) -> None:
        """Drop what unfinished batches have saved."""
        self.runner.checks.clear()
        self._saved.clear()
        self.activation_meter.begin()
        self._pending.clear()
        self._slice_states.clear()

    def _leaves(self, batch: Batch, micro_batch: int, arrived: Payload | None) -> Payload:
        """Return the inputs of the stage as leaves of a graph of their own."""
        source = Payload.of(batch.inputs[micro_batch]) if arrived is None else arrived
        if self._on_host or arrived is not None:
            leaves = [tensor.detach().to(self.device) for tensor in source.tensors]
        else:
            # Views of one copy of the whole batch: a copy for each micro-batch would make the host
            # wait.
            leaves = device_batch(batch, self.device).views(micro_batch, source.tensors)
        if arrived is not None and batch.training:
            for leaf, requires_grad in zip(leaves, source.wants_grad, strict=True):
                leaf.requires_grad_(requires_grad)
        return source.with_tensors(leaves)

    def _fast_backward(
        self, batch: Batch, micro_batch: int, arrived: Payload | None, saved: FastForward
    ) -> Payload:
        """Run B of a micro-batch of the fast path. Arguments and result as for `backward`.

        Args:
            batch: the batch.
            micro_batch: number of the micro-batch.
            arrived: gradients of the output of `forward`.
            saved: what the forward has saved.
        """
        root, leaf = saved.root, saved.leaf
        if root is not None:
            grad = self._root_grad(batch, micro_batch, arrived, root)
            # The context is entered only if needed: small stages spend most of their time in
            # Python.
            if grad is not None and self.runner.draws.watches_backward:
                with self._builder.backward_context(batch, micro_batch):
                    whole_grad((root,), (grad,))
            elif grad is not None:
                whole_grad((root,), (grad,))
        self.activation_meter.give(saved.size)
        if leaf is None:
            return _NO_GRADS
        return Payload.flat([leaf.grad])

    def _root_grad(
        self, batch: Batch, micro_batch: int, arrived: Payload | None, root: Tensor
    ) -> Tensor | None:
        """Return the gradient of the only root of a graph of the fast path."""
        if arrived is None:
            return self._first_grad(batch, micro_batch, root)
        return to_device(arrived.leaves[0], self.device)

    def _first_grad(
        self, batch: Batch, micro_batch: int, root: Tensor, *, side: bool = False
    ) -> Tensor:
        """Return the gradient with which the backward of a loss starts.

        It is the weight of the loss in the loss of the batch, or for a side loss the micro-batch's
        share of the samples; times the loss scale.
        """
        weights = batch.shares if side or batch.loss_weights is None else batch.loss_weights
        return self._starts.of(weights[micro_batch] * self.loss_scale, root)

    def _backward(self, batch: Batch, micro_batch: int, arrived: Payload | None) -> _Backward:
        """Return what a backward runs on; recompute the graph if it was not saved."""
        saved = self._saved.pop((batch.step, micro_batch))
        if isinstance(saved, FastForward):
            leaves = [] if saved.leaf is None else [saved.leaf]
            if saved.root is None:
                return _Backward(leaves, [], [], [], saved.size)
            grad = self._root_grad(batch, micro_batch, arrived, saved.root)
            return _Backward(leaves, [], [saved.root], [grad], saved.size)
        output_grads: list[Tensor | None] = []
        if arrived is not None:
            output_grads = [to_device(leaf, self.device) for leaf in arrived.leaves]
        carried_grads = self._slice_states.pop_grads(batch.next_slice(micro_batch))
        roots = saved.roots
        if roots is None:
            roots = self._recompute(batch, micro_batch, saved)
        # Roots are outputs, losses and carried tensors, in this order.
        first_loss = len(roots) - len(carried_grads) - saved.loss_root_count
        loss_grads = [
            self._first_grad(batch, micro_batch, root, side=root is not saved.loss)
            for root in roots[first_loss : first_loss + saved.loss_root_count]
        ]
        grads = [*output_grads, *loss_grads, *carried_grads]
        assert len(roots) == len(grads)
        return _Backward(
            with_grad(saved.inputs.tensors),
            with_grad(tensors_of(saved.slice_state)),
            roots,
            grads,
            saved.size,
        )

    def _recompute(self, batch: Batch, micro_batch: int, saved: SavedForward) -> list[Tensor]:
        """Recompute a forward for its backward. Returns the roots of its graph.

        Raises:
            RunError: it differs from the first.
        """
        next_slice = batch.next_slice(micro_batch)
        slice_state = SliceState(saved.slice_state, keeps=next_slice is not None)
        assert saved.first is not None
        with (
            self._builder.measuring(batch, micro_batch, saved.inputs),
            torch.enable_grad(),
            self._second_forwards.seeing(saved.first),
        ):
            output, loss_roots, loss = self._builder.build(
                batch, micro_batch, saved.inputs, slice_state
            )
        size = self.activation_meter.size(self._builder.form(batch, micro_batch))
        # Until now only the inputs were counted.
        self.activation_meter.take(size - saved.size)
        outputs = [] if output is None else output.tensors
        carried = [] if next_slice is None else tensors_of(slice_state.outgoing)
        self._second_forwards.check(saved.first, [*outputs, *loss_roots, *carried], micro_batch)
        check_same_requires_grad(saved.requires_grad, [*outputs, *carried], f"stage {self.index}")
        saved.size, saved.loss_root_count, saved.loss = size, len(loss_roots), loss
        return roots_of(outputs, loss_roots, carried)
