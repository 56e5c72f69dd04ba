"""Checks of values on an accelerator whose results the host reads some batches later.

A result that is read at once makes the host wait until the device has done all its work, and the
device then waits until the host has launched more. So results stay on the device. In batches 1, 2,
4, 8, 16 and from then on in every 16th batch they are read at once. All others are read at the next
of these batches, and before anything that the weights have come to leaves the pipeline: evaluation,
`state_dict`, `save`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.values.capture import is_capturing
from penstock.values.rare_checks import is_due

#: In every batch whose number is a multiple of this, results are read at once. One wait in 16
#: batches takes less than a thousandth of the time of a step.
PERIOD = 16


class DeferredChecks:
    """The checks of one stage.

    Args:
        device: the device of the stage. On the CPU nothing is deferred.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_host = device.type == "cpu"
        self._batches = 0
        self._step = -1
        # Whether the check failed (a boolean scalar on the device), what to say then, the step, and
        # what receives a message that is no error.
        self._pending: list[tuple[Tensor, str, int, Callable[[str], None] | None]] = []

    def begin(self, step: int) -> None:
        """Begin a batch, unless it is the one that was begun last.

        Args:
            step: number of batches trained before it.

        Raises:
            RunError: a check of an earlier batch has failed.
        """
        if self._on_host or step == self._step:
            return
        self._step = step
        self._batches += 1
        if not self.deferring:
            self.read()

    @property
    def deferring(self) -> bool:
        """Whether the results of this batch's checks are read later."""
        if self._on_host:
            return False
        if is_capturing(self._device):
            return True  # a read would fail; what a graph leaves is read after it has run
        return not is_due(self._batches) and self._batches % PERIOD != 0

    @property
    def pending(self) -> bool:
        """Whether there are results that have not been read."""
        return bool(self._pending)

    def add(
        self, failed: Tensor, message: str, report: Callable[[str], None] | None = None
    ) -> None:
        """Store the result of a check.

        Args:
            failed: a boolean scalar on the device.
            message: what to say if it is true.
            report: receives the message if the failure is no error.
        """
        self._pending.append((failed, message, self._step, report))

    def read(self) -> None:
        """Read all results, which waits for the device.

        Raises:
            RunError: a check has failed.
        """
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        failures = torch.stack([failed for failed, *_ in pending]).tolist()
        for failed, (_, message, step, report) in zip(failures, pending, strict=True):
            if failed and report is not None:
                report(f"{message}, in the batch of step {step}")
            elif failed:
                raise RunError(
                    f"{message}. This was seen in the batch of step {step}, and on an accelerator "
                    "it is reported later: the weights may have been updated with it since. "
                    "Continue from a checkpoint; save() writes none before all checks have passed"
                )

    def clear(self) -> None:
        """Drop the results of batches that failed."""
        self._pending.clear()
