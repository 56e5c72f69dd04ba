"""A recompute policy is its name, parsed."""

from __future__ import annotations

import pytest

from penstock.errors import PlanError, SettingError
from penstock.schedule.recompute import Recompute
from penstock.search.proposal import Proposal
from penstock.store import to_json


@pytest.mark.parametrize("policy", Recompute)
def test_a_policy_equals_its_name_in_comparisons_tables_and_files(policy):
    """Public arguments and plans on disk hold names."""
    assert policy == policy.value
    assert {policy.value: 1}[policy] == 1
    assert (str(policy), repr(policy)) == (policy.value, repr(policy.value))
    assert Recompute.parse(policy.value) is Recompute.parse(policy) is policy


def test_a_name_is_parsed_where_it_enters():
    """All code behind the public functions receives policies, not names."""
    assert Proposal((1,), "gpipe", 1, recompute="always").recompute is Recompute.ALWAYS
    assert Recompute.parse_or_auto("auto") == "auto"
    assert [Recompute.parse_or_auto(policy.value) for policy in Recompute] == [*Recompute]
    assert all(isinstance(Recompute.parse_or_auto(name), Recompute) for name in ("never", "always"))
    with pytest.raises(SettingError, match=r"recompute is one of never, .*, not 'auto'"):
        Recompute.parse("auto")
    with pytest.raises(PlanError, match="must be one of auto, never"):
        Recompute.parse_or_auto("often")


def test_json_holds_the_name():
    """Plans of earlier versions stay valid."""
    assert '"recompute": "always"' in to_json(Proposal((1,), "gpipe", 1, recompute="always"))


@pytest.mark.parametrize(
    ("policy", "micro_batches", "whole"),
    [
        (Recompute.NEVER, [], False),
        (Recompute.EXCEPT_LAST, [0, 1, 2], True),
        (Recompute.ALWAYS, [0, 1, 2, 3], True),
        (Recompute.SELECTIVE, [], False),
    ],
)
def test_a_policy_repeats_the_forwards_of_its_micro_batches(policy, micro_batches, whole):
    """Of four; with selective recompute no whole forward runs again."""
    assert [number for number in range(4) if policy.repeats(number, 4)] == micro_batches
    assert policy.whole == whole
    assert policy.repeats(0, 1) == (policy is Recompute.ALWAYS)
