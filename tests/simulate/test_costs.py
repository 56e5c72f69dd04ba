"""Costs: what is taken and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import SettingError
from penstock.simulate.costs import Costs


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf"), "3", "abc", [1, -1], [1, float("nan")], (1, "2"), ["x"], [None],
                                 [[1, 2]], 10**400, [10**400], 1j, {"a": 1}])  # fmt: skip
@pytest.mark.parametrize("name", ["forward", "transfer", "activation_bytes"])
def test_what_is_no_finite_amount_is_refused_by_name(name, bad):
    """Text of digits inside a list was once taken for a number, and other text escaped as Python's own error."""
    with pytest.raises(SettingError, match=rf"costs: {name} has .*; seconds and bytes are finite and not below 0"):
        Costs(**{name: bad})


def test_lists_are_kept_as_tuples_of_floats():
    """Costs are values: equal, hashable and safe from a caller that goes on changing its list."""
    given = [1, np.float32(2), np.int64(3), True]
    costs = Costs(forward=given)
    given[0] = 99
    assert costs.forward == (1.0, 2.0, 3.0, 1.0)
    assert hash(costs) == hash(Costs(forward=(1, 2, 3, 1)))


def test_one_number_stands_for_all_stages():
    """Most examples have equal stages."""
    assert Costs(forward=2).spread("forward", 3) == (2.0, 2.0, 2.0)
    assert Costs(forward=2).spread("transfer", 0) == ()
    assert Costs().spread("backward", 3) is None


def test_a_list_of_another_length_is_refused():
    """Both numbers are in the message: has and needs."""
    with pytest.raises(SettingError, match="costs: update has 2 entries, the schedule needs 3"):
        Costs(update=[1, 2]).spread("update", 3)
