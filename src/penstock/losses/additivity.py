"""The numeric test of how the losses of two micro-batches add up to that of both.

A `View` evaluates the loss on two micro-batches `a` and `b`, and on both joined, `j`. For some
weights `w_a` and `w_b`, `loss(j) = w_a loss(a) + w_b loss(b)`, for the values and for the gradients
(see `probe`). Three pairs of weights are tried, in this order:

- "counts": the divisors of the loss on `a` and on `b`, each by that on `j`, where the graph of the
  loss shows them;
- "shares": the shares of the samples, or of the tokens, of a mean;
- "sums": 1 and 1, of a sum.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from penstock.errors import SettingError
from penstock.losses.call import NotOneNumber
from penstock.losses.messages import WAYS_OUT, nonlinear_in_samples, not_additive
from penstock.losses.probe import Draws, Reading, ReturnsCount, Weighting, consistent
from penstock.losses.terms import UnknownForm
from penstock.losses.view import View

#: Along what the two parts of a pair are joined: two micro-batches along their samples, two slices
#: of the same sequences along their tokens.
Joined = Literal["samples", "tokens"]


@dataclass
class AdditivityTest:
    """The numeric test of one loss. It warns once if the test is not possible."""

    _warned: bool = False

    def weightings(
        self, views: Sequence[View], *, has_counts: bool, brief: bool = False
    ) -> dict[Joined, Weighting]:
        """Return how the loss adds up over samples, and over tokens if there are slices.

        What cannot be tested is missing. The counts fit in all views, or are in none of the
        results.

        Args:
            views: evaluations of the loss, at most one along samples and one along tokens.
            has_counts: whether the graph shows divisors.
            brief: see `probe.readings`.

        Raises:
            ReturnsCount: the loss returns (sum, count).
            SettingError: the losses do not add up in any known way, or the loss is not one number.
        """
        weightings: dict[Joined, Weighting] = {}
        for view in views:
            weighting = self._weighting(view, has_counts=has_counts, brief=brief)
            if weighting is not None:
                weightings["tokens" if view.along_tokens else "samples"] = weighting
        if has_counts and len(set(weightings.values())) > 1:
            return self.weightings(views, has_counts=False, brief=brief)
        return weightings

    def _weighting(self, view: View, *, has_counts: bool, brief: bool) -> Weighting | None:
        """Return the first weights that fit the view's pair; None if that cannot be tested."""
        weights: dict[Weighting, tuple[float, float]] = {}
        try:
            if has_counts:
                weights["counts"] = _divisor_weights(view)
            readings = view.readings(brief=brief)
        except (ReturnsCount, NotOneNumber):
            raise
        except Draws:
            self._warn("draws random numbers, others for each part of a batch")
            return None
        except Exception as error:  # noqa: BLE001 - a loss may raise anything on partial batches
            # Where the graph shows the divisors, this test is only a second opinion.
            if not has_counts:
                self._warn(f"raises on parts of a batch ({type(error).__name__}: {error})")
            return None
        if not readings:
            if not has_counts:
                self._warn("is not finite on parts of a batch")
            return None
        weights |= _mean_and_sum_weights(view)
        weighting = consistent(readings, weights)
        if weighting is None:
            expected = weights.get("counts", weights["shares"])
            misfit = _first_misfit(readings, expected)
            raise SettingError(not_additive(misfit, view.sizes, weights, view.along_tokens))
        for reading in readings:
            if reading.nonlinear:
                raise SettingError(nonlinear_in_samples(reading.nonlinear, view.along_tokens))
        if not view.along_tokens:
            _check_repeated_targets(view.with_repeated_targets(), weighting)
        return weighting

    def _warn(self, reason: str) -> None:
        """Warn that the loss could not be tested, once."""
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            "whether the losses of micro-batches add up to that of the batch could not be tested, "
            f"for the loss {reason}. Micro-batches count in proportion to what the loss is divided "
            "by where that is known, and to their samples where it is not; compare_with_one_device "
            f"tells whether that is right. {WAYS_OUT}",
            stacklevel=2,
        )


def _check_repeated_targets(view: View, weighting: Weighting) -> None:
    """Refuse a loss that adds up otherwise where both parts have targets in common.

    Micro-batches of few samples often have no class in common. A loss that depends on how often a
    class occurs in the batch then adds up, until two micro-batches have one.

    Args:
        view: a pair whose parts have targets in common.
        weighting: how the losses of two micro-batches add up.

    Raises:
        SettingError: those of the pair add up otherwise.
    """
    weights = _mean_and_sum_weights(view)
    failed: list[Reading] = []
    # A loss may raise anything where targets repeat, and has passed the test where they do not.
    with suppress(Exception):
        if weighting == "counts":
            weights["counts"] = _divisor_weights(view)
        readings = view.readings(brief=True)
        failed = [reading for reading in readings if not reading.fits(weights[weighting])]
    if failed:
        raise SettingError(not_additive(failed[0], view.sizes, weights, False, repeated=True))


def _mean_and_sum_weights(view: View) -> dict[Weighting, tuple[float, float]]:
    """Return the weights of both parts of a pair, for a mean over samples or tokens and for a sum."""
    first, second = view.sizes
    total = first + second
    return {"shares": (first / total, second / total), "sums": (1.0, 1.0)}


def _first_misfit(readings: Sequence[Reading], weights: tuple[float, float]) -> Reading:
    """Return the first reading that the weights do not fit; the first of all if they fit all."""
    return next((reading for reading in readings if not reading.fits(weights)), readings[0])


def _divisor_weights(view: View) -> tuple[float, float]:
    """Return the divisors of the loss on both parts of a pair, each by that on the joined pair.

    Raises:
        UnknownForm: the divisor of the joined pair is 0.
    """
    evaluations = view.pair_evaluations()
    first, second, joined = (evaluation.terms[0].divisor for evaluation in evaluations)
    if not joined:
        raise UnknownForm("a pair that counts nothing")
    return first / joined, second / joined
