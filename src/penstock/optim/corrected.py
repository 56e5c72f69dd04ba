"""Corrected: a backward reads an estimate of the weights that its forward read, made of where they
have been going of late.

With τ updates between a forward and its backward, δ the moving average of what an update changes,
and w the newest version:

    backward reads   u = w - τ δ                       (T2, discrepancy correction)
    after an update  δ ← γ δ + (1 - γ) (w' - w),       γ = decay^(1/τ)
    update k has     lr / max(τ, 1)^(1 - min(k / annealing, 1))      (T1, learning-rate
                     rescheduling; k from 0)

Where less than one update lies between, the learning rate is as it is: the paper's formula would
raise it. In the batches of T3, which flush (option warm_up), nothing is stale, so nothing is
corrected or slowed down.

Source: Yang et al. 2021, PipeMare, section 3. τ is the program's own, as `verify` reports it for a
stage; the paper's, for a machine that runs a forward and a backward at once, is (2 (p - 1 - s) + 1)
/ m (option lockstep=1).
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
from penstock.optim.working import Working

#: What the parameters hold.
_NEWEST, _ESTIMATE = "newest", "estimate"

#: Name of δ in a checkpoint, and of the number of updates.
TREND, UPDATES = "trend", "updates"


@final
class Corrected(StageWeights):
    """The newest version, its trend δ, and, while a backward runs, the estimate in the newest
    version's place.
    """

    def __init__(self, site: Site) -> None:
        self._update = site.update
        self._delay = delay_of(site)
        self._annealing = site.options.get("annealing", 0.0)
        self._warm_up = site.options.get("warm_up", 0.0)
        decay = site.options.get("decay", 0.135)
        if not 0 < decay < 1:
            raise SettingError(
                f"weight rule {site.rule.name!r}: decay is above 0 and below 1, not {decay:g}; the paper's is 0.135"
            )
        self._fading = decay ** (1 / self._delay) if self._delay else 0.0
        self._updates = 0
        self._back: list[
            Tensor
        ] = []  # -δ: with this sign each pass over the weights is one operation
        self._working = Working(site.update, newest=_NEWEST)

    def before_forward(self, number: int) -> None:
        """The newest version."""
        del number
        self._working.show(_NEWEST)

    def before_backward(self, number: int) -> None:
        """The estimate; before the first update that is the newest version."""
        del number
        if self._back and self._updates >= self._warm_up:
            self._working.show(
                _ESTIMATE,
                lambda weights: torch._foreach_add_(weights, self._back, alpha=self._delay),
            )

    def finished(self, number: int) -> None:
        """There is nothing to let go."""

    def update(self, version: int) -> None:
        """A step at the rescheduled learning rate, and then the trend."""
        del version
        self._working.begin_step()
        before = self._working.newest_aside() if self._delay else []
        with self._rescheduled():
            self._update.advance()
        if before:
            after = [parameter.data for parameter in self._update.parameters]
            torch._foreach_sub_(before, after)
            self._back = self._back or list(map(torch.zeros_like, after))
            torch._foreach_lerp_(self._back, before, 1 - self._fading)
        self._updates += 1
        self._working.end_step(_NEWEST)

    def drain(self) -> None:
        """The newest version."""
        self._working.restart(_NEWEST)

    def held_bytes(self) -> int:
        """Weights, those put aside, and the trend."""
        return self._working.held_bytes() + sum(tensor.nbytes for tensor in self._back)

    def state(self) -> State:
        """The trend, once there has been an update."""
        return {TREND: [-tensor for tensor in self._back]} if self._back else {}

    def load_state(self, state: State) -> None:
        """Take the trend back; without one, begin without."""
        rows = zip(self._update.parameters, state.get(TREND, ()), strict=False)
        self._back = [
            torch.zeros_like(p.data) if found is None else -found.to(p.data) for p, found in rows
        ]

    def facts(self) -> Mapping[str, float]:
        """How many updates there were."""
        return {UPDATES: self._updates}

    def load_facts(self, facts: Mapping[str, float]) -> None:
        """Take that back."""
        self._updates = int(facts.get(UPDATES, 0))

    @contextmanager
    def _rescheduled(self) -> Iterator[None]:
        """The optimizer's learning rates as T1 has them for the next update."""
        asynchronous = self._updates >= self._warm_up
        exponent = (
            1 - min(self._updates / self._annealing, 1)
            if self._annealing > 0 and asynchronous
            else 0.0
        )
        factor = max(self._delay, 1) ** -exponent
        groups = (
            []
            if factor == 1 or self._update.optimizer is None
            else self._update.optimizer.param_groups
        )
        rates = [group["lr"] for group in groups]
        try:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * factor
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate


def delay_of(site: Site) -> float:
    """τ: updates between a forward and its backward, at this stage.

    Raises:
        SettingError: the formula for lock-step machines is asked for, and nobody says how many
        stages there are.
    """
    if not site.options.get("lockstep", 0.0):
        return site.staleness
    if not site.stages:
        raise SettingError(
            f"weight rule {site.rule.name!r}: lockstep=1 needs to know how many stages there are; leave it away for the "
            "program's own delay"
        )
    micro_batches = next(number for number in itertools.count(1) if site.use(number).batch)
    return (2 * (site.stages - 1 - site.stage) + 1) / micro_batches


@register("corrected")
def corrected(site: Site) -> Corrected:
    """A storage for the newest version, one for the estimate, and one for the trend.

    Raises:
        SettingError: an option makes no sense, or the optimizer has no learning rate to reschedule.
    """
    assert site.update.optimizer is not None
    if any("lr" not in group for group in site.update.optimizer.param_groups):
        raise no_formula(
            site,
            kind_of(site.update.optimizer),
            "it reschedules the learning rate, and this one has none",
        )
    return Corrected(site)
