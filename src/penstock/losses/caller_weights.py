"""Counts of micro-batches by the caller's `loss_weight`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.batches.batch import Batch
from penstock.errors import SettingError
from penstock.losses.call import LossCall


@dataclass(frozen=True)
class CallerCounts:
    """The counts that a function of the caller returns for the targets of micro-batches.

    Attributes:
        loss_weight: the function.
        call: the loss, which knows where targets are.
    """

    loss_weight: Callable[[Any], Any]
    call: LossCall

    def of(self, batch: Batch) -> list[float]:
        """Return the counts of all micro-batches.

        Raises:
            SettingError: one is not a finite number, or below 0.
        """
        counts = self._host_counts(batch)
        return self._counts(batch, self.call.target) if counts is None else counts

    def _host_counts(self, batch: Batch) -> list[float] | None:
        """Return the counts for targets in host memory, without waiting for the device; None if
        there are none, or the function fails on them.
        """
        if self.call.host_target(batch, None) is None:
            return None
        try:
            return self._counts(batch, self.call.host_target)
        except Exception:  # noqa: BLE001 - it will be called with targets on the device
            self.call.reads_host_targets = False
            return None

    def _counts(self, batch: Batch, target_of: Callable[[Batch, int], Any]) -> list[float]:
        """Return the counts of all micro-batches for their targets in one place."""
        counts: list[float] = []
        for number in batch.numbers:
            count = self.loss_weight(target_of(batch, number))
            counts.append(number_of(count, number))
        return counts


def number_of(count: Any, micro_batch: int) -> float:
    """Return the result of `loss_weight` for a micro-batch as a number.

    Raises:
        SettingError: it is not a finite number, or below 0.
    """
    if isinstance(count, Tensor) and count.numel() == 1:
        count = count.item()
    is_number = isinstance(count, (int, float)) and not isinstance(count, bool)
    if not is_number or not 0 <= count < math.inf:
        raise SettingError(
            "loss_weight must return one finite number of 0 or more for the targets of a micro-batch; "
            f"for micro-batch {micro_batch} it returned "
            f"{count if isinstance(count, (int, float)) else type(count).__name__}"
        )
    return float(count)
