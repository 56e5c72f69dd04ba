"""Predictions: what follows from their seconds, and the text of an objective."""

from dataclasses import replace

import pytest

from penstock.errors import SettingError
from penstock.plan.prediction import Candidate, Objective, Prediction
from penstock.schedule.recompute import Recompute


def test_speed_up_and_gap_are_ratios_of_seconds():
    """One device over a step, and a step over the bound; without them 1, and no gap."""
    prediction = Prediction(0.5, 0.2, (1,), 32.0, 2.0, lower_bound_s=0.4)
    assert prediction.speed_up == 4.0
    assert prediction.gap == pytest.approx(0.25)
    assert replace(prediction, step_s=0.0).speed_up == 1.0
    assert replace(prediction, lower_bound_s=0.0).gap is None


def test_a_candidate_takes_the_name_of_a_recompute_policy():
    """Plans on disk have names; an unknown one is refused."""
    candidate = Candidate("1f1b", 2, 4, "always", (1, 1), 0.5, 1, "")
    assert candidate.recompute is Recompute.ALWAYS
    with pytest.raises(SettingError, match="recompute is one of"):
        replace(candidate, recompute="often")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0.45, "s", "x 450.0 ms"), (2048, "bytes", "x 2.0 KiB"), (1.25, "1", "x 1.25")],
)
def test_an_objective_prints_with_its_unit(value, unit, text):
    """Papers make least seconds, bytes, or a plain number."""
    assert str(Objective("x", value, unit)) == text
