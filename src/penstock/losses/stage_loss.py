"""The loss on the last stage: its weight in the loss of the batch, and its initial gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.batches.batch import Batch
from penstock.errors import SettingError
from penstock.losses.call import LossCall, one_number
from penstock.losses.joint import JointLosses
from penstock.losses.loss_weights import LossWeights
from penstock.losses.messages import NO_GRAPH, count_differs, infinite_without_weight
from penstock.losses.terms import same
from penstock.losses.view import View
from penstock.values.deferred_checks import DeferredChecks
from penstock.values.structure import map_tensors, tensors_of

#: `loss(output, target)`, to one number or to (sum, count).
Loss = Callable[[Any, Any], Any]

#: Initial gradients that are cached, by their value. Equal micro-batches need one; dynamic loss
#: scales and uneven batches need ever more.
_MOST_STARTS = 64


@dataclass(frozen=True)
class LossOptions:
    """How a loss is divided into micro-batches; see the arguments of `Pipeline`."""

    loss_weight: Callable[[Any], Any] | None = None
    loss_on: str = "micro_batch"


@dataclass
class StageLoss:
    """The loss function where it is computed.

    Attributes:
        loss: the loss function of the caller.
        device: the device of the stage.
        options: how the loss is divided.
        seed: seed of the random numbers that the loss draws.
        layers: the modules of the stage.
        checks: receives the results of checks that are read later; None to read all at once.
    """

    loss: Loss
    device: torch.device
    options: LossOptions = field(default_factory=LossOptions)
    seed: int = 0
    layers: Sequence[nn.Module] = ()
    checks: DeferredChecks | None = None

    def __post_init__(self) -> None:
        self._call = LossCall(self.loss, self.device, self.seed)
        self._weights = LossWeights(self._call, self.options.loss_weight, self.layers)
        self._joint = JointLosses(self._call) if self.options.loss_on == "batch" else None
        self._on_host = self.device.type == "cpu"
        # Whether a loss had a graph: then one without is that of a micro-batch in which nothing
        # counts, for which the function of the caller may return a constant.
        self._has_graph = False

    def prepare(self, batch: Batch) -> None:
        """Count the weights of a batch's losses before its first output is there, if possible."""
        if batch.targets is not None and batch.loss_weights is None and self._joint is None:
            batch.loss_weights = self._weights.known(batch)

    def of(self, batch: Batch, micro_batch: int, value: Any, sides: Sequence[Tensor]) -> Any:
        """Return the loss of a micro-batch, and store its part of the reported loss.

        Without targets, outputs are stored for the caller instead.

        Args:
            batch: the batch.
            micro_batch: number of the micro-batch or slice.
            value: the output of the model.
            sides: side losses, which are added to the reported loss.

        Raises:
            SettingError: the loss is not one number, or the losses of micro-batches do not add up
                to that of the batch.
        """
        if batch.targets is None or batch.keeps_outputs:
            batch.outputs[micro_batch] = map_tensors(Tensor.detach, value)
        if batch.targets is None:
            return None
        if self._joint is not None and len(batch.inputs) > 1:
            return self._joint_loss(batch, micro_batch, value, sides)
        weights = batch.loss_weights
        if weights is None:
            weights = batch.loss_weights = self._weights.of(batch, micro_batch, value)
        weight = weights[micro_batch]
        if weight and self._call.is_torchs and not (batch.loss_counts or sides):
            return self._torch_loss(batch, micro_batch, value, weight)
        loss = self._call(batch, micro_batch, value, self._call.target(batch, micro_batch))
        counted = type(loss) is tuple
        loss = self._sum_of_counted(batch, micro_batch, loss) if counted else one_number(loss)
        if not (self._has_graph or sides):
            self._check_graph(batch, micro_batch, value, loss)
        if weight == 0.0:
            # A weight of 0 would not remove a NaN, such as the mean over no tokens: 0 x NaN is NaN.
            self._refuse_infinity(micro_batch, loss.detach())
            loss = zero_loss(value, loss)
        elif batch.loss_counts and not counted and self.options.loss_weight is None:
            self._weights.check(batch, micro_batch, loss)
        # A recomputed forward comes a second time; the first loss is the one that is reported.
        if micro_batch not in batch.losses:
            batch.losses[micro_batch] = reported_loss(batch, micro_batch, loss, sides)
        return loss

    @property
    def may_use_parameters(self) -> bool:
        """See `LossCall.may_use_parameters`."""
        return self._call.may_use_parameters

    def targets(self, batch: Batch, number: int) -> list[Tensor]:
        """Return the tensors among the targets of a micro-batch or slice, on the device."""
        if batch.targets is None:
            return []
        target = batch.targets[number] if self._on_host else self._call.target(batch, number)
        return tensors_of(target)

    def _torch_loss(self, batch: Batch, number: int, value: Any, weight: float) -> Tensor:
        """Return the loss of a micro-batch for one of torch's own losses, which needs no checks.

        This is the fast path of training. Arguments and result are as in `of`.
        """
        assert batch.targets is not None
        target = batch.targets[number]
        if type(target) is not Tensor or not (self._on_host and target.is_cpu):
            target = self._call.target(batch, number)
        loss: Tensor = self._call.loss(value, target)
        if loss.dim():
            loss = one_number(loss)
        if number not in batch.losses:
            batch.losses[number], batch.loss_factors[number] = loss.detach(), weight
        return loss

    def _sum_of_counted(self, batch: Batch, number: int, loss: tuple[Any, ...]) -> Tensor:
        """Return the sum of a loss of the form (sum, count), whose weight is 1 / the batch's count.

        Raises:
            SettingError: the count is not the expected one.
        """
        if len(loss) != 2:
            raise SettingError(
                f"the loss returned a tuple of {len(loss)} values; it must return one number, or "
                "(sum, count)"
            )
        total, count = one_number(loss[0]), loss[1]
        if len(batch.inputs) == 1:
            if isinstance(count, Tensor) and not count.is_cpu:
                return total / count.detach().reshape(()).to(total.dtype)  # the host need not wait
            return total / float(count)
        expected = batch.loss_counts.get(number)
        if expected is None:
            raise SettingError(
                f"the loss returned (sum, count) for micro-batch {number}, and one number where it "
                "was asked before"
            )
        self._check_count(number, expected, count)
        if self.options.loss_weight is not None:
            whole = sum(batch.loss_counts.values())
            batch.loss_weights = [1.0 / whole if whole else 0.0] * len(batch.inputs)
        return total

    def _refuse_infinity(self, number: int, loss: Tensor) -> None:
        """Refuse an infinite loss of a micro-batch of weight 0: a sum other than 0, divided by 0.

        Such a sum counts in the loss of the batch, where the divisor is not 0.

        Raises:
            SettingError: the loss is infinite. On an accelerator see `_check_count`.
        """
        if self.checks is not None and self.checks.deferring:
            self.checks.add(loss.isinf(), infinite_without_weight(number))
        elif bool(loss.isinf()):
            raise SettingError(infinite_without_weight(number))

    def _check_count(self, number: int, expected: float, count: Any) -> None:
        """Compare the count that a loss has returned with the expected one.

        Raises:
            SettingError: they differ. Of a count on an accelerator this is mostly reported in a
                later batch, see `DeferredChecks`.
        """
        on_device = isinstance(count, Tensor) and not count.is_cpu
        if on_device and self.checks is not None and self.checks.deferring:
            # As `same`, but a NaN differs.
            difference = (count.detach().double() - expected).abs().reshape(())
            failed = ~(difference <= max(1e-5 * abs(expected), 1e-12))
            self.checks.add(failed, count_differs(number, expected, None))
        elif not same(expected, float(count), 1e-5):
            raise SettingError(count_differs(number, expected, float(count)))

    def _check_graph(self, batch: Batch, number: int, value: Any, loss: Tensor) -> None:
        """Refuse a loss without a gradient, if that of the whole batch has none either.

        Raises:
            SettingError: nothing would be trained.
        """
        self._has_graph = loss.requires_grad
        if self._has_graph or not any(leaf.requires_grad for leaf in tensors_of(value)):
            return
        if not View(self._call, batch, number, value, number).has_graph():
            raise SettingError(NO_GRAPH)

    def _joint_loss(self, batch: Batch, number: int, value: Any, sides: Sequence[Tensor]) -> Tensor:
        """Return the root of a micro-batch's backward for `loss_on="batch"`, see `JointLosses`."""
        assert self._joint is not None
        batch.loss_weights = [1.0] * len(batch.inputs)
        loss, share = self._joint.of(batch, number, value)
        if number not in batch.losses:
            batch.losses[number] = reported_loss(batch, number, one_number(share), sides)
        return loss


