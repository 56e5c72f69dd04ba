"""Checks that losses and gradients are finite, before an update uses them.

The loss of every micro-batch is checked when it has been computed, and the gradients of a stage
once, at its U: one reduction over them, which takes a tenth of the time of an optimizer step. The
micro-batch that brought a non-finite gradient is determined by a small probe after every backward:
the sum of the gradient of a small parameter near the input of the stage, which all gradients of
the layers behind it flow through.
"""

from __future__ import annotations

import cmath
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.batches.batch import Batch
from penstock.errors import NonFinite
from penstock.losses.messages import NO_TARGETS, NO_TARGETS_ADVICE
from penstock.optim.clipping import gradient_norms, norms_of
from penstock.option import OnNonfinite
from penstock.schedule.op import Op
from penstock.stage.gradient_probe import GradientProbe
from penstock.stage.stage import Stage
from penstock.values.sharded import local_part
from penstock.values.structure import tensors_of

_LOGGER = logging.getLogger("penstock")

#: Most elements of a parameter whose gradient is probed after every backward. Their sum takes some
#: microseconds.
_MAX_PROBE = 1 << 16

_ADVICE = (
    "Lower the learning rate, clip the gradients or check the data; on_nonfinite='skip' leaves out "
    "such updates, 'warn' goes on"
)


class _Pending(NamedTuple):
    """A number on a device that must be finite.

    Attributes:
        number: a scalar.
        text: its name.
        micro_batch: the micro-batch after which it was computed.
    """

    number: Tensor
    text: str
    micro_batch: int | None = None


