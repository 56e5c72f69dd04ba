"""A stage on its rank: layers, what they keep between a forward and its backward, and their update."""

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
from penstock.modules.side_loss import collect_side_losses, collecting_side_losses
from penstock.optim.update import Update
from penstock.simulate.simulate import recomputes
from penstock.stage.activation_meter import ActivationMeter
from penstock.stage.boundary_checks import InPlace, check_devices, check_same_flags
from penstock.stage.eviction import Saved
from penstock.stage.foreign_parameters import Reach
from penstock.stage.saved_forward import InputGrads, PlainForward, SavedForward
from penstock.stage.second_forward import SecondForwards
from penstock.stage.slice_state import Past, Pasts, tensors_of
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

_NOTHING = Payload("*", (), ())
_NO_PAST = Past(keeps=False)
_AS_IT_IS = nullcontext()


@dataclass
class Stage:
    """Runs ops of one stage. Knows nothing of schedules, ranks or links.

    `evicted`: micro-batches that `evict` will be asked for. `held`: what counts what is kept, for
    all stages of a rank. `entry`, `exit`, `recomputed`, `segment_starts`, `compile`, `offload`: see
    `StageLayers`. `autocast`: the dtype of mixed precision. `loss_scale`: what gradients are
    multiplied by, and the loss that is reported is not. `reach`: what graphs may lead to.
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
    _kept: dict[_Key, SavedForward | PlainForward] = field(default_factory=dict)
    _pending: dict[_Key, tuple[PendingWeights, int]] = field(default_factory=dict)
    _pasts: Pasts = field(default_factory=Pasts)

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
        self._in_place = InPlace()
        names = [layer.name for layer in self.layers]
        where = f"layers {names[0]} to {names[-1]}" if len(names) > 1 else f"layer {names[0]}"
        self._again = SecondForwards(
            [layer.module for layer in self.layers],
            [] if self.entry is None else [self.entry],
            f"stage {self.index}, {where}",
        )
        # Forms of micro-batches that the short way is known to do for, and the bytes that they
        # keep.
        self._plain: dict[str, int] = {}
        # Forms of micro-batches whose gradients are laid out like the inputs that they are of.
        self._alike: set[str] = set()
        self._compares = True
        self._on_host = self.device.type == "cpu"
        self._starts = Starts()
        self._losses: StageLoss | None = None
        if self.loss is not None:
            modules = [layer.module for layer in self.layers]
            self._losses = StageLoss(self.loss, self.device, self.loss_options, self.seed, modules)

    def tensors(self) -> Iterator[Tensor]:
        """All parameters and buffers; one that two modules share comes twice."""
        for module in self.modules():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    yield tensor

    def modules(self) -> Iterator[nn.Module]:
        """All modules of the stage."""
        return self._running.modules()

    def evaluating(self) -> AbstractContextManager[None]:
        """Layers in evaluation mode; afterwards every module is in the mode it was in."""
        return self._running.evaluating()

    def allow_other_weights(self) -> None:
        """Do not compare second forwards with first ones.

        The weight rules of asynchronous schedules may let a backward read newer weights than its
        forward has read; what runs again then makes other values, as their papers have it.
        """
        self._compares = False
        self._running.allow_other_weights()

    def renew(self) -> None:
        """Learn anew what the layers do: those of a traced model have other code."""
        self._running.renew()
        if not self._compares:
            self._running.allow_other_weights()
        self._in_place = InPlace()
        self._plain.clear()
        self._alike.clear()

    def forward(self, batch: Batch, micro_batch: int, arrived: Payload | None) -> Payload | None:
        """F: run the layers on one micro-batch.

        Args:
            batch: the batch; its inputs feed the first stage, its targets the loss of the last.
            micro_batch: which one, or which slice of one.
            arrived: what the stage before sent; None on the first stage.

        Returns:
            What the next stage takes; None on the last.
        """
        size = self._plain.get(batch.forms[micro_batch])
        if size is not None and (arrived is None or arrived.structure == ""):
            return self._forward_plainly(batch, micro_batch, arrived, size)
        inputs = self._leaves(batch, micro_batch, arrived)
        again = batch.training and recomputes(self.recompute, *batch.place(micro_batch))
        first = self._again.first() if again else None
        after = batch.next_slice(micro_batch)
        past = Past(self._pasts.waiting.pop(micro_batch, {}), keeps=after is not None)
        keeps = batch.training and not again
        saved = Saved(self._running.weights()) if keeps and micro_batch in self.evicted else None
        # With a graph also where it is run again: which outputs want a gradient is known from that
        # alone, and kernels are chosen by it.
        with (
            self._looking(batch, micro_batch, inputs, keeps),
            torch.set_grad_enabled(batch.training),
            saved.saving() if saved else nullcontext(),
        ):
            result, own, loss = self._run(batch, micro_batch, inputs, past)
        made = [] if result is None else result.tensors
        left = [] if after is None else tensors_of(past.outgoing)
        if first is not None and self._compares:
            first.note([*made, *own, *left])
        flags = tuple([tensor.requires_grad for tensor in (*made, *left)])
        roots = [tensor for tensor in made if tensor.requires_grad] + own
        roots += [tensor for tensor in left if tensor.requires_grad]
        if after is not None:
            self._pasts.store(after, past.outgoing, flags[len(made) :])
        if again and result is not None:
            result = result.with_tensors([tensor.detach() for tensor in made])
        if batch.training:
            size = inputs.nbytes if again else self.held.size(self._form(batch, micro_batch))
            self._kept[batch.step, micro_batch] = SavedForward(
                inputs,
                past.incoming,
                None if again else roots,
                len(own),
                first,
                saved,
                size,
                flags,
                None if again else loss,
                self._input_grads(inputs),
            )
            self.held.take(size)
            if not (again or saved or own[1:] or batch.outputs):
                self._learn(batch, micro_batch, inputs, result, size=size)
        return result

    def _leaves(self, batch: Batch, micro_batch: int, arrived: Payload | None) -> Payload:
        """The stage's inputs as leaves of a graph of their own."""
        source = Payload.of(batch.inputs[micro_batch]) if arrived is None else arrived
        if self._on_host or arrived is not None:
            leaves = [tensor.detach().to(self.device) for tensor in source.tensors]
        else:
            leaves = device_batch(batch, self.device).views(micro_batch, source.tensors)
        if arrived is not None and batch.training:
            for leaf, wanted in zip(leaves, source.wants_grad, strict=True):
                leaf.requires_grad_(wanted)
        return source.with_tensors(leaves)

    def _input_grads(self, inputs: Payload) -> InputGrads | None:
        leaves = [leaf for leaf in inputs.tensors if leaf.requires_grad]
        return InputGrads.of(leaves) if leaves else None

    def _learn(
        self, batch: Batch, micro_batch: int, inputs: Payload, result: Payload | None, *, size: int
    ) -> None:
        """Let the next micro-batches of this form go the short way, if it would do."""
        one_out = self.loss is not None if result is None else result.structure == ""
        known = self._in_place.excluded(training=True) and self.held.settled(
            self._form(batch, micro_batch)
        )
        form = batch.forms[micro_batch]
        # The fast path takes the gradient of its input from `leaf.grad`, see `InputGrads`.
        alike = form in self._alike or not any(inputs.wants_grad)
        if (
            known
            and alike
            and one_out
            and inputs.structure == ""
            and not batch.cuts_tokens
            and not batch.keeps_outputs
        ):
            self._plain[form] = size

    def _forward_plainly(
        self, batch: Batch, micro_batch: int, arrived: Payload | None, size: int
    ) -> Payload | None:
        """F where one tensor comes and one goes. The form, which has the mode in it, says that it
        is so.
        """
        leaf = None
        value = batch.inputs[micro_batch] if arrived is None else arrived.leaves[0].detach()
        if not self._on_host and arrived is None:
            value = device_batch(batch, self.device).view(INPUTS, micro_batch, value)
        elif not self._on_host:
            value = value.to(self.device)
        if arrived is not None and arrived.wants_grad[0]:
            leaf = value.requires_grad_(True)
        given = value
        sides: list[Tensor] = []
        outer = collect_side_losses(sides)
        try:
            with _AS_IT_IS if torch.is_grad_enabled() else torch.enable_grad(), self._mixed():
                value = self._running.run(batch, micro_batch, value, _NO_PAST)
                if self._losses is not None:
                    output, value = value, self._losses.of(batch, micro_batch, value, sides)
                    if self.reach is not None and self.reach.step != batch.step:
                        self.reach.check_loss(batch, value, output)
        finally:
            collect_side_losses(outer)
        root = value if value.requires_grad else None
        self.held.take(size)
        if sides:
            return self._with_sides(batch, micro_batch, (given, leaf, root, value), sides, size)
        self._kept[batch.step, micro_batch] = PlainForward(leaf, root, size)
        return None if self.loss is not None else Payload("", (value,), (root is not None,))

    def _with_sides(
        self,
        batch: Batch,
        micro_batch: int,
        made: tuple[Tensor, Tensor | None, Tensor | None, Tensor],
        sides: list[Tensor],
        size: int,
    ) -> Payload | None:
        """What `_forward_plainly` has made where a layer turns out to have side losses, though
        micro-batches before had none.
        """
        del self._plain[batch.forms[micro_batch]]
        given, leaf, root, value = made
        own = [side for side in sides if side.requires_grad]
        roots = [] if root is None else [root]
        result = Payload.of({_SIDE: total(sides), "value": value}) if self.loss is None else None
        inputs = Payload("", (given,), (leaf is not None,))
        count = len(own) + (len(roots) if self.loss is not None else 0)
        self._kept[batch.step, micro_batch] = SavedForward(
            inputs, {}, [*roots, *own], count, None, None, size, (), root
        )
        return result

    def backward(self, batch: Batch, micro_batch: int, arrived: Payload | None) -> Payload:
        """B: gradients of weights and inputs. Takes the gradients of what `forward` returned,
        returns those of what it took.
        """
        kept = self._kept[batch.step, micro_batch]
        if type(kept) is PlainForward:
            del self._kept[batch.step, micro_batch]
            return self._backward_plainly(batch, micro_batch, arrived, kept)
        leaves, past, roots, grads, size = self._roots(batch, micro_batch, arrived)
        live = [(root, grad) for root, grad in zip(roots, grads, strict=True) if grad is not None]
        if live:
            with self._drawing(batch, micro_batch):
                torch.autograd.backward([root for root, _ in live], [grad for _, grad in live])
        self._pasts.store_grads(micro_batch, [leaf.grad for leaf in past])
        self.held.give(size)
        assert isinstance(kept, SavedForward)
        if kept.input_grads is None:
            return Payload.flat([leaf.grad for leaf in leaves])
        input_grads, alike = kept.input_grads.take(leaves)
        if alike:
            if len(self._alike) >= _MOST_FORMS:
                self._alike.clear()
            self._alike.add(batch.forms[micro_batch])
        return Payload.flat(input_grads)

    def _backward_plainly(
        self, batch: Batch, micro_batch: int, arrived: Payload | None, kept: PlainForward
    ) -> Payload:
        root, leaf = kept.root, kept.leaf
        if root is not None:
            grad = (
                self._started(batch, micro_batch, root)
                if arrived is None
                else moved(arrived.leaves[0], self.device)
            )
            if grad is not None and self._running.draws.watches_backward:
                with self._drawing(batch, micro_batch):
                    whole_grad(root, grad)
            elif grad is not None:
                whole_grad(root, grad)
        self.held.give(kept.size)
        if leaf is None:
            return _NOTHING
        return Payload.flat([leaf.grad])

    def input_grad(self, batch: Batch, micro_batch: int, arrived: Payload | None) -> Payload:
        """I: gradients of the inputs only; W has to follow."""
        leaves, past, roots, grads, size = self._roots(batch, micro_batch, arrived)
        with self._drawing(batch, micro_batch):
            found, pending = input_grad(roots, grads, [*leaves, *past])
        self._pending[batch.step, micro_batch] = pending, size
        self._pasts.store_grads(micro_batch, found[len(leaves) :])
        return Payload.flat(found[: len(leaves)])

    def weight_grad(self, batch: Batch, micro_batch: int) -> None:
        """W: gradients of the weights, from what I left."""
        pending, size = self._pending.pop((batch.step, micro_batch))
        with self._drawing(batch, micro_batch, weights_only=True):
            weight_grad(pending)
        self.held.give(size)

    def evict(self, batch: Batch, micro_batch: int) -> Payload:
        """E: give what the forward has saved away. What will be recomputed has saved nothing."""
        kept = self._kept[batch.step, micro_batch]
        assert isinstance(kept, SavedForward)  # what may be evicted never goes the short way
        self.held.give(kept.size)
        saved = kept.saved
        content = torch.empty(0, dtype=torch.uint8) if saved is None else saved.take_out()
        return Payload.of(content, (False,))

    def load(self, batch: Batch, micro_batch: int, arrived: Payload) -> None:
        """L: take it back."""
        kept = self._kept[batch.step, micro_batch]
        assert isinstance(kept, SavedForward)
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

    def _run(
        self, batch: Batch, micro_batch: int, inputs: Payload, past: Past
    ) -> tuple[Payload | None, list[Tensor], Tensor | None]:
        """What the layers make for the next stage, and what starts a gradient of its own: the loss,
        on the last stage, and side losses.
        """
        watch = self._in_place.watch(inputs, training=batch.training)
        value = watch.given.value()
        before: Tensor | None = None
        if type(value) is dict and _SIDE in value:
            before, value = value[_SIDE], value["value"]
        result: Payload | None = None
        loss: Tensor | None = None
        own: list[Tensor] = []
        with self._mixed(), collecting_side_losses() as sides:
            value = self._running.run(batch, micro_batch, value, past)
            past.check_unchanged()
            watch.check()
            if self.reach is not None and batch.training:
                self.reach.check_output(self._form(batch, micro_batch), value)
            told = sides if before is None else [before.to(self.device), *sides]
            own = [side for side in sides if side.requires_grad] if batch.training else []
            if self._losses is None:
                result = Payload.of({_SIDE: total(told), "value": value} if told else value)
                check_devices(result, self.device)
            else:
                loss = self._losses.of(batch, micro_batch, value, told)
                if self.reach is not None:
                    self.reach.check_loss(batch, loss, value)
                if isinstance(loss, Tensor) and loss.requires_grad:
                    own.append(loss)
        return result, own, loss

    def _drawing(
        self, batch: Batch, micro_batch: int, *, weights_only: bool = False
    ) -> AbstractContextManager[None]:
        """Around a backward: the random generators, if layers draw there."""
        draws = self._running.draws
        if not draws.watches_backward:
            return _AS_IT_IS
        return draws.backward(Place(batch, micro_batch), weights_only=weights_only)

    def _started(self, batch: Batch, micro_batch: int, root: Tensor, side: bool = False) -> Tensor:
        """The gradient that the loss begins with, its weight in the batch, or a side loss, the
        micro-batch's share; scaled.
        """
        weights = batch.shares if side or batch.loss_weights is None else batch.loss_weights
        return self._starts.of(weights[micro_batch] * self.loss_scale, root)

    def _mixed(self) -> AbstractContextManager[None]:
        if self.autocast is None:
            return _AS_IT_IS
        return torch.autocast(self.device.type, dtype=self.autocast)

    def _form(self, batch: Batch, micro_batch: int) -> str:
        """A name that graphs of the same shapes share."""
        return f"{self.index}/{batch.forms[micro_batch]}"

    def _looking(
        self, batch: Batch, micro_batch: int, inputs: Payload, keeps: bool
    ) -> AbstractContextManager[None]:
        """Let what is held of a new form be counted. What can be evicted is held by something else;
        it counts as much.
        """
        if not keeps:
            return nullcontext()
        # The first graph may be of copies of the inputs, see `_run`.
        final = self._in_place.known(training=batch.training)
        targets = [] if self._losses is None else self._losses.targets(batch, micro_batch)
        return self.held.measuring(
            self._form(batch, micro_batch), inputs.tensors, self._running.weights(), targets, final
        )

    def _roots(
        self, batch: Batch, micro_batch: int, arrived: Payload | None
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor | None], int]:
        """Leaves that want gradients, among the inputs and in the past that was found; the graph's
        roots, and their gradients; and how many bytes it holds.

        Recomputes the graph if needed.
        """
        kept = self._kept.pop((batch.step, micro_batch))
        if isinstance(kept, PlainForward):
            here = [] if kept.leaf is None else [kept.leaf]
            if (root := kept.root) is None:
                return here, [], [], [], kept.size
            start = (
                self._started(batch, micro_batch, root)
                if arrived is None
                else moved(arrived.leaves[0], self.device)
            )
            return here, [], [root], [start], kept.size
        leaves = [leaf for leaf in kept.inputs.tensors if leaf.requires_grad]
        past_leaves = [leaf for leaf in tensors_of(kept.found) if leaf.requires_grad]
        grads: list[Tensor | None] = (
            [] if arrived is None else [moved(leaf, self.device) for leaf in arrived.leaves]
        )
        after = batch.next_slice(micro_batch)
        grads_of_past = self._pasts.pop_grads(after)
        roots = kept.roots
        if roots is None:
            roots = self._run_again(batch, micro_batch, kept)
        first = len(roots) - len(grads_of_past) - kept.own
        grads += [
            self._started(batch, micro_batch, root, root is not kept.loss)
            for root in roots[first : first + kept.own]
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
            kept.size,
        )

    def _run_again(self, batch: Batch, micro_batch: int, kept: SavedForward) -> list[Tensor]:
        """Run a forward again for its backward; returns the roots of its graph.

        Raises:
            RunError: it did something else than the first.
        """
        after = batch.next_slice(micro_batch)
        past = Past(kept.found, keeps=after is not None)
        looking = self._looking(batch, micro_batch, kept.inputs, keeps=True)
        assert kept.first is not None
        with looking, torch.enable_grad(), self._again.seeing(kept.first):
            result, own, loss = self._run(batch, micro_batch, kept.inputs, past)
        full = self.held.size(self._form(batch, micro_batch))
        self.held.take(full - kept.size)
        outputs = [] if result is None else result.tensors
        left = [] if after is None else tensors_of(past.outgoing)
        self._again.check(kept.first, [*outputs, *own, *left], micro_batch)
        check_same_flags(kept.flags, [*outputs, *left], f"stage {self.index}")
        kept.size, kept.own, kept.loss = full, len(own), loss
        roots = [tensor for tensor in outputs if tensor.requires_grad] + own
        return roots + [tensor for tensor in left if tensor.requires_grad]