def reported_loss(batch: Batch, number: int, loss: Tensor, sides: Sequence[Tensor]) -> Tensor:
    """Return a micro-batch's part of the reported loss.

    It is the loss times its weight, plus the side losses times the micro-batch's share of the
    samples.
    """
    assert batch.loss_weights is not None
    weight, share = batch.loss_weights[number], batch.shares[number]
    if not sides:
        return loss.detach() * weight
    if weight == share:
        return (loss.detach() + total(sides)) * share
    return loss.detach() * weight + total(sides) * share


def zero_loss(value: Any, loss: Tensor) -> Tensor:
    """Return a loss of 0 in the dtype of `loss`, with gradients of 0 for all outputs of the model.

    The sums over no elements connect the 0 with the graph, but read no value that may be NaN.
    """
    leaves = [leaf for leaf in tensors_of(value) if leaf.requires_grad]
    # Where the model computes its loss itself, that is one of its outputs, and its own backward may
    # divide by 0.
    outputs = [leaf for leaf in leaves if leaf.dim()] or leaves
    zeros = [leaf.reshape(-1)[:0].sum().to(loss.dtype) for leaf in outputs]
    return sum(zeros, torch.zeros_like(loss.detach()))


@dataclass
class Starts:
    """Initial gradients of losses, cached by value and dtype."""

    _grads: dict[tuple[float, torch.dtype], Tensor] = field(default_factory=dict)

    def of(self, value: float, root: Tensor) -> Tensor:
        """Return the gradient `value` for `root`, which is one number. It must not be changed."""
        grad = self._grads.get((value, root.dtype))
        if grad is None:
            if len(self._grads) >= _MOST_STARTS:
                self._grads.clear()
            grad = self._grads[value, root.dtype] = torch.full_like(root, value)
        return grad


def total(terms: Sequence[Tensor]) -> Tensor:
    """Return the sum of zero-dimensional tensors, without their graphs."""
    return torch.stack([term.detach() for term in terms]).sum()
