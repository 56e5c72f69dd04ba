"""PipeMare: a backward reads an extrapolation of the weights that its forward read.

With τ updates between a forward and its backward, δ the moving average of the change per update,
and w the newest version:

    backward reads   u = w - τ δ                       (T2, discrepancy correction)
    after an update  δ ← γ δ + (1 - γ) (w' - w),       γ = decay^(1/τ)
    update k has     lr / max(τ, 1)^(1 - min(k / annealing, 1))      (T1, learning-rate
                     rescheduling; k from 0)

With τ below 1 the learning rate is unchanged: the paper's formula would raise it. During the
warm-up T3, whose batches flush the pipeline (option warm_up), nothing is stale, so there is neither
correction nor rescheduling.

Source: Yang et al. 2021, PipeMare, section 3. τ is the program's own, as `verify` reports it for a
stage. The paper's τ, for a machine that runs a forward and a backward at once, is (2 (p - 1 - s) +
1) / m (option lockstep=1).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from penstock.errors import SettingError
from penstock.optim.catalogue import kind_of, no_formula, register
from penstock.optim.stage_weights import Site, StageWeights, State
from penstock.optim.working_weights import WorkingWeights

#: Names of the contents of the parameters, see `WorkingWeights`.
_NEWEST, _ESTIMATE = "newest", "estimate"

#: Names in a checkpoint, of δ and of the number of updates.
TREND, UPDATES = "trend", "updates"


@final
class Corrected(StageWeights):
    """The newest version, its trend δ, and, while a backward runs, the estimate in its place."""

    def __init__(self, site: Site) -> None:
        self._update = site.update
        self._delay = weight_delay(site)
        self._annealing = site.options.get("annealing", 0.0)
        self._warm_up = site.options.get("warm_up", 0.0)
        decay = site.options.get("decay", 0.135)
        if not 0 < decay < 1:
            raise SettingError(
                f"weight rule {site.rule.name!r}: decay is above 0 and below 1, not {decay:g}; "
                "the paper's is 0.135"
            )
        self._gamma = decay ** (1 / self._delay) if self._delay else 0.0
        self._updates = 0
        # -δ: with this sign each pass over the weights is a single operation.
        self._negative_trend: list[Tensor] = []
        self._working = WorkingWeights(site.update, newest=_NEWEST)

    def before_forward(self, number: int) -> None:
        """Set the parameters to the newest version."""
        del number
        self._working.show(_NEWEST)

    def before_backward(self, number: int) -> None:
        """Set the parameters to the estimate; before the first update, the newest version."""
        del number
        if self._negative_trend and self._updates >= self._warm_up:
            self._working.show(
                _ESTIMATE,
                lambda weights: torch._foreach_add_(
                    weights, self._negative_trend, alpha=self._delay
                ),
            )

    def finished(self, number: int) -> None:
        """Do nothing: no version is kept for a micro-batch."""

    def update(self, version: int) -> None:
        """Step at the rescheduled learning rate, then update the trend."""
        del version
        self._working.begin_step()
        before = self._working.copy_newest() if self._delay else []
        with self._t1_learning_rates():
            self._update.advance()
        if before:
            after = [parameter.data for parameter in self._update.parameters]
            torch._foreach_sub_(before, after)
            self._negative_trend = self._negative_trend or list(map(torch.zeros_like, after))
            torch._foreach_lerp_(self._negative_trend, before, 1 - self._gamma)
        self._updates += 1
        self._working.end_step(_NEWEST)

    def drain(self) -> None:
        """Set the parameters to the newest version."""
        self._working.restart(_NEWEST)

    def held_bytes(self) -> int:
        """Return the bytes of weights, the copy of the newest version, and the trend."""
        return self._working.held_bytes() + sum(tensor.nbytes for tensor in self._negative_trend)

    def state(self) -> State:
        """Return the trend, once there has been an update."""
        return {TREND: [-tensor for tensor in self._negative_trend]} if self._negative_trend else {}

    def load_state(self, state: State) -> None:
        """Restore the trend; without one, begin without."""
        rows = zip(self._update.parameters, state.get(TREND, ()), strict=False)
        self._negative_trend = [
            torch.zeros_like(parameter.data) if trend is None else -trend.to(parameter.data)
            for parameter, trend in rows
        ]

    def facts(self) -> Mapping[str, float]:
        """Return the number of updates."""
        return {UPDATES: self._updates}

    def load_facts(self, facts: Mapping[str, float]) -> None:
        """Restore the number of updates."""
        self._updates = int(facts.get(UPDATES, 0))

    @contextmanager
    def _t1_learning_rates(self) -> Iterator[None]:
        """Set the optimizer's learning rates by T1 for one update, and restore them afterwards."""
        is_asynchronous = self._updates >= self._warm_up
        exponent = 0.0
        if self._annealing > 0 and is_asynchronous:
            exponent = 1 - min(self._updates / self._annealing, 1)
        factor = max(self._delay, 1) ** -exponent
        optimizer = self._update.optimizer
        groups = [] if factor == 1 or optimizer is None else optimizer.param_groups
        rates = [group["lr"] for group in groups]
        try:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * factor
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate


def weight_delay(site: Site) -> float:
    """Return τ: the number of updates between a forward and its backward at this stage.

    Raises:
        SettingError: with lockstep=1, the number of stages is unknown.
    """
    if not site.options.get("lockstep", 0.0):
        return site.staleness
    if not site.stages:
        raise SettingError(
            f"weight rule {site.rule.name!r}: lockstep=1 needs the number of stages, which is "
            "not given here; omit it to use the program's own delay"
        )
    # The first micro-batch of batch 1 has the number of micro-batches of batch 0.
    micro_batches = next(number for number in itertools.count(1) if site.use(number).batch)
    return (2 * (site.stages - 1 - site.stage) + 1) / micro_batches


@register("corrected")
def corrected(site: Site) -> Corrected:
    """Return weights with memory for the newest version, the estimate and the trend.

    Raises:
        SettingError: an option is out of range, or the optimizer has no learning rate.
    """
    assert site.update.optimizer is not None
    if any("lr" not in group for group in site.update.optimizer.param_groups):
        raise no_formula(
            site,
            kind_of(site.update.optimizer),
            "it reschedules the learning rate, which this optimizer does not have",
        )
    return Corrected(site)
