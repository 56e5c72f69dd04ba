"""Which cases answer a question."""

from __future__ import annotations

import pytest

from penstock.errors import SettingError, UnknownName
from penstock.study.convergence.experiment import Experiment


def cases_of(**settings):
    """The cases of a small question on digits."""
    selected, refused = Experiment(
        **{"tasks": ("digits",), "depths": (4,), "seeds": 2, **settings}
    ).cases()
    assert refused == []
    return selected


def test_flush_is_run_with_every_optimizer_that_another_rule_needs():
    """XPipe's formulas are Adam's: it is held against flush with Adam."""
    selected = {(case.rule, case.optimizer) for case in cases_of(rules=("stash", "xpipe"))}
    assert selected == {("flush", "sgd"), ("flush", "adam"), ("stash", "sgd"), ("xpipe", "adam")}


def test_cases_of_one_seed_come_together_and_differ_in_rule_alone():
    """An interrupted study then has whole comparisons."""
    cases = cases_of(rules=("stash",))
    assert [case.seed for case in cases] == [0, 0, 1, 1]
    flush, stash = cases[:2]
    assert (flush.lr, flush.batches, flush.stages) == (stash.lr, stash.batches, stash.stages)


def test_micro_batches_are_as_few_as_each_rule_takes():
    """Gradients are oldest with one; double buffers need one for each stage."""
    selected = {
        case.rule: case.micro_batches
        for case in cases_of(rules=("stash", "double-buffer", "none"))
        if case.rule != "flush"
    }
    assert selected == {"stash": 1, "double-buffer": 4, "none": 1}
    assert {case.micro_batches for case in cases_of(rules=("stash",), micro_batches="stages")} == {
        4
    }


def test_flush_is_run_with_the_micro_batches_of_every_rule():
    """Batch norm sees one micro-batch at a time, so that flush with others is another model."""
    cases = cases_of(rules=("stash", "double-buffer"), seeds=1)
    assert [case.micro_batches for case in cases if case.rule == "flush"] == [1, 4]


def test_flush_asked_for_alone_is_run_as_usual():
    """It has nothing to gain from fewer micro-batches than stages."""
    assert [(case.rule, case.micro_batches) for case in cases_of(rules=("flush",), seeds=1)] == [
        ("flush", 4)
    ]


def test_epochs_may_be_fractions_and_all_batches_are_whole():
    """1,437 digits are 44 batches of 32 and some."""
    assert cases_of(rules=("stash",), epochs=0.5)[0].batches == 22
    assert cases_of(rules=("stash",), epochs=2, most_batches=7)[0].batches == 7


def test_annealing_is_scaled_to_the_length_of_the_run():
    """PipeMare's learning rates would otherwise never come back, or at once."""
    selected = next(
        case for case in cases_of(rules=("pipemare",), epochs=1) if case.rule == "pipemare"
    )
    assert selected.options == (("annealing", 11.0),)


def test_keys_differ_where_anything_differs():
    """A record is found again by its key."""
    cases = cases_of(rules=("stash", "none"))
    assert len({case.key for case in cases}) == len(cases)
    assert cases[0].key == cases_of(rules=("stash", "none"))[0].key


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"depths": (0,)}, "depth 0: must be at least 1"),
        ({"depths": ()}, "at least one task and one depth"),
        ({"seeds": 0}, "seeds 0"),
        ({"seeds": 1001}, "seeds 1001: must be at most 1,000"),
        ({"epochs": -1.0}, "epochs -1: must be above 0"),
        ({"lr_scale": 0.0}, "lr-scale 0: must be above 0"),
        ({"optimizer": "lion"}, "optimizer must be one of sgd, adam, adamw, not 'lion'"),
        ({"micro_batches": "most"}, "micro-batches must be 'least' or 'stages', not 'most'"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_runs(settings, words):
    """Half an hour later would be late."""
    with pytest.raises(SettingError, match=words):
        Experiment(**settings)


def test_unknown_names_are_answered_with_the_known():
    """The usual typo."""
    with pytest.raises(UnknownName, match="Did you mean 'stash'"):
        Experiment(rules=("stach",))
    with pytest.raises(UnknownName, match="no study task called 'digit'"):
        Experiment(tasks=("digit",))


def test_more_stages_than_layers_are_refused():
    """VGG-11 with batch norm has 37."""
    with pytest.raises(SettingError, match="37 layers, which cannot make 38 stages"):
        Experiment(tasks=("digits",), depths=(38,)).cases()
