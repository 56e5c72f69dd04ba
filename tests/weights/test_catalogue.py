"""Weight rules by name."""

from dataclasses import replace

import pytest
import torch

from penstock.errors import ScheduleError, SettingError, UnknownName
from penstock.optim.catalogue import ARITHMETIC
from penstock.schedule.catalogue import schedule
from penstock.schedule.streaming.streams import Waves
from penstock.weights.catalogue import WEIGHT_RULES, WeightRule, weight_rule
from penstock.weights.rule_types import Place

#: Micro-batch 5 of batch 7 on stage 1 of 4, in a full pipeline.
SOMEWHERE = Place(1, 4, 7, 5, 6, 7, 7, 7, 7, 6)

every_rule = pytest.mark.parametrize("name", list(WEIGHT_RULES.entries()))


@every_rule
def test_every_weight_rule_declares_its_facts(name):
    """Planning asks for them before anything runs."""
    rule = weight_rule(name)
    assert rule.name == name
    assert isinstance(rule.synchronous, bool)
    assert rule.source, f"say where {name} is from: @register(..., source=...)"
    assert rule.arithmetic in ARITHMETIC.entries()
    assert rule.extra >= 0
    assert bool(rule.optimizers) == bool(rule.because)
    assert all(
        issubclass(getattr(torch.optim, optimizer), torch.optim.Optimizer)
        for optimizer in rule.optimizers
    )
    assert all(isinstance(default, float) for default in rule.options.values())


@every_rule
def test_every_weight_rule_says_what_a_place_reads_and_says_why(name):
    """Its docstring is where a reader finds formula and source."""
    rule = weight_rule(name)
    reads = rule.reads(SOMEWHERE)
    assert 0 <= reads.forward <= SOMEWHERE.at_forward
    assert 0 <= reads.backward <= SOMEWHERE.at_backward
    assert reads.forward_ahead >= 0 <= reads.backward_ahead
    assert len(rule.reads.__doc__ or "") > 100, (
        f"the docstring of {name} is short: say which versions it reads, and where that is from"
    )


def test_options_have_the_defaults_of_the_rule_unless_they_are_given():
    """The rule's own defaults stay as they are; an option that it does not have is refused."""
    rule = WeightRule(
        "mine",
        weight_rule("stash").reads,
        synchronous=False,
        source="a test",
        options={"decay": 0.5, "annealing": 10.0},
    )
    assert rule.with_defaults({"annealing": 0.0}) == {"decay": 0.5, "annealing": 0.0}
    assert rule.with_defaults({}) == dict(rule.options) == {"decay": 0.5, "annealing": 10.0}
    with pytest.raises(SettingError) as caught:
        rule.with_defaults({"decoy": 1.0, "decay": 1.0, "lag": 2.0})
    expected = "weight rule 'mine' has no option decoy, lag: it takes decay, annealing"
    assert str(caught.value) == expected
    with pytest.raises(SettingError, match="'stash' has no option decay: it takes none"):
        weight_rule("stash").with_defaults({"decay": 1.0})


def test_an_unknown_weight_rule_is_refused_with_those_that_are_known():
    """A typing slip must not train with another rule."""
    with pytest.raises(
        UnknownName, match=r"no weight rule called 'flash'\. Did you mean 'flush'\?"
    ):
        weight_rule("flash")


def test_a_rule_that_says_nothing_else_is_for_one_copy_of_the_weights_that_meets_at_every_update():
    """A contributed rule does not handle copies that diverge."""
    rule = WeightRule("mine", weight_rule("stash").reads, synchronous=False, source="a test")
    rule.check(schedule("pipedream", 2, 2, replicas=2))
    with pytest.raises(ScheduleError, match="has 2 copies of the weights that take turns"):
        rule.check(schedule("avgpipe", 2, 2))
    pipedream = schedule("pipedream", 2, 2, replicas=2)
    with pytest.raises(ScheduleError, match="copies of a stage do not synchronise at every U"):
        rule.check(replace(pipedream, stream=replace(pipedream.stream, waves=Waves(2))))


def test_a_rule_is_returned_as_it_is():
    """Also one that is not registered, or that has other facts than the registered one."""
    rule = replace(weight_rule("stash"), extra=7.0)
    assert weight_rule(rule) is rule
    mine = WeightRule("mine", rule.reads, synchronous=False, source="a test")
    assert weight_rule(mine) is mine
