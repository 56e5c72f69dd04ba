"""Training a case."""

from __future__ import annotations

import pytest

from penstock.measure.torch_threads import torch_threads
from penstock.study.convergence.experiment import Experiment
from penstock.study.convergence.train_case import train_case


@pytest.fixture
def cases():
    """Flush and stash on digits at 2 stages, five batches."""
    cases, _ = Experiment(
        tasks=("digits",), rules=("stash",), depths=(2,), seeds=1, most_batches=5
    ).cases()
    return {case.rule: case for case in cases}


def test_rules_begin_with_the_same_weights_and_batches(cases):
    """The first batch's loss is the same, since no rule has changed anything yet; a later one is
    not.
    """
    with torch_threads(1):
        flush, stash = (train_case(cases[rule]) for rule in ("flush", "stash"))
    assert len(flush.losses) == len(stash.losses) == 5
    assert flush.losses[0] == pytest.approx(stash.losses[0], abs=2e-4)
    assert flush.test_accuracy is not None


def test_a_loss_that_runs_away_ends_the_run_with_its_batch(cases):
    """Batches after it would cost minutes and say nothing."""
    from dataclasses import replace

    with torch_threads(1):
        record = train_case(replace(cases["flush"], lr=1e9))
    assert record.given_up is not None
    assert "at batch" in record.given_up
    assert record.test_accuracy is None
