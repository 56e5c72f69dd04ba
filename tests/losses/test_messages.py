"""Figures in messages on losses that cannot be divided."""

from __future__ import annotations

import pytest

from penstock.losses.messages import (
    WAYS_OUT,
    count_differs,
    infinite_without_weight,
    model_loss,
    nonlinear_in_samples,
    not_additive,
    smoothing_without_weight,
)
from penstock.losses.probe import Reading


@pytest.mark.parametrize(("along_tokens", "unit"), [(False, "samples"), (True, "tokens")])
def test_all_figures_of_a_loss_that_does_not_add_up_are_in_order(along_tokens, unit):
    """Sizes, losses, and what a mean and a sum would be."""
    weights = {"counts": (9.0, 9.0), "shares": (0.25, 0.75), "sums": (1.0, 2.0)}
    text = not_additive(Reading(2.0, 6.0, 7.0, 1e-6), (1, 3), weights, along_tokens)
    assert text == (
        "the loss of a batch is not made of the losses of its micro-batches: two of them, of 1 and 3 "
        f"{unit}, have losses 2 and 6, both joined have 7. A mean over {unit} would be 5, a sum 14. "
        f"Either {unit} see each other in the loss (as in a contrastive one), or it is a mean over "
        f"something else. {WAYS_OUT}"
    )


@pytest.mark.parametrize("joined", [5.0, 8.0])
def test_values_that_add_up_as_a_mean_or_a_sum_point_to_the_gradients(joined):
    """Both are looked at."""
    weights = {"shares": (0.25, 0.75), "sums": (1.0, 1.0)}
    text = not_additive(Reading(2.0, 6.0, joined, 1e-6), (1, 3), weights, along_tokens=False)
    assert f"both joined have {joined:g}. These values add up, their gradients do not." in text
    assert "would be" not in text


def test_other_messages_have_their_subject_and_the_ways_out():
    """In words of the caller."""
    text = nonlinear_in_samples("ClampMin", along_tokens=True)
    assert "mean or sum over tokens: clampmin acts on a value to which all tokens of" in text
    assert "to which all samples of a batch contribute" in nonlinear_in_samples("Abs", False)
    assert "(no graph). Compute the loss from" in model_loss("no graph")
    differs = count_differs(3, 12.5, 7.0)
    assert differs.startswith("the loss of micro-batch 3 is divided by 7, and 12.5 was expected")
    assert "is divided by another number, and 2 was expected" in count_differs(3, 2.0, None)
    assert count_differs(0, 1.0, 0.0).startswith(
        "the loss of micro-batch 0 is divided by 0, and 1 "
    )
    assert infinite_without_weight(4).startswith("the loss of micro-batch 4 is infinite, and its")
    assert infinite_without_weight(4).endswith(WAYS_OUT)
    assert "all targets of micro-batch 5 have a class" in smoothing_without_weight(5)
    for message in (text, model_loss("x"), differs):
        assert message.endswith(WAYS_OUT)
