"""The numeric test of how the losses of two micro-batches add up to that of both; see `probe`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import SettingError
from penstock.losses.messages import WAYS_OUT, nonlinear_in_samples, not_additive
from penstock.losses.probe import Draws, Reading, ReturnsCount, Weighting, consistent
from penstock.losses.terms import UnknownForm
from penstock.losses.view import View


@dataclass
class AdditivityTest:
    """The numeric test of one loss. It warns once if the test is not possible."""

    _warned: bool = False

    def weightings(
        self, views: Sequence[View], *, has_counts: bool, brief: bool = False
    ) -> dict[bool, Weighting]:
        """Return how the loss adds up, over samples (False) and over the tokens of slices (True).

        What cannot be tested is missing.

        Args:
            views: evaluations of the loss.
            has_counts: whether the graph shows divisors, which are then tried first.
            brief: see `probe.readings`.

        Raises:
            ReturnsCount: the loss returns (sum, count).
            SettingError: the losses do not add up in any known way.
        """
        weightings: dict[bool, Weighting] = {}
        for view in views:
            weighting = self._weighting(view, has_counts=has_counts, brief=brief)
            if weighting is not None:
                weightings[view.along_tokens] = weighting
        return weightings

    def _weighting(self, view: View, *, has_counts: bool, brief: bool) -> Weighting | None:
        """Return how the losses of the view's pair add up; None if that cannot be tested."""
        sizes = view.sizes
        total = sum(sizes)
        weights: dict[Weighting, tuple[float, float]] = {
            "shares": (sizes[0] / total, sizes[1] / total),
            "sums": (1.0, 1.0),
        }
        try:
            if has_counts:
                weights = {"counts": _pair_weights(view), **weights}
            readings = view.readings(brief=brief)
        except ReturnsCount:
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
            return None
        weighting = consistent(readings, weights)
        if weighting is None:
            reading = _worst(readings, weights.get("counts", weights["shares"]))
            raise SettingError(not_additive(reading, sizes, weights, view.along_tokens))
        for reading in readings:
            if reading.nonlinear:
                raise SettingError(nonlinear_in_samples(reading.nonlinear, view.along_tokens))
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


def _worst(readings: Sequence[Reading], weights: tuple[float, float]) -> Reading:
    """Return the first reading that the weights do not fit, for the message."""
    for reading in readings:
        if not reading.fits(weights):
            return reading
    return readings[0]


def _pair_weights(view: View) -> tuple[float, float]:
    """Return the weights of both micro-batches of a pair in the joined pair, by their divisors."""
    whole = view.joined_evaluation().terms[0].divisor
    if not whole:
        raise UnknownForm("a pair that counts nothing")
    first, second = (view.evaluation(number).terms[0].divisor / whole for number in view.pair)
    return first, second
