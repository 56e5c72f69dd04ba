"""How devices share stages: valid values, and their text."""

import pytest

from penstock.errors import PlanError
from penstock.plan.sharding import Sharding, ShardingOptions, check_zero


@pytest.mark.parametrize(
    ("sharding", "words"),
    [
        (Sharding(), ""),
        (Sharding(2), "tensor parallel 2"),
        (Sharding(zero=1), "ZeRO 1"),
        (Sharding(4, sequence_parallel=True), "tensor parallel 4, sequence parallel"),
        (
            Sharding(2, sequence_parallel=True, zero=3),
            "tensor parallel 2, sequence parallel, ZeRO 3",
        ),
    ],
)
def test_the_text_has_only_what_is_shared(sharding, words):
    """It is empty for whole stages on single devices."""
    assert sharding.words == words


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0,), "tensor_parallel is 0; it is 1 or more"),
        ((1, True), "sequence_parallel is for tensor_parallel of 2 or more, and it is 1"),
        ((1, False, 4), "zero is 4; its levels are 0, 1, 2 and 3"),
        ((1, False, -1), "zero is -1; its levels are 0, 1, 2 and 3"),
    ],
)
def test_values_out_of_range_are_refused(values, message):
    """Also by the check of the level alone."""
    with pytest.raises(PlanError, match=message):
        Sharding(*values)


def test_levels_from_0_to_3_exist_and_a_request_shares_nothing_by_default():
    """A planner chooses what is None, and the level of ZeRO only if it is told to."""
    for level in range(4):
        check_zero(level)
    with pytest.raises(PlanError, match="zero is None"):
        check_zero(None)
    assert ShardingOptions() == ShardingOptions(None, None, 0)
