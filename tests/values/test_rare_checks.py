"""When checks are repeated."""

from __future__ import annotations

from penstock.values.rare_checks import is_due


def test_checks_are_due_at_the_powers_of_two():
    """Often in the beginning, and ever more rarely."""
    assert [count for count in range(1, 1025) if is_due(count)] == [2**power for power in range(11)]
