"""Checks whose results are read later: when they are read, and what they say."""

from __future__ import annotations

import pytest
import torch

from penstock.errors import RunError
from penstock.values import deferred_checks as module
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


def test_a_run_that_goes_back_to_an_earlier_step_counts_its_batches():
    """It continues from a checkpoint: batch 2 is read at once, whatever its step."""
    checks = on_accelerator()
    checks.begin(10)
    checks.add(NO, "nothing")
    checks.begin(3)
    assert not checks.pending
    checks.add(YES, "wrong")
    with pytest.raises(RunError, match=r"^wrong\. This was seen in the batch of step 3"):
        checks.read()


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
    assert not checks.pending
    checks.read()


def test_only_the_first_of_several_failures_is_raised_and_none_is_kept():
    """A batch after the error must not fail once more for the same reason."""
    checks = on_accelerator()
    checks.begin(4)
    for failed, message in ((NO, "nothing"), (YES, "first"), (YES, "second")):
        checks.add(failed, message)
    with pytest.raises(RunError, match=r"^first\. This was seen in the batch of step 4, and on an"):
        checks.read()
    assert not checks.pending
    checks.read()


def test_a_failure_that_is_no_error_is_reported_with_its_step():
    """A warning does not end the run, and the checks after it are read as well."""
    checks, reports = on_accelerator(), []
    checks.begin(2)
    checks.add(NO, "nothing", reports.append)
    checks.add(YES, "warning", reports.append)
    checks.begin(3)
    checks.add(YES, "another", reports.append)
    checks.add(YES, "error")
    with pytest.raises(RunError, match=r"^error\. This was seen in the batch of step 3"):
        checks.read()
    assert reports == ["warning, in the batch of step 2", "another, in the batch of step 3"]


def test_nothing_is_read_while_a_graph_is_captured(monkeypatch):
    """A read would end the capture; the first batch would else read at once."""
    capturing = [True]
    monkeypatch.setattr(module, "is_capturing", lambda _: capturing[0])
    checks = on_accelerator()
    checks.add(YES, "wrong")
    checks.begin(0)
    assert checks.deferring
    assert checks.pending
    capturing[0] = False
    assert not checks.deferring
    checks.begin(0)  # the same batch
    assert checks.pending
    with pytest.raises(RunError, match=r"^wrong"):
        checks.begin(1)
