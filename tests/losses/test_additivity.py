"""The test of how losses add up: what it tries first, what it cannot test, and what it refuses."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest

from penstock.errors import SettingError
from penstock.losses.additivity import AdditivityTest
from penstock.losses.probe import Draws, Reading, ReturnsCount
from penstock.losses.terms import Term


def view_of(
    result, *, sizes=(1, 3), along_tokens=False, divisors=(2.0, 6.0, 8.0), repeated=ValueError("x")
):
    """A view with readings, or an error of the loss; `repeated` are those of parts that have targets
    in common.
    """

    def readings(*, brief):
        view.briefs.append(brief)
        if isinstance(result, Exception):
            raise result
        return result

    def pair_evaluations():
        return tuple(SimpleNamespace(terms=[Term(divisor)]) for divisor in divisors)

    view = SimpleNamespace(
        sizes=sizes,
        along_tokens=along_tokens,
        readings=readings,
        pair_evaluations=pair_evaluations,
        with_repeated_targets=lambda: view_of(repeated, sizes=(1, 4), divisors=(2.0, 8.0, 8.0)),
        briefs=[],
    )
    return view


#: Losses of the parts 2 and 6: a mean over samples, a sum, and by counts of 1 to 1.
MEAN, SUM, HALF = (Reading(2.0, 6.0, joined, 1e-6) for joined in (5.0, 8.0, 4.0))


def weightings(*views, has_counts=False, brief=False):
    """How the loss adds up, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return AdditivityTest().weightings(views, has_counts=has_counts, brief=brief)


def test_a_mean_is_by_sizes_and_a_sum_by_one_each_over_samples_and_over_tokens():
    """Both may differ; counts come first where the graph shows them."""
    along = view_of([SUM], along_tokens=True)
    assert weightings(view_of([MEAN]), along) == {"samples": "shares", "tokens": "sums"}
    assert weightings(view_of([MEAN]), has_counts=True) == {"samples": "counts"}
    assert weightings(view_of([MEAN]), has_counts=False) == {"samples": "shares"}
    equal = view_of([HALF], divisors=(4.0, 4.0, 8.0))
    assert weightings(equal, has_counts=True) == {"samples": "counts"}
    other = view_of([MEAN], divisors=(4.0, 4.0, 8.0))
    assert weightings(other, has_counts=True) == {"samples": "shares"}
    view = view_of([MEAN])
    weightings(view, brief=True)
    weightings(view)
    assert view.briefs == [True, False]


def test_what_fits_nowhere_is_refused_with_the_first_reading_that_does_not():
    """Weights by counts are shown as those of a mean are."""
    with pytest.raises(SettingError, match=r"losses 2 and 6, both joined have 4\. A mean over"):
        weightings(view_of([MEAN, HALF]))
    with pytest.raises(SettingError, match="both joined have 5"):
        weightings(view_of([HALF, MEAN], divisors=(4.0, 4.0, 8.0)), has_counts=True)
    with pytest.raises(SettingError, match="of 1 and 3 tokens"):
        weightings(view_of([HALF], along_tokens=True))


def test_counts_that_fit_over_samples_alone_are_taken_nowhere():
    """Weights by counts and weights by shares are not of one loss."""
    across = view_of([HALF], divisors=(4.0, 4.0, 8.0))
    along = view_of([MEAN], along_tokens=True, divisors=(4.0, 4.0, 8.0))
    with pytest.raises(SettingError, match="both joined have 4"):
        weightings(across, along, has_counts=True)
    both = view_of([Reading(4.0, 4.0, 4.0, 1e-6)], divisors=(4.0, 4.0, 8.0))
    assert weightings(both, has_counts=True) == {"samples": "counts"}
    assert weightings(both, along, has_counts=True) == {"samples": "shares", "tokens": "shares"}


def test_a_bend_is_refused_though_all_values_add_up():
    """It may lie elsewhere later."""
    bent = Reading(2.0, 6.0, 5.0, 1e-6, nonlinear="Abs")
    with pytest.raises(SettingError, match="abs acts on a value to which all samples"):
        weightings(view_of([MEAN, bent]))


def test_what_cannot_be_tested_is_missing_with_one_warning():
    """Where the graph shows divisors the test is only a second opinion."""
    for view in (view_of([]), view_of(ValueError("x")), view_of([MEAN], divisors=(1.0, 1.0, 0.0))):
        assert weightings(view, has_counts=True) == {}
    test = AdditivityTest()
    for error, words in (
        (Draws(), "draws random numbers, others"),
        (ValueError("x"), r"raises on parts of a batch \(ValueError: x\)"),
    ):
        with pytest.warns(UserWarning, match=words):
            assert AdditivityTest().weightings([view_of(error)], has_counts=False) == {}
    views = [view_of(Draws()), view_of(Draws())]
    with pytest.warns(UserWarning, match="draws random numbers") as caught:
        test.weightings(views, has_counts=True)
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="is not finite on parts of a batch"):
        assert AdditivityTest().weightings([view_of([])], has_counts=False) == {}
    with pytest.raises(ReturnsCount):
        weightings(view_of(ReturnsCount()))


def test_parts_with_targets_in_common_add_up_in_the_same_way_or_the_loss_is_refused():
    """A loss may depend on how often a class occurs. One that raises there has passed the test."""
    by_shares, by_counts = Reading(2.0, 7.0, 6.0, 1e-6), Reading(2.0, 7.0, 7.5, 1e-6)
    assert weightings(view_of([MEAN], repeated=[by_shares])) == {"samples": "shares"}
    assert weightings(view_of([MEAN], repeated=[by_counts]), has_counts=True) == {
        "samples": "counts"
    }
    assert weightings(view_of([SUM], along_tokens=True, repeated=[MEAN])) == {"tokens": "sums"}
    words = r"two parts in which the same targets occur, of 1 and 4 .* how often it occurs"
    for view, has_counts in (
        (view_of([MEAN], repeated=[by_counts]), False),
        (view_of([MEAN], repeated=[by_shares]), True),
        (view_of([SUM], repeated=[by_shares]), False),
    ):
        with pytest.raises(SettingError, match=words):
            weightings(view, has_counts=has_counts)
