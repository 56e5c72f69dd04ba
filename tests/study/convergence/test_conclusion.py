"""What is said of a rule follows from its numbers alone."""

from __future__ import annotations

import pytest

from penstock.study.convergence.conclusion import Outcome, Standing, compare_with_flush, outcome_of
from penstock.study.convergence.tasks import ACCURACY, LOSS

FLUSH = (0.96, 0.97, 0.98)


@pytest.mark.parametrize(
    ("accuracies", "standing"),
    [
        ((0.955, 0.97, 0.97), Standing.NOT_WORSE),
        ((0.90, 0.91, 0.92), Standing.WORSE),
        ((0.995, 1.0, 1.0), Standing.BETTER),
        (
            (0.95, 0.955, 0.959),
            Standing.NOT_WORSE,
        ),  # all below flush's, but the means no further apart than flush's own runs
        ((0.80, 0.95, 0.97), Standing.UNCLEAR),  # a mean far below, but one run among flush's
    ],
)
def test_a_rule_loses_only_beyond_the_spread_over_seeds(runs, accuracies, standing):
    """Three seeds differ by themselves; what they differ by is no finding."""
    assert (
        compare_with_flush(runs("flush", FLUSH), runs("stash", accuracies), ACCURACY).standing
        is standing
    )


def test_a_loss_is_named_with_both_means_and_the_difference(runs):
    """The reader wants the size, not the word."""
    verdict = compare_with_flush(runs("flush", FLUSH), runs("stash", (0.90, 0.91, 0.92)), ACCURACY)
    assert verdict.words == "\N{MINUS SIGN}6.0 points, 91.0 % against 97.0 %"
    assert verdict.difference == pytest.approx(-0.06)


def test_of_a_loss_less_is_better(runs):
    """Test loss is turned the other way round."""
    flush, rule = (
        runs("flush", FLUSH),
        runs("stash", (0.90, 0.91, 0.92)),
    )  # test losses 1 - accuracy
    assert compare_with_flush(flush, rule, LOSS).standing is Standing.WORSE
    assert compare_with_flush(rule, flush, LOSS).standing is Standing.BETTER


@pytest.mark.parametrize(
    ("end", "what"),
    [(0.5, Outcome.TRAINED), (2.29, Outcome.STUCK), (2.32, Outcome.STUCK), (2.5, Outcome.DIVERGED)],
)
def test_a_run_that_ends_where_it_began_has_learned_nothing(run, end, what):
    """A dead network has a finite loss for ever; so has one that has run away."""
    assert outcome_of(run(losses=(2.3, *[end] * 39)))[0] is what


def test_a_run_that_was_given_up_diverged_and_says_where(run):
    """The batch is where to look."""
    assert outcome_of(run(given_up="loss no number at batch 57")) == (
        Outcome.DIVERGED,
        "loss no number at batch 57",
    )


def test_one_run_that_did_not_train_is_the_verdict_whatever_the_others_reach(runs, run):
    """A mean over the survivors would hide it."""
    records = [
        *runs("none", (0.97, 0.97)),
        run("none", seed=2, given_up="loss no number at batch 57"),
    ]
    verdict = compare_with_flush(runs("flush", FLUSH), records, ACCURACY)
    assert verdict.standing is Standing.NOT_TRAINING
    assert verdict.words == "1 of 3 runs: seed 2 diverged, loss no number at batch 57"
    assert verdict.values is not None
    assert verdict.values.values == (0.97, 0.97)


def test_where_flush_itself_fails_nothing_is_said_of_others(runs, run):
    """A learning rate that flush does not stand says nothing about staleness."""
    flush = [*runs("flush", (0.96, 0.97)), run("flush", seed=2, given_up="loss 2e+03 at batch 3")]
    verdict = compare_with_flush(flush, runs("stash", (0.90, 0.91, 0.92)), ACCURACY)
    assert verdict.standing is Standing.UNDECIDED
    assert "flush itself failed in 1 of 3 runs" in verdict.words


def test_one_seed_shows_a_difference_and_says_nothing_of_it(runs):
    """There is no spread to hold it against."""
    verdict = compare_with_flush(runs("flush", (0.97,)), runs("stash", (0.5,)), ACCURACY)
    assert verdict.standing is Standing.UNDECIDED
    assert "one seed" in verdict.words


def test_a_rule_whose_own_seeds_scatter_is_not_called_as_good_as_flush(runs):
    """One bad run of three may be chance or the rule: the text must not decide between them."""
    verdict = compare_with_flush(
        runs("flush", FLUSH), runs("hetpipe", (0.80, 0.97, 0.96)), ACCURACY
    )
    assert verdict.standing is Standing.UNCLEAR
    assert verdict.words.endswith("from 80.0 % to 97.0 %")


def test_without_flush_there_is_nothing_to_compare_with(runs):
    """An interrupted study may have none yet."""
    assert (
        compare_with_flush([], runs("stash", (0.9, 0.9)), ACCURACY).standing is Standing.UNDECIDED
    )
