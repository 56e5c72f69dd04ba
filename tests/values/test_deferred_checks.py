"""Checks whose results are read later: when they are read, and what they say."""

from __future__ import annotations

import pytest
import torch

from penstock.errors import RunError
from penstock.values.deferred_checks import PERIOD, DeferredChecks

YES, NO = torch.tensor(True), torch.tensor(False)


def on_accelerator():
    """Checks of a stage that is not on the CPU; no tensor is put there."""
    return DeferredChecks(torch.device("meta"))


def test_results_are_read_at_once_in_batches_1_2_4_8_and_every_16th():
    """A mistake in the code of a layer shows in the first batches."""
    checks, immediate = on_accelerator(), []
    for step in range(4 * PERIOD):
        checks.begin(step)
        checks.begin(step)  # the second micro-batch
        if not checks.deferring:
            immediate.append(step + 1)
    assert immediate == [1, 2, 4, 8, 16, 32, 48, 64]


def test_nothing_is_deferred_on_the_cpu():
    """There is no device to wait for."""
    checks = DeferredChecks(torch.device("cpu"))
    for step in range(PERIOD):
        checks.begin(step)
        assert not checks.deferring


def test_a_failure_is_raised_by_the_next_batch_that_reads():
    """Batches 5 to 7 read nothing; batch 8 reads what 6 has left."""
    checks = on_accelerator()
    for step in range(7):
        checks.begin(step)
        if step == 5:
            checks.add(NO, "nothing")
            checks.add(YES, "stage 3 is wrong")
    assert checks.pending
    with pytest.raises(RunError, match=r"^stage 3 is wrong\. This was seen in the batch of step 5"):
        checks.begin(7)
    assert not checks.pending


def test_results_are_dropped_with_a_batch_that_failed():
    """They are of gradients that are dropped, too."""
    checks = on_accelerator()
    checks.add(YES, "wrong")
    checks.clear()
    checks.read()
