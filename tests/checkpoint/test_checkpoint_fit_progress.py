"""Saved schedulers, loss scalers and weight rules against those of the pipeline that loads."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from penstock.checkpoint.checkpoint_fit import (
    Findings,
    check_rule,
    check_scaler,
    check_schedulers,
    plain_json,
    saved_kind,
)
from penstock.checkpoint.checkpoint_index import Checkpoint, RuleFacts
from penstock.optim.schedulers import Schedulers

# -- schedulers ------------------------------------------------------------------------------------


def schedulers_of(*makes):
    """Return schedulers of an optimizer."""
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    return [Schedulers(make, [optimizer]) for make in makes]


def step_lr(optimizer):
    """A scheduler."""
    return StepLR(optimizer, 2)


def cosine(optimizer):
    """Another scheduler."""
    return CosineAnnealingLR(optimizer, 9)


STEP, COSINE = (f"torch.optim.lr_scheduler.{name}" for name in ("StepLR", "CosineAnnealingLR"))


def scheduler_findings(schedulers, saved, kinds=()):
    """Return what is said of saved states of schedulers."""
    findings = Findings()
    index = Checkpoint(3, "f", (), schedulers=tuple(saved), scheduler_kinds=tuple(kinds))
    check_schedulers(index, schedulers, findings)
    return findings.text()


def test_every_scheduler_needs_the_saved_state_of_its_class():
    """Fewer may exist than were saved: others may be made after loading."""
    result = schedulers_of(step_lr, cosine)
    states = [scheduler.as_json() for scheduler in result]
    assert scheduler_findings(result, states, [STEP, COSINE]) == ""
    assert scheduler_findings(result[:1], states, [STEP, COSINE]) == ""
    assert scheduler_findings([], states, [STEP, COSINE]) == ""
    assert scheduler_findings([], []) == ""
    advice = "To start with new schedulers, pass skip='schedulers'"
    assert scheduler_findings(result, states[:1], [STEP]) == (
        "it has the state of 1 learning-rate schedulers, and this pipeline has 2. " + advice
    )
    fewer = scheduler_findings(result, states[1:], [COSINE])
    assert fewer.endswith(f"this pipeline has 2. {advice}"), "their classes do not matter then"
    assert scheduler_findings(result[::-1], states, [STEP, COSINE]) == (
        f"scheduler 0 is {COSINE} here, and the checkpoint has the state of {STEP}. {advice}; "
        f"scheduler 1 is {STEP} here, and the checkpoint has the state of {COSINE}. {advice}"
    )


def test_schedulers_without_recorded_classes_are_compared_by_their_entries():
    """Checkpoints of schema 1 do not record them."""
    result = schedulers_of(step_lr, cosine)
    states = [scheduler.as_json() for scheduler in result]
    assert scheduler_findings(result, states) == ""
    assert scheduler_findings(result, states, [STEP]) == ""
    assert "scheduler 1 is" not in scheduler_findings(result, states[::-1], [COSINE, COSINE])
    assert scheduler_findings(result[:1], states[1:]) == (
        f"scheduler 0 is {STEP} here, and the checkpoint has the state of another scheduler. To "
        "start with new schedulers, pass skip='schedulers'"
    )


@pytest.mark.parametrize("text", ["{", "[1]", "null", ""])
def test_a_state_of_a_scheduler_that_is_no_mapping_is_damaged(text):
    """Also of one that does not exist yet; the others are compared all the same."""
    result = schedulers_of(step_lr)
    good = result[0].as_json()
    damaged = "the state of scheduler 1 is damaged. To start with new schedulers, pass"
    assert scheduler_findings(result, [good, text], [STEP, STEP]).startswith(damaged)
    both = scheduler_findings(schedulers_of(step_lr, step_lr), [text, good], [STEP, COSINE])
    assert both.startswith("the state of scheduler 0 is damaged. To start")
    assert "; scheduler 1 is" in both


def test_kinds_of_schedulers_may_be_fewer_than_states():
    """Then the class of the others is not known."""
    assert [saved_kind(["a", "b"], number) for number in range(3)] == ["a", "b", None]
    assert saved_kind([], 0) is None


def test_states_of_schedulers_may_have_infinities():
    """The best metric of a plateau scheduler is infinite at the beginning."""
    assert plain_json('{"best": Infinity, "x": [1, null]}') == {"best": math.inf, "x": [1, None]}
    assert plain_json(json.dumps({"best": -math.inf})) == {"best": -math.inf}
    assert plain_json("{'a': 1}") is None


# -- loss scaler -----------------------------------------------------------------------------------

SCALER = {"scale": 8.0, "steps": 3.0, "skipped": 0.0}
IGNORE = "To ignore this difference, pass skip='scaler'"


def scaler_findings(scaler, saved):
    """Return what is said of the saved state of a loss scaler."""
    findings = Findings()
    check_scaler(Checkpoint(3, "f", (), saved), scaler, findings)
    return findings.text()


def test_a_loss_scaler_is_saved_and_loaded_or_neither():
    """A new scaler would skip steps that the saved run did not skip."""
    assert scaler_findings(True, SCALER) == ""
    assert scaler_findings(False, None) == ""
    assert scaler_findings(True, None) == (
        "it was saved without a loss scaler, and this pipeline has one, which would start with its "
        f"initial scale. {IGNORE}"
    )
    assert scaler_findings(False, SCALER) == (
        "it has the state of a loss scaler (scale 8), and this pipeline has none. Construct it "
        f"with scaler=. {IGNORE}"
    )


def test_an_empty_state_of_a_scaler_is_the_state_of_one():
    """It is damaged, and not that of a run without a scaler."""
    text = scaler_findings(False, {})
    assert "it has the state of a loss scaler (scale nan), and this pipeline has none" in text
    assert text.endswith("the state of its loss scaler is damaged: {}")


@pytest.mark.parametrize(
    "change",
    [{"scale": 0.0}, {"scale": -1.0}, {"scale": math.nan}, "scale", "steps", "skipped"],
    ids=str,
)
def test_a_damaged_state_of_a_scaler_is_quoted(change):
    """A scale of 0 would make all gradients NaN."""
    saved = SCALER | (change if isinstance(change, dict) else {})
    saved.pop(change if isinstance(change, str) else "", None)
    assert scaler_findings(True, saved) == f"the state of its loss scaler is damaged: {saved}"


# -- weight rule -----------------------------------------------------------------------------------


def rule_findings(saved, rule):
    """Return what is said of the saved state of a weight rule."""
    findings = Findings()
    check_rule(SimpleNamespace(rule=saved), rule, findings)
    return findings.text()


def test_state_of_a_weight_rule_belongs_to_one_rule_and_its_copies():
    """Without state, and in a synchronous pipeline, the rule does not matter."""
    saved = RuleFacts("avgpipe", 2, 3, keeps=True)
    assert rule_findings(saved, RuleFacts("avgpipe", 2, 3)) == ""
    assert rule_findings(saved, None) == ""
    assert rule_findings(None, RuleFacts("stash", 1, 1)) == ""
    assert rule_findings(RuleFacts("stash", 1, 1, keeps=False), saved) == ""


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (RuleFacts("stash", 2, 3), "'stash' with 2 pipelines with 3 copies of a stage"),
        (RuleFacts("avgpipe", 1, 3), "'avgpipe' with 3 copies of a stage"),
        (RuleFacts("avgpipe", 2, 1), "'avgpipe' with 2 pipelines"),
        (RuleFacts("avgpipe", 1, 1, keeps=True), "'avgpipe'"),
    ],
)
def test_another_rule_or_other_numbers_of_copies_are_refused_with_both(rule, text):
    """The rule would ignore the state silently, and begin at the weights."""
    assert rule_findings(RuleFacts("avgpipe", 2, 3, keeps=True), rule) == (
        "it has the state of weight rule 'avgpipe' with 2 pipelines with 3 copies of a stage, and "
        f"this pipeline has {text}. To initialise the rule from the weights, pass "
        "skip='weight_rule'"
    )
