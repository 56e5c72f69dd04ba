"""pipemare: reads as without a rule; the correction follows from the program."""

from __future__ import annotations

import pytest

from penstock.errors import SettingError
from penstock.schedule.catalogue import schedule
from penstock.verify.verify import verify
from penstock.weights.catalogue import weight_rule
from penstock.weights.weight_uses import uses

RULE = weight_rule("pipemare")


@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 1), (4, 2), (5, 3)])
def test_it_reads_what_no_rule_reads(stages, micro_batches):
    """Its corrections are in the optimizer and in what the newest weights become for a backward."""
    pipedream = schedule("pipedream", stages, micro_batches)
    pipemare, none = uses(pipedream, RULE), uses(pipedream, weight_rule("none"))
    assert all(pipemare.at(s, n) == none.at(s, n) for s in range(stages) for n in range(30))
    assert verify(pipedream, weights="pipemare").versions == (1,) * stages
    assert RULE.extra == 2.0


def test_the_delay_to_correct_is_the_mean_staleness_of_the_program():
    """(p - 1 - s) at one micro-batch per batch; not the paper's (2 (P - i) + 1) / N, of a machine
    that runs F and B at once.
    """
    weight_uses = uses(schedule("pipedream", 4, 1), RULE)
    assert [weight_uses.staleness(stage) for stage in range(4)] == [3, 2, 1, 0]


def test_options_have_defaults_and_strange_ones_are_refused():
    """A misspelled decay would train with another."""
    defaults = {"decay": 0.135, "annealing": 100.0, "lockstep": 0.0, "warm_up": 0.0}
    assert RULE.with_defaults({}) == defaults
    assert RULE.with_defaults({"decay": 0.5}) == defaults | {"decay": 0.5}
    with pytest.raises(
        SettingError,
        match=r"'pipemare' has no option decy: it takes decay, annealing, lockstep, warm_up",
    ):
        RULE.with_defaults({"decy": 0.5})
