"""The autograd graph of one micro-batch on a stage: its layers, side losses and loss."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.batches.batch import Batch
from penstock.losses.stage_loss import StageLoss, total
from penstock.modules.side_loss import collecting_side_losses
from penstock.stage.activation_meter import ActivationMeter
from penstock.stage.boundary_checks import InPlaceChanges, check_devices
from penstock.stage.foreign_parameters import Reach
from penstock.stage.slice_state import SliceState
from penstock.stage.stage_layers import StageLayers
from penstock.stage.stage_random import Place
from penstock.transport.payload import Payload

#: Under this key side losses of earlier stages cross a boundary, beside the output.
SIDE_LOSS = "penstock.side_loss"

_NO_CONTEXT = nullcontext()


class Graph(NamedTuple):
    """The result of a forward.

    Attributes:
        output: the value for the next stage; None on the last.
        loss_roots: the losses at which the backward starts on this stage: side losses, and on the
            last stage the loss.
        loss: the loss; None on all stages but the last, and without targets.
    """

    output: Payload | None
    loss_roots: list[Tensor]
    loss: Tensor | None


class GraphBuilder:
    """Runs the forward of one stage.

    Args:
        index: index of the stage.
        layers: its layers.
        loss: the loss, on the last stage.
        autocast: dtype of mixed precision.
        reach: checks that gradients lead to parameters of this stage only.
        activation_meter: measures what graphs save.

    Attributes:
        in_place: whether the layers change their inputs in place.
        mixed: whether forwards run in mixed precision.
    """

    def __init__(
        self,
        index: int,
        layers: StageLayers,
        loss: StageLoss | None,
        autocast: torch.dtype | None,
        reach: Reach | None,
        activation_meter: ActivationMeter,
    ) -> None:
        self.layers, self.loss, self.reach = layers, loss, reach
        self.in_place = InPlaceChanges()
        self._index, self._device = index, layers.device
        self._autocast, self._activation_meter = autocast, activation_meter
        self.mixed = autocast is not None

    def renew(self) -> None:
        """Drop what was observed of the layers; see `Stage.renew`."""
        self.layers.renew()
        self.in_place = InPlaceChanges()

    def build(
        self, batch: Batch, micro_batch: int, inputs: Payload, slice_state: SliceState
    ) -> Graph:
        """Run the layers and, on the last stage, the loss.

        Args:
            batch: the batch.
            micro_batch: number of the micro-batch or slice.
            inputs: the inputs of the stage, as leaves.
            slice_state: state of earlier slices of the same sequences.
        """
        # The watch may replace inputs that the layers change in place by copies, so the layers get
        # those of the watch.
        watch = self.in_place.watch([inputs], training=batch.training)
        value = watch.inputs[0].value()
        # The sum of the side losses of earlier stages travels with the activations: the last stage
        # reports the loss, which includes them.
        earlier_side: Tensor | None = None
        if type(value) is dict and SIDE_LOSS in value:
            earlier_side, value = value[SIDE_LOSS], value["value"]
        output: Payload | None = None
        loss: Tensor | None = None
        with self.autocast(), collecting_side_losses() as sides:
            value = self.layers.run(batch, micro_batch, value, slice_state)
            slice_state.check_unchanged()
            watch.check()
            if self.reach is not None and batch.training:
                self.reach.check_output(self.form(batch, micro_batch), value)
            all_sides = sides if earlier_side is None else [earlier_side.to(self._device), *sides]
            # Only a number of the side losses goes forward, without a graph: the backward of each
            # starts on the stage of its layer.
            loss_roots = [side for side in sides if side.requires_grad] if batch.training else []
            if self.loss is None:
                output = Payload.of(
                    {SIDE_LOSS: total(all_sides), "value": value} if all_sides else value
                )
                check_devices(output, self._device)
            else:
                loss = self.loss.of(batch, micro_batch, value, all_sides)
                if self.reach is not None:
                    self.reach.check_loss(batch, loss, value)
                if isinstance(loss, Tensor) and loss.requires_grad:
                    loss_roots.append(loss)
        return Graph(output, loss_roots, loss)

    def autocast(self) -> AbstractContextManager[None]:
        """Return a context of mixed precision, which does nothing without it."""
        if self._autocast is None:
            return _NO_CONTEXT
        return torch.autocast(self._device.type, dtype=self._autocast)

    def backward_context(
        self, batch: Batch, micro_batch: int, *, weights_only: bool = False
    ) -> AbstractContextManager[None]:
        """Return a context that seeds the random generators for a backward, if layers draw in it.

        Args:
            batch: the batch.
            micro_batch: number of the micro-batch or slice.
            weights_only: whether the backward is a W, the second part of one.
        """
        draws = self.layers.draws
        if not draws.watches_backward:
            return _NO_CONTEXT
        return draws.backward(Place(batch, micro_batch), weights_only=weights_only)

    def form(self, batch: Batch, micro_batch: int) -> str:
        """Return a name that graphs of the same shapes share."""
        return f"{self._index}/{batch.forms[micro_batch]}"

    def measuring(
        self, batch: Batch, micro_batch: int, inputs: Payload
    ) -> AbstractContextManager[None]:
        """Return a context that measures what a forward of a new form saves.

        Micro-batches that are evicted save through other hooks, and count as much.
        """
        form = self.form(batch, micro_batch)
        if self._activation_meter.settled(form):
            return _NO_CONTEXT
        # The first graph may be of copies of the inputs, see `InPlaceChanges`.
        final = self.in_place.known(training=batch.training)
        targets = [] if self.loss is None else self.loss.targets(batch, micro_batch)
        return self._activation_meter.measuring(
            form, inputs.tensors, self.layers.weights(), targets, final
        )
