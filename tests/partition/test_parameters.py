"""Parameter counts through the method."""

from __future__ import annotations

from penstock.partition.balanced import partition_balanced
from penstock.partition.catalogue import partition


def test_parameters_are_what_is_balanced(make_profile):
    """Time must not matter: the method is there for memory."""
    profile = make_profile([100, 0, 0, 0, 0, 0, 0, 100], parameters=[5, 1, 1, 1, 1, 1, 1, 5])
    assert partition(profile, 3, "parameters") == [2, 5, 1]


def test_a_model_without_parameters_is_still_cut(make_profile):
    """All weights 0 is a tie everywhere; DeepSpeed's rule for ties then makes every stage but the
    first a single layer.
    """
    assert (
        partition(make_profile([1] * 5, parameters=[0] * 5), 3, "parameters")
        == partition_balanced([0] * 5, 3)
        == [3, 1, 1]
    )


def test_counts_beyond_the_digits_of_a_float_are_balanced(make_profile):
    """Counts are integers of any size; only their ratio matters."""
    assert partition(make_profile([1] * 4, parameters=[10**18] * 4), 2, "parameters") == [2, 2]
