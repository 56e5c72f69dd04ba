"""Copies of a batch on a device. The device is torch's meta device: shapes and strides, no GPU.

tests/devices shows the same with numbers.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import penstock as ps
from penstock.batches import device_batch as module
from penstock.batches.batch import Batch, make_batch
from penstock.batches.batch_parts import BatchPart
from penstock.batches.device_batch import (
    INPUTS,
    TARGETS,
    copy_to,
    device_batch,
    micro_batch_inputs,
    to_device,
    whole_inputs,
)

META = torch.device("meta")


@pytest.fixture
def copies(monkeypatch):
    """The tensors that were copied."""
    sources = []
    copy_to = module.copy_to

    def counted(tensor, device):
        sources.append(tensor)
        return copy_to(tensor, device)

    monkeypatch.setattr(module, "copy_to", counted)
    return sources


def forms(values):
    """Shapes and strides of tensors."""
    return [(value.shape, value.stride()) for value in values]


def test_micro_batches_are_views_of_one_copy(copies):
    """With the strides that they have on the host."""
    x = torch.randn(7, 3, 4, 4).to(memory_format=torch.channels_last)
    batch = make_batch(x, torch.arange(7), 3, step=0, training=True)
    on_device = device_batch(batch, META)
    inputs = [on_device.part(INPUTS, number) for number in batch.numbers]
    targets = [on_device.part(TARGETS, number) for number in batch.numbers]
    assert all(value.device == META for value in (*inputs, *targets))
    assert forms(inputs) == forms(batch.inputs)
    assert forms(targets) == forms(batch.targets)
    assert [source.shape for source in copies] == [x.shape, (7,)]
    assert on_device.whole(TARGETS).shape == (7,)
    assert len(copies) == 2


@pytest.mark.parametrize("slices", [2, 3])
def test_slices_of_sequences_are_views_too(copies, slices):
    """A schedule that cuts sequences cuts the copy alike."""
    schedule = ps.schedule("terapipe", stages=2, micro_batches=2, slices=slices)
    x = torch.arange(4 * 8).reshape(4, 8)
    batch = make_batch(x, x, 2, step=0, training=True, slicing=schedule.slicing)
    on_device = device_batch(batch, META)
    inputs = [on_device.part(INPUTS, number) for number in batch.numbers]
    assert forms(inputs) == forms(batch.inputs)
    assert len(inputs) == 2 * slices
    assert len(copies) == 1


def test_nested_inputs_are_copied_tensor_by_tensor_at_first_use(copies):
    """A stage that uses one of several inputs must not pay for the others."""
    x = {"image": torch.randn(4, 2), "mask": torch.ones(4, 1), "scale": 2.0}
    batch = make_batch(x, torch.arange(4), 2, step=0, training=True)
    on_device = device_batch(batch, META)
    mask = on_device.view(INPUTS, 1, batch.inputs[1]["mask"])
    assert (mask.device, mask.shape) == (META, (2, 1))
    assert len(copies) == 1
    part = on_device.part(INPUTS, 0)
    assert (part["scale"], part["image"].shape, part["mask"].shape) == (2.0, (2, 2), (2, 1))
    assert len(copies) == 2


def test_a_batch_that_has_no_whole_is_copied_by_micro_batch(copies):
    """Nothing else is there to copy."""
    parts = [torch.randn(2, 3), torch.randn(1, 3)]
    batch = Batch(0, parts, None, [2 / 3, 1 / 3], "s", training=True)
    on_device = device_batch(batch, META)
    on_meta = [on_device.part(INPUTS, number) for number in batch.numbers]
    assert [(part.shape, part.device) for part in on_meta] == [((2, 3), META), ((1, 3), META)]
    assert len(copies) == 2


def test_tensors_that_are_on_the_device_stay_there(copies):
    """A loader may have moved them."""
    x = torch.randn(4, 3, device="meta")
    batch = make_batch(x, torch.arange(4), 2, step=0, training=True)
    part = device_batch(batch, META).part(INPUTS, 1)
    assert part.shape == (2, 3)
    assert copies == []
    part.requires_grad_()
    assert not batch.inputs[1].requires_grad


def test_stages_on_several_threads_share_one_copy(copies):
    """Two ranks of a bidirectional schedule begin with the same batch at the same time."""
    batch = make_batch(torch.randn(64, 3), torch.arange(64), 32, step=0, training=True)
    with ThreadPoolExecutor(8) as pool:
        parts = list(
            pool.map(lambda number: device_batch(batch, META).part(INPUTS, number), range(32))
        )
    assert all(part.shape == (2, 3) for part in parts)
    assert len(copies) == 1


def test_a_view_may_become_the_leaf_of_a_graph_without_changing_other_views():
    """Each caller gets a separate tensor."""
    batch = make_batch(torch.randn(4, 3), torch.arange(4), 2, step=0, training=True)
    on_device = device_batch(batch, META)
    on_device.part(INPUTS, 0).requires_grad_()
    assert not on_device.part(INPUTS, 0).requires_grad


def test_inputs_and_targets_are_separate_copies():
    """Both are the first tensor of their kind."""
    batch = make_batch(torch.randn(4, 3), torch.arange(4), 2, step=0, training=True)
    on_device = device_batch(batch, META)
    assert (on_device.whole(INPUTS).shape, on_device.whole(TARGETS).shape) == ((4, 3), (4,))
    assert (on_device.part(INPUTS, 1).dtype, on_device.part(TARGETS, 1).dtype) == (
        torch.float32,
        torch.int64,
    )


def test_every_device_has_copies_of_its_own():
    """Stages on one device share them."""
    batch = make_batch(torch.randn(4, 3), torch.arange(4), 2, step=0, training=True)
    assert device_batch(batch, META) is device_batch(batch, torch.device("meta"))
    assert device_batch(batch, META) is not device_batch(batch, torch.device("cpu"))


def test_of_a_batch_that_was_read_in_part_only_its_micro_batches_are_copied(copies):
    """The whole batch is not there."""
    x = BatchPart(torch.randn(2, 3), [0, 1], 4)
    y = BatchPart(torch.arange(4), range(4), 4)
    batch = make_batch(x, y, 2, step=0, training=True)
    on_device = device_batch(batch, META)
    assert on_device.part(INPUTS, 0).shape == (2, 3)
    assert [source.shape for source in copies] == [(2, 3)]
    assert on_device.part(TARGETS, 1).shape == (2,)
    assert copies[1].shape == (4,)


def test_repeated_tensors_of_a_batch_are_one_on_the_device(copies):
    """A layer that compares them by identity sees the same."""
    x = torch.randn(4, 3)
    batch = make_batch({"a": x, "b": [x]}, torch.arange(4), 2, step=0, training=True)
    part = device_batch(batch, META).part(INPUTS, 1)
    assert part["a"] is part["b"][0]
    assert len(copies) == 1
    first, second = device_batch(batch, META).views(1, [batch.inputs[1]["a"]] * 2)
    assert first is not second
    assert first.shape == second.shape == (2, 3)


def test_on_the_cpu_inputs_are_those_of_the_batch(copies):
    """A transfer costs nothing there."""
    x = torch.randn(5, 3)
    batch = make_batch((x, "a"), torch.arange(5), 2, step=0, training=True)
    tensor, constant = micro_batch_inputs(batch, 1, torch.device("cpu"))
    assert torch.equal(tensor, x[3:])
    assert tensor.data_ptr() == x[3:].data_ptr()
    assert constant == "a"
    assert copies == []
    on_device, constant = micro_batch_inputs(batch, 1, META)
    assert (on_device.device, on_device.shape, constant) == (META, (2, 3), "a")
    assert len(copies) == 1


def test_copies_have_no_graph_and_what_is_absent_stays_absent():
    """A stage makes leaves of its own."""
    weight = torch.ones(2, requires_grad=True)
    copied = copy_to(weight * 2, META)
    assert (copied.device, copied.requires_grad) == (META, False)
    assert to_device(None, META) is None
    assert to_device(weight, META).device == META


def test_inputs_are_cut_from_one_copy_on_a_device_and_passed_on_from_the_host(copies):
    """Those of a micro-batch, and of the whole batch."""
    x = {"a": torch.arange(5.0), "b": [torch.ones(5, 2), 3]}
    batch = make_batch(x, torch.arange(5), 2, step=0, training=True)
    host = torch.device("cpu")
    whole, part = whole_inputs(batch, host), micro_batch_inputs(batch, 1, host)
    assert whole["a"] is x["a"]
    assert part["a"].tolist() == [3.0, 4.0]
    assert (whole["b"][1], part["b"][1]) == (3, 3)
    assert copies == []
    whole = whole_inputs(batch, META)
    assert len(copies) == 2
    part = micro_batch_inputs(batch, 1, META)
    assert forms([whole["a"], whole["b"][0]]) == [((5,), (1,)), ((5, 2), (2, 1))]
    assert forms([part["a"], part["b"][0]]) == [((2,), (1,)), ((2, 2), (2, 1))]
    assert whole["a"].device == part["b"][0].device == META
    assert len(copies) == 2


def test_tensors_of_one_shape_are_told_apart():
    """Those of each place in the inputs are cut from the copy of that place, in any micro-batch."""
    x = {"a": torch.zeros(5, 2), "b": torch.zeros(5, 2, dtype=torch.int64)}
    batch = make_batch(x, torch.arange(5), 3, step=0, training=True)
    inputs = batch.inputs[2]
    second, first = device_batch(batch, META).views(2, [inputs["b"], inputs["a"]])
    assert (first.dtype, second.dtype) == (torch.float32, torch.int64)
    assert first.shape == second.shape == (1, 2)
