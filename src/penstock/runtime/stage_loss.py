"""The loss of the last stage: its share in the batch's mean, and the gradient that it starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.errors import SettingError
from penstock.runtime.batch import Batch
from penstock.values.structure import map_tensors

Loss = Callable[[Any, Any], Tensor]

#: Gradients that are remembered, by their value: dynamic scales and uneven batches make more of them.
_MOST_STARTS = 64


@dataclass(frozen=True)
class StageLoss:
    """`loss(output, target)`, where it is computed."""

    loss: Loss
    device: torch.device

    def of(self, batch: Batch, micro_batch: int, value: Any, sides: Sequence[Tensor]) -> Any:
        """The micro-batch's mean loss, whose share in the batch's is noted, side losses added; without targets, its outputs are kept
        for the caller.

        Raises:
            SettingError: the loss is not one number.
        """
        if batch.targets is None or batch.keeps_outputs:
            batch.outputs[micro_batch] = map_tensors(Tensor.detach, value)
        if batch.targets is None:
            return None
        target = batch.targets[micro_batch]
        if type(target) is Tensor:
            target = target.to(self.device)
        else:
            target = map_tensors(lambda leaf: leaf.to(self.device), target)
        loss = self.loss(value, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise SettingError(
                f"the loss must be one number, the mean over the samples it is given; this one is {shape}"
            )
        if loss.dim():
            loss = loss.reshape(())
        if micro_batch not in batch.losses:
            whole = loss.detach() + total(sides) if sides else loss.detach()
            batch.losses[micro_batch] = whole * batch.shares[micro_batch]
        return loss


@dataclass
class Starts:
    """Gradients that losses begin with, each made once."""

    _known: dict[tuple[float, torch.dtype], Tensor] = field(default_factory=dict)

    def of(self, value: float, root: Tensor) -> Tensor:
        """The gradient `value` for `root`, which is one number. Nobody may change it."""
        found = self._known.get((value, root.dtype))
        if found is None:
            if len(self._known) >= _MOST_STARTS:
                self._known.clear()
            found = self._known[value, root.dtype] = torch.full_like(root, value)
        return found


def total(terms: Sequence[Tensor]) -> Tensor:
    """The sum of numbers, without their graphs."""
    return torch.stack([term.detach() for term in terms]).sum()
