"""The loss of a whole batch, computed once on the joined outputs of all micro-batches.

It serves losses in which samples interact. The backward of every micro-batch starts at a root of
its own: a 0 whose backward returns the micro-batch's part of the gradient of the joined loss. That
loss is computed after the last forward, and its gradient when the first backward asks for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from penstock.batches.batch import Batch
from penstock.errors import ScheduleError, SettingError
from penstock.losses.call import LossCall, one_number
from penstock.losses.messages import NO_GRAPH
from penstock.schedule.op import BACKWARD_STARTS, Kind, Schedule
from penstock.values.structure import flatten, tensors_of, unflatten


def check_joint(schedule: Schedule) -> None:
    """Refuse a schedule whose last stage starts a backward before all forwards have run.

    Raises:
        ScheduleError: it does, or several ranks hold the last stage.
    """
    if schedule.micro_batches == 1:
        return
    advice = (
        "Take a schedule that does, such as gpipe, or 1f1b with micro_batches=1; or a loss that is "
        "a mean or sum over samples, which needs no loss_on"
    )
    last_stage, ranks = schedule.stages - 1, schedule.ranks_of_stage[-1]
    if not schedule.synchronous:
        raise ScheduleError(
            "loss_on='batch' needs all outputs of a batch before the first backward, and "
            f"{schedule.name} is asynchronous. {advice}"
        )
    if len(ranks) > 1:
        raise ScheduleError(
            f"loss_on='batch' needs all outputs of a batch on one rank, and {schedule.name} runs "
            f"the last stage on ranks {', '.join(map(str, ranks))}. {advice}"
        )
    kinds = [op.kind for op in schedule.programs[ranks[0]] if op.stage == last_stage]
    before_backwards = itertools.takewhile(lambda kind: kind not in BACKWARD_STARTS, kinds)
    early_forwards, forwards = [*before_backwards].count(Kind.F), kinds.count(Kind.F)
    if early_forwards < forwards:
        raise ScheduleError(
            "loss_on='batch' needs all outputs of a batch before the first backward, and "
            f"{schedule.name} begins the last stage's backwards after {early_forwards} "
            f"of {forwards} forwards. {advice}"
        )


@dataclass
class _Joint:
    """The outputs of one batch, the loss on all of them, and its gradients.

    Attributes:
        batch: the batch.
        outputs: by micro-batch, its output without its graph.
        leaves: by micro-batch, the tensors of its output.
        loss: the loss; None until all outputs are there.
        grads: by micro-batch, the gradients of its tensors; None until the first backward.
    """

    batch: Batch
    outputs: dict[int, Any] = field(default_factory=dict)
    leaves: dict[int, list[Tensor]] = field(default_factory=dict)
    loss: Tensor | None = None
    grads: dict[int, list[Tensor]] | None = None

    def add(self, number: int, value: Any) -> None:
        """Add the output of one micro-batch, without its graph."""
        leaves, structure = flatten(value)
        parts = [
            leaf.detach().requires_grad_(self.batch.training and leaf.is_floating_point())
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in leaves
        ]
        self.outputs[number] = unflatten(structure, parts)
        self.leaves[number] = [leaf for leaf in parts if isinstance(leaf, Tensor)]

    def grads_of(self, number: int, start: Tensor) -> list[Tensor]:
        """Return the gradients of one micro-batch's outputs, given that of the loss."""
        if self.grads is None:
            self.grads = self._all_grads(start)
        return self.grads[number]

    def _all_grads(self, start: Tensor) -> dict[int, list[Tensor]]:
        """Return the gradients of all outputs, by micro-batch, and drop the graph of the loss."""
        assert self.loss is not None
        trained = {
            number: [leaf for leaf in self.leaves[number] if leaf.requires_grad]
            for number in sorted(self.leaves)
        }
        inputs = [leaf for leaves in trained.values() for leaf in leaves]
        grads: Sequence[Tensor | None] = [None] * len(inputs)
        if self.loss.requires_grad:
            with torch.enable_grad():
                grads = torch.autograd.grad(
                    self.loss, inputs, start.to(self.loss.dtype), allow_unused=True
                )
        self.loss = self.loss.detach()
        # Leaves that the loss does not depend on have no gradient, and take zeros.
        filled = iter(
            torch.zeros_like(leaf) if grad is None else grad
            for leaf, grad in zip(inputs, grads, strict=True)
        )
        return {number: [next(filled) for _ in leaves] for number, leaves in trained.items()}


class _Part(Function):
    """A 0 whose backward returns a micro-batch's part of the gradient of the joined loss."""

    @staticmethod
    def forward(
        ctx: Any, joint: _Joint, number: int, places: list[int], *outputs: Tensor
    ) -> Tensor:
        """Return a 0, and note for which micro-batch and which of its outputs."""
        ctx.joint, ctx.number, ctx.places = joint, number, places
        return outputs[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, start: Tensor) -> Any:
        """Return the gradients of the micro-batch's outputs in the joined loss."""
        grads = ctx.joint.grads_of(ctx.number, start)
        return (None, None, None, *[grads[place] for place in ctx.places])


@dataclass
class JointLosses:
    """The joined losses of one stage.

    Attributes:
        call: the loss.
    """

    call: LossCall
    _current: _Joint | None = None

    def of(self, batch: Batch, number: int, value: Any) -> tuple[Tensor, Tensor]:
        """Return the root of one micro-batch's backward, and its part of the reported loss.

        The part is the loss of the batch for the last micro-batch, and 0 for all others.

        Raises:
            SettingError: an output has no samples.
        """
        if self._current is None or self._current.batch is not batch:
            self._current = _Joint(batch)
        joint = self._current
        # A recomputed forward comes a second time.
        if number not in joint.outputs:
            joint.add(number, value)
        share = torch.zeros((), device=self.call.device)
        if joint.loss is None and len(joint.outputs) == len(batch.inputs):
            joint.loss = self._loss(joint)
            share = joint.loss.detach()
            if not batch.training:
                self._current = None
        return self._root(joint, number, value), share

    def _loss(self, joint: _Joint) -> Tensor:
        """Return the loss on the joined outputs, with its graph in training.

        Raises:
            SettingError: it has no graph in training.
        """
        batch = joint.batch
        with torch.set_grad_enabled(batch.training):
            output = batch.joined(joint.outputs)
            loss = self.call(batch, -1, output, self.call.whole_target(batch))
            if type(loss) is tuple and len(loss) == 2:
                loss = loss[0] / loss[1]
            number = one_number(loss)
        if batch.training and not number.requires_grad:
            raise SettingError(NO_GRAPH)
        return number

    def _root(self, joint: _Joint, number: int, value: Any) -> Tensor:
        """Return the root of one micro-batch's backward; without a graph if it has no backward."""
        floats = [leaf for leaf in tensors_of(value) if leaf.is_floating_point()]
        # Among the floating-point leaves, all of which have a gradient in `_Joint`.
        places = [place for place, leaf in enumerate(floats) if leaf.requires_grad]
        if not places or not torch.is_grad_enabled():
            return torch.zeros((), device=self.call.device)
        outputs = [floats[place] for place in places]
        root: Tensor = _Part.apply(joint, number, places, *outputs)  # type: ignore[no-untyped-call]
        return root
