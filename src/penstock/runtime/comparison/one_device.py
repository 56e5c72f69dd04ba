"""Plain training of the whole model on one device, with which a pipeline is compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.batches.batch import Batch
from penstock.batches.device_batch import INPUTS, device_batch
from penstock.batches.splitting import join
from penstock.losses.stage_loss import LossOptions, StageLoss
from penstock.modules.deferred_batch_norm import begin
from penstock.modules.host_random import equal_states, host_state
from penstock.modules.randomness import (
    drawing,
    generator_states,
    has_drawn,
    may_draw,
    seed_generators,
    stream_seed,
)
from penstock.modules.side_loss import collecting_side_losses
from penstock.modules.state_names import parameters_of, state_of
from penstock.ranks.results import sum_of_local
from penstock.runtime.comparison.reference_model import reference_model
from penstock.stage import stage_state as state
from penstock.stage.stage_builder import Training
from penstock.tracing.slices import has_past
from penstock.values.structure import labelled_leaves, map_tensors


@dataclass
class OneDevice:
    """Plain training in the process of rank 0, on its device.

    Another device would draw other random numbers for dropout from the same seed, and would round
    differently.

    Attributes:
        placed: the placement of the stages.
        batch: the batch.
        training: how the model is trained.
        device: the device of rank 0.
        loss: the mean loss of the last run.
        drew: whether a layer has drawn random numbers in the last run.
        whole: whether the last run has kept sequences whole that the schedule slices.
        sides: whether a layer has added a side loss.
        modules: the layers of the last run, with its gradients and buffers.
        outputs: the outputs of the last run, by micro-batch.
    """

    placed: state.Placed
    batch: Batch
    training: Training
    device: torch.device
    loss: float = 0.0
    drew: bool = False
    whole: bool = False
    sides: bool = False
    modules: list[nn.Module] = field(default_factory=list)
    outputs: dict[int, Any] = field(default_factory=dict)

    def train(self, values: Mapping[str, Tensor], *, whole: bool) -> None:
        """Run forward and backward of all micro-batches in turn and accumulate the gradients.

        Args:
            values: the initial state.
            whole: whether to keep sequences whole; else the slices of a sequence share one graph.
        """
        batch = self.batch.with_whole_sequences() if whole else self.batch
        # Empty results: `self.batch` holds those of the pipeline.
        batch = replace(
            batch, losses={}, outputs={}, loss_weights=None, loss_counts={}, keeps_outputs=False
        )
        self._begin(values, len(batch.inputs))
        self.whole = whole
        options = self.training.options.loss_options
        stage_loss = StageLoss(
            self.training.loss, self.device, options, self.training.seed, self.modules
        )
        assert batch.targets is not None
        pending: list[Tensor] = []
        for row in batch.rows():
            pasts: dict[int, Any] = {}
            for n in row:
                with self._autocast(), collecting_side_losses() as sides:
                    value = self._forward(batch, n, pasts)
                    loss = stage_loss.of(batch, n, value, sides)
                assert batch.loss_weights is not None
                pending.append(_weighted_loss(loss, sides, batch.loss_weights[n], batch.shares[n]))
                self.sides = self.sides or bool(sides)
            # A loss on the joined outputs is computed after the last forward, see `JointLosses`:
            # the backwards can only follow then.
            if options.loss_on == "micro_batch":
                _backward(pending)
        _backward(pending)
        # With the rounding of a pipeline's loss.
        self.loss = float(sum_of_local(batch))

    def train_whole(self, values: Mapping[str, Tensor]) -> None:
        """Run forward and backward of the undivided batch, starting from `values`."""
        x, y = self.batch.whole
        batch = Batch(self.batch.step, [x], [y], [1.0], self.batch.signature, True, whole=(x, y))
        self._begin(values, 1)
        stage_loss = StageLoss(
            self.training.loss, self.device, LossOptions(), self.training.seed, self.modules
        )
        with self._autocast(), collecting_side_losses() as sides:
            loss = stage_loss.of(batch, 0, self._forward(batch, 0, {}), sides)
        _backward([_weighted_loss(loss, sides, 1.0, 1.0)])
        self.loss = float(batch.loss_shares([0]))

    def _begin(self, values: Mapping[str, Tensor], micro_batches: int) -> None:
        """Build the model with these values for a new run."""
        self.modules = reference_model(self.placed, values, self.training, self.device)
        self.loss, self.drew = 0.0, False
        self.outputs.clear()
        for module in self.modules:
            begin(module, micro_batches)

    def _forward(self, batch: Batch, n: int, pasts: dict[int, Any]) -> Any:
        """Run the model on a micro-batch or slice and store its output; see `_run_layers`."""
        value, drew = self._run_layers(batch, n, pasts)
        # A copy, of the output before the loss: some losses work in place.
        self.outputs[n] = map_tensors(lambda leaf: leaf.detach().clone(), value)
        self.drew = self.drew or drew
        return value

    def _run_layers(self, batch: Batch, n: int, pasts: dict[int, Any]) -> tuple[Any, bool]:
        """Run the layers on a micro-batch or slice.

        Args:
            batch: the batch.
            n: number of the micro-batch or slice.
            pasts: by layer, the state that earlier slices have left; updated.

        Returns:
            The output, and whether a layer has drawn random numbers.
        """
        inputs = batch.inputs[n]
        if self.device.type != "cpu":
            inputs = device_batch(batch, self.device).part(INPUTS, n)
        value = map_tensors(Tensor.clone, inputs)  # layers may work in place
        seed, device = self.training.seed, self.device
        drew = False
        with drawing(device, host=True):
            for index, module in enumerate(self.modules):
                if may_draw(module):
                    seed_generators(device, stream_seed(seed, batch.step, index, n), host=True)
                device_generators, host_generators = generator_states(device), host_state()
                if batch.cuts_tokens and has_past(module):
                    value, pasts[index] = module.forward_slice(  # type: ignore[operator]
                        value, pasts.get(index)
                    )
                else:
                    value = module(value)
                drew = drew or has_drawn(device, device_generators)
                drew = drew or not equal_states(host_generators, host_state())
        return value, drew

    def _autocast(self) -> AbstractContextManager[None]:
        """Return the autocast context of the training."""
        dtype = self.training.options.autocast_dtype
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    def grads(self) -> dict[str, Tensor]:
        """Return the dense gradients of the model's parameters on the CPU, by name."""
        traced = self.placed.traced
        grads: dict[str, Tensor] = {}
        for layer, module in zip(traced.layers, self.modules, strict=True):
            for name, parameter in parameters_of(layer.name, module):
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dense = grad.to_dense() if grad.is_sparse else grad
                grads.setdefault(traced.first_name(name), dense.cpu())
        return grads

    def state(self) -> dict[str, Tensor]:
        """Return the model's parameters and buffers on the CPU, by name."""
        tensors: dict[str, Tensor] = {}
        for layer, module in zip(self.placed.traced.layers, self.modules, strict=True):
            for name, tensor in state_of(layer.name, module).items():
                tensors[name] = tensor.cpu()
        return tensors

    def output_leaves(self) -> dict[str, list[Tensor]]:
        """Return the tensors of the last `train`'s outputs, see `output_leaves`."""
        batch = self.batch.with_whole_sequences() if self.whole else self.batch
        return output_leaves(batch, self.outputs)