@dataclass
class FiniteCheck:
    """The checks of the stages of one rank.

    Attributes:
        rank: the rank.
        policy: what is done about a loss or gradient that is not finite.
        gradients: whether gradients are checked: not if there is no optimizer, nor if a loss scaler
            checks them.
        has_nonfinite: whether something was not finite since `reset`.
    """

    rank: int
    policy: OnNonfinite
    gradients: bool
    has_nonfinite: bool = False
    _step: int = -1
    _active: bool = False
    _logged_step: int = -1
    # By stage.
    _probes: dict[int, GradientProbe | None] = field(default_factory=dict)
    # On the CPU, the first micro-batch after which the sum of the probe's gradient was not finite.
    # Read at once: sums that are kept until the U cost twice as much on a stage of 100 µs.
    _first_nonfinite: dict[int, int] = field(default_factory=dict)
    # On accelerators, micro-batches, and the sum of the probe's gradient after each.
    _sums: dict[int, list[tuple[int, Tensor]]] = field(default_factory=dict)
    _losses: dict[int, list[_Pending]] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget what was not finite, when an update was skipped or gradients were dropped."""
        self.has_nonfinite = False
        self._first_nonfinite.clear()
        self._sums.clear()
        self._losses.clear()

    def after_loss(self, stage: Stage, batch: Batch, number: int, op: Op) -> None:
        """Check the loss of a micro-batch after the forward of the last stage.

        Args:
            stage: the last stage.
            batch: its batch.
            number: the micro-batch in the batch.
            op: the op.

        Raises:
            NonFinite: the loss is not finite, and the policy is "raise".
        """
        self._step, self._active = batch.step, batch.training and not batch.keeps_outputs
        if not self._active:
            return
        if stage.loss_options.loss_on != "batch":
            self._check_loss(stage, batch, number, op)
            return
        # The last micro-batch of a loss on the whole batch stores the losses of all of them.
        for loss_number in sorted(batch.losses):
            self._check_loss(stage, batch, loss_number, op)

    def _check_loss(self, stage: Stage, batch: Batch, number: int, op: Op) -> None:
        """Check the loss of one micro-batch, if it has one. Arguments as for `after_loss`."""
        loss = batch.losses.get(number)
        if loss is None:
            return
        if not loss.is_cpu:
            pending = _Pending(loss, f"the loss of micro-batch {number}", number)
            self._losses.setdefault(stage.index, []).append(pending)
        elif not math.isfinite(value := loss.item()):
            text, advice = f"the loss of micro-batch {number} is {value}", _ADVICE
            if math.isnan(value) and _has_only_padding(batch, number):
                text, advice = f"{text}, for {NO_TARGETS}", NO_TARGETS_ADVICE
            self._report(text, stage.index, op, number, advice)

    def after_backward(self, stage: Stage, batch: Batch, number: int) -> None:
        """Probe the gradients of a stage after a micro-batch. Arguments as for `after_loss`."""
        # A comparison with one device keeps outputs, and shows NaN by itself.
        self._step, self._active = batch.step, batch.training and not batch.keeps_outputs
        if not (self._active and self.gradients):
            return
        probe = self._probe(stage)
        total = None if probe is None else probe.total()
        if total is None:
            return
        if isinstance(total, Tensor):
            self._sums.setdefault(stage.index, []).append((number, total))
        elif not cmath.isfinite(total):
            self._first_nonfinite.setdefault(stage.index, number)

    def before_update(self, stage: Stage, op: Op, *, streaming: bool = False) -> None:
        """Check the gradients of a stage at its U, before replicas sum them.

        On an accelerator, results are read some batches later, see `DeferredChecks`; those of the
        policy "skip" are read at once.

        Args:
            stage: the stage.
            op: the U.
            streaming: whether forwards of later batches have begun, as in asynchronous schedules.
                Then results are read at the next forward that reads.

        Raises:
            NonFinite: a gradient is not finite, and the policy is "raise".
        """
        if (probe := self._probes.get(stage.index)) is not None:
            probe.release()
        since = self._first_nonfinite.pop(stage.index, None)
        sums, losses = self._sums.pop(stage.index, []), self._losses.pop(stage.index, [])
        if not self._active:
            return
        if stage.device.type == "cpu":
            if self.gradients:
                self._check_on_host(stage, since, op)
        else:
            place = f"the gradient of stage {stage.index} after micro-batch"
            probes = [_Pending(total, f"{place} {number}", number) for number, total in sums]
            self._check_on_device(stage, [*losses, *probes], op)
            checks = stage.runner.checks
            if not streaming and not checks.deferring:
                checks.read()

    def _probe(self, stage: Stage) -> GradientProbe | None:
        """Return the probe of the gradients of a stage, if it has a small parameter."""
        if stage.index not in self._probes:
            parameter = _small_parameter(stage)
            self._probes[stage.index] = None if parameter is None else GradientProbe(parameter)
        return self._probes[stage.index]

    def _check_on_host(self, stage: Stage, since: int | None, op: Op) -> None:
        """Check the gradients of a stage on the CPU.

        Args:
            stage: the stage.
            since: the first micro-batch whose probe was not finite.
            op: the U.
        """
        norms = gradient_norms([*stage.update.parameters, *stage.update.borrowed])
        if all(math.isfinite(norm.item()) for norm in norms):
            return
        # The norm of finite gradients may overflow.
        names = _nonfinite_names(stage)
        if names:
            self._report(_describe(names, since), stage.index, op, since)

    def _check_on_device(self, stage: Stage, entries: list[_Pending], op: Op) -> None:
        """Check losses and gradients of a stage on an accelerator."""
        if self.gradients:
            parameters = [*stage.update.parameters, *stage.update.borrowed]
            # The maximum norm, which does not overflow; a 0 keeps it defined without gradients.
            norms = norms_of(parameters, stage.device, math.inf).float()
            largest = torch.cat([norms.new_zeros(1), norms]).max()
            entries.append(_Pending(largest, f"a gradient of stage {stage.index}"))
        if not entries:
            return
        numbers = torch.stack([entry.number.detach().float().reshape(()) for entry in entries])
        failed = ~torch.isfinite(numbers)
        if self.policy == "skip":
            for has_failed, entry in zip(failed.tolist(), entries, strict=True):
                if has_failed:
                    self._report(f"{entry.text} is not finite", stage.index, op, entry.micro_batch)
            return
        checks = stage.runner.checks
        report = _LOGGER.warning if self.policy == "warn" else None
        for flag, entry in zip(failed.unbind(), entries, strict=True):
            message = f"rank {self.rank} (stage {stage.index}): {entry.text} is not finite"
            if self.policy == "raise":
                message += f". {_ADVICE}"
            checks.add(flag, message, report)

    def _report(
        self, text: str, stage: int, op: Op, micro_batch: int | None, advice: str = _ADVICE
    ) -> None:
        """Raise, or log a line per step.

        Args:
            text: what is not finite.
            stage: index of the stage.
            op: the op that showed it.
            micro_batch: where it comes from; None if that is unknown.
            advice: what to do, for the error.
        """
        self.has_nonfinite = True
        if self.policy == "raise":
            cause = f"{text}; this stage was not updated with it. {advice}"
            raise NonFinite(self.rank, stage, str(op), self._step, cause, micro_batch)
        if self._logged_step != self._step:
            self._logged_step = self._step
            result = "the update is skipped on all ranks" if self.policy == "skip" else "going on"
            _LOGGER.warning(
                "rank %d (stage %d), step %d: %s; %s", self.rank, stage, self._step, text, result
            )


def _has_only_padding(batch: Batch, number: int) -> bool:
    """Return whether a tensor among the targets of a micro-batch is -100, or False, throughout."""
    targets = [] if batch.targets is None else tensors_of(batch.targets[number])
    for target in targets:
        padding = {torch.int64: -100, torch.bool: False}.get(target.dtype)
        if padding is not None and target.numel() and bool((target == padding).all()):
            return True
    return False


def _small_parameter(stage: Stage) -> nn.Parameter | None:
    """Return the smallest trained parameter of the first layer that has one below the limit."""
    trained = {id(parameter) for parameter in stage.update.parameters}
    for layer in stage.layers:
        small = [
            parameter
            for parameter in layer.module.parameters()
            if id(parameter) in trained and parameter.numel() <= _MAX_PROBE
        ]
        if small:
            return min(small, key=nn.Parameter.numel)
    return None


def _nonfinite_names(stage: Stage) -> list[str]:
    """Return the names of the parameters of a stage whose gradients are not finite."""
    names: list[str] = []
    for layer in stage.layers:
        for name, parameter in layer.module.named_parameters():
            if parameter.grad is None:
                continue
            grad = parameter.grad
            values = grad.coalesce().values() if grad.is_sparse else grad
            if not bool(torch.isfinite(local_part(values)).all()):
                names.append(f"{layer.name}.{name}")
    return names


def _describe(names: Sequence[str], since: int | None) -> str:
    """Return a text on the gradients that are not finite.

    Args:
        names: of their parameters.
        since: the first micro-batch that brought one; None if that is unknown.
    """
    more = f" and {len(names) - 1} more parameters" if len(names) > 1 else ""
    origin = "from one of its micro-batches" if since is None else f"from micro-batch {since} on"
    return f"the gradient of {names[0]}{more} is not finite, {origin}"
