"""What passes a stage boundary: changes in place, shared memory, devices, and gradients."""

from __future__ import annotations

import pytest
import torch

from penstock.errors import RunError
from penstock.stage.boundary_checks import (
    InPlaceChanges,
    check_devices,
    check_same_requires_grad,
    check_shared,
    versions_of,
)
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


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("changes_input", [False, True])
def test_a_run_records_whether_it_has_changed_an_input(changes_input, training):
    """By torch's version counters; the tensors of the sender stay as they are."""
    changes = InPlaceChanges()
    assert not changes.known(training=training)
    assert not changes.excluded(training=training)
    sent = [torch.ones(2), torch.ones(3)]
    watch = changes.watch([Payload.of(sent[0]), Payload.of(sent[1])], training=training)
    if changes_input:
        watch.inputs[1].tensors[0].add_(1)
    watch.check()
    assert [float(tensor.sum()) for tensor in sent] == [2.0, 3.0]
    assert changes.known(training=training)
    assert not changes.known(training=not training)
    assert changes.excluded(training=training) is not changes_input
    assert not changes.excluded(training=not training)


def test_a_change_without_a_copy_is_seen_at_the_check():
    """The stage before may still read what was changed."""
    changes = InPlaceChanges()
    changes.record(training=True, modified=False, copied=True)
    watch = changes.watch([Payload.of(torch.ones(2))], training=True)
    watch.inputs[0].tensors[0].add_(1)
    with pytest.raises(RunError, match="had not done so in its first forward"):
        watch.check()


def test_a_changed_tensor_of_a_later_value_is_looked_up_among_its_own():
    """Positions of shared pairs count within their value."""
    base = torch.zeros(4)
    values = [
        Payload.of([torch.ones(1), torch.ones(1)]),
        Payload.of([base, base[:2], torch.ones(1)]),
    ]
    assert values[1].shared == ((0, 1),)
    for place, refused in ((0, True), (1, True), (2, False)):
        watch = InPlaceChanges().watch(values, training=True)
        watch.inputs[1].tensors[place].add_(1)
        if refused:
            with pytest.raises(RunError, match="share memory"):
                watch.check()
        else:
            watch.check()
    watch = InPlaceChanges().watch(values, training=True)
    watch.inputs[0].tensors[1].add_(1)
    watch.check()


def test_in_inference_mode_there_are_no_versions_and_nothing_is_recorded():
    """Tensors have no version counters there."""
    tensor = torch.ones(2)
    assert versions_of([tensor]) == [tensor._version]
    changes = InPlaceChanges()
    with torch.inference_mode():
        assert versions_of([tensor]) is None
        changes.watch([Payload.of(tensor)], training=False).check()
    assert not changes.known(training=False)
    watch = changes.watch([Payload.of(tensor)], training=False)
    with torch.inference_mode():
        watch.check()
    assert not changes.known(training=False)


@pytest.mark.parametrize(
    ("shared", "modified", "refused"),
    [
        ([], [True, True], False),
        ([(0, 1)], [True, False, False], True),
        ([(0, 1)], [False, True, False], True),
        ([(0, 1)], [False, False, True], False),
        ([(0, 1), (1, 2)], [True, False, False], True),
        ([(0, 1), (2, 3)], [False, False, False, True], True),
        ([(1, 1)], [False, True], True),
        ([(1, 1)], [True, False], False),
    ],
)
def test_of_two_tensors_in_one_memory_neither_may_be_changed(shared, modified, refused):
    """Behind the boundary each has a memory of its own."""
    if refused:
        with pytest.raises(RunError, match="clone"):
            check_shared(shared, modified)
    else:
        check_shared(shared, modified)


META = torch.device("meta")
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("tensors", "device", "refused"),
    [
        ([torch.ones(2)], CPU, False),
        ([torch.ones(2)], META, True),
        ([torch.tensor(2.0)], META, False),
        ([torch.tensor(2.0), torch.ones(1)], META, True),
        ([torch.ones(2, device="meta")], CPU, True),
        ([torch.ones((), device="meta")], CPU, True),
        ([torch.ones((), device="meta")], META, False),
    ],
)
def test_tensors_leave_a_stage_on_its_device(tensors, device, refused):
    """A number without dimensions may stay in host memory, unless it has no value."""
    payload = Payload.of(tensors)
    if refused:
        with pytest.raises(RunError, match=r"of shape \(.* crosses the boundary"):
            check_devices(payload, device)
    else:
        check_devices(payload, device)


@pytest.mark.parametrize(
    ("expected", "actual", "text"),
    [
        ([True, False], [True, False], None),
        ((), (), None),
        ([True, False], [False, True], "made 2 tensors of which 1 want a gradient, and the first"),
        ([True], [True, True], "made 2 tensors of which 2 want .* first time 1, of which 1 did"),
        ([True, True], [True], "made 1 tensors of which 1 want .* first time 2, of which 2 did"),
    ],
)
def test_a_recompute_makes_as_many_tensors_with_the_same_flags(expected, actual, text):
    """Else gradients would be paired with other tensors; the message has both counts."""
    tensors = [torch.ones(1, requires_grad=flag) for flag in actual]
    if text is None:
        check_same_requires_grad(tuple(expected), tensors, "stage 2")
        return
    with pytest.raises(RunError, match=f"^stage 2: run again for its backward, a forward {text}"):
        check_same_requires_grad(expected, tensors, "stage 2")
