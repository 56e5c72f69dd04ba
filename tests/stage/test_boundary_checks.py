"""Whether layers change their inputs in place, and what they are given then."""

from __future__ import annotations

import pytest
import torch

from penstock.errors import RunError
from penstock.stage.boundary_checks import InPlaceChanges
from penstock.transport.payload import Payload


def copied(changes: InPlaceChanges, training: bool) -> bool:
    """Return whether the layers would get a copy of their input."""
    x = torch.ones(3)
    (value,) = changes.watch([Payload.of(x)], training=training).inputs
    return value.tensors[0] is not x


def test_inputs_are_copied_until_a_run_has_left_them_as_they_were():
    """Training and evaluation are told apart: a layer may do other things in each."""
    changes = InPlaceChanges()
    assert copied(changes, training=True)
    changes.record(training=True, modified=False, copied=True)
    assert not copied(changes, training=True)
    assert copied(changes, training=False)
    changes.record(training=False, modified=True, copied=True)
    assert copied(changes, training=False)


def test_after_a_change_without_a_copy_the_next_run_has_one():
    """Its message says so: the batch can be repeated."""
    changes = InPlaceChanges()
    changes.record(training=True, modified=False, copied=True)
    with pytest.raises(RunError, match="the next forward has a copy to change"):
        changes.record(training=True, modified=True, copied=False)
    assert copied(changes, training=True)
    changes.record(training=True, modified=True, copied=True)