def output_leaves(batch: Batch, outputs: Mapping[int, Any]) -> dict[str, list[Tensor]]:
    """Return the tensors of all outputs by their place in the output.

    Each list is in the order of the micro-batches; the slices of a micro-batch are joined.
    """
    leaves: dict[str, list[Tensor]] = {}
    for row in batch.rows():
        value = outputs[row[0]] if len(row) == 1 else join([outputs[n] for n in row], dim=1)
        for path, leaf in labelled_leaves(value):
            if isinstance(leaf, Tensor):
                leaves.setdefault(f"output{path}", []).append(leaf.detach().cpu())
    return leaves


def _weighted_loss(loss: Tensor, sides: Sequence[Tensor], weight: float, share: float) -> Tensor:
    """Return a micro-batch's contribution to the loss of the batch.

    Args:
        loss: its loss.
        sides: its side losses.
        weight: the weight of the loss.
        share: the micro-batch's share of the batch, the weight of the side losses.
    """
    if weight == share:
        return sum(sides, loss) * share
    return sum((side * share for side in sides), loss * weight)


def _backward(losses: list[Tensor]) -> None:
    """Run the backward of some losses, and empty the list."""
    differentiable = [loss for loss in losses if loss.requires_grad]
    if differentiable:
        torch.autograd.backward(differentiable)
    losses.clear()
