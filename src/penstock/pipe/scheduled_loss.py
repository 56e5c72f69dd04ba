"""The loss of a `Pipe` that has a schedule, as a node of the caller's autograd graph.

A schedule such as 1F1B runs backwards before the last forward. It therefore needs the loss inside
the pipeline, and has run before the caller calls `loss.backward()`. Its gradients wait in a node,
whose backward multiplies them by the gradient of the loss and hands them on. Autograd then treats
them as any gradient: hooks, `torch.autograd.grad`, accumulation in `.grad`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import SettingError
from penstock.pipe.pipe_run import check_no_graph, second_backward, separate_gradients
from penstock.pipe.scheduled_run import ScheduledRun
from penstock.values.structure import flatten


def scheduled_loss(run: ScheduledRun, value: Any, target: Any, weights: Sequence[Tensor]) -> Tensor:
    """Run forwards and backwards of a batch; return its loss with the gradients behind it.

    Args:
        run: the model under its schedule.
        value: the inputs of the batch.
        target: its targets.
        weights: the parameters that require gradients.

    Raises:
        SettingError: an input requires a gradient, autocast is to float16, or the batch or the
            loss cannot be divided into micro-batches.
        Exception: any exception of a layer or the loss.
    """
    _check_inputs(value)
    _check_autocast()
    batch = run.make_batch(value, target)
    with separate_gradients(weights) as grads:
        loss = run.run(batch)
    result: Tensor = LossNode.apply([loss], grads, *weights)  # type: ignore[no-untyped-call]
    return result


class LossNode(torch.autograd.Function):
    """Hands computed gradients of weights to the caller's graph."""

    @staticmethod
    def forward(
        ctx: Any, loss: Sequence[Tensor], grads: Sequence[Tensor | None], *weights: Tensor
    ) -> Tensor:
        """Return the loss as a result of this node.

        Args:
            ctx: context of autograd.
            loss: the loss, in a list, so that autograd does not take it for an input.
            grads: by weight, the gradient of the loss; None where there is none.
            weights: the weights.
        """
        del weights
        ctx.grads = grads
        return loss[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradients, multiplied by that of the loss.

        Raises:
            RuntimeError: the gradients have been handed on already.
            RunError: create_graph=True.
        """
        check_no_graph()
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise second_backward()
        factor = float(grad)
        if factor != 1.0:
            grads = [None if part is None else part.mul_(factor) for part in grads]
        return None, None, *grads


def _check_inputs(value: Any) -> None:
    """Reject inputs that require gradients: no gradient is computed for them here."""
    for leaf in flatten(value)[0]:
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            raise SettingError(
                f"an input of shape {tuple(leaf.shape)} requires a gradient. With targets, a Pipe "
                "computes gradients of its parameters only: detach() the input; or compute the "
                "loss outside, loss = criterion(model(x), y), with schedule='gpipe'"
            )


def _check_autocast() -> None:
    """Reject float16, whose gradients would underflow before the caller can scale the loss."""
    for device_type in ("cpu", "cuda"):
        enabled = torch.is_autocast_enabled(device_type)
        if enabled and torch.get_autocast_dtype(device_type) is torch.float16:
            raise SettingError(
                "autocast to float16 needs a scaled loss, and with targets a Pipe runs its "
                "backwards before the caller can scale the loss: use torch.bfloat16; or compute "
                "the loss outside, with schedule='gpipe'; or ps.Pipeline with scaler="
            )
