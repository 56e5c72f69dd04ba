"""Parts of a batch: which samples a process has, and what it knows of the others."""

from __future__ import annotations

import itertools

import pytest
import torch

from penstock.batches.batch import make_batch
from penstock.batches.batch_parts import BatchPart, is_missing, whole_value
from penstock.errors import SettingError


def samples_at(positions, width=2):
    """Samples that consist of their positions; one sample of zeros if there are none."""
    if not positions:
        return torch.zeros(1, width)
    return torch.tensor(positions, dtype=torch.float32)[:, None].repeat(1, width)


@pytest.mark.parametrize("sizes", [[2, 2, 2], [6], [1, 3, 2], [1] * 6])
@pytest.mark.parametrize("positions", [[0, 1, 2, 3, 4, 5], [0, 1, 4, 5], [1, 2, 3], [5], []])
def test_a_micro_batch_has_its_samples_only_if_all_of_them_are_there(positions, sizes):
    """Half a micro-batch cannot be computed; of the others a stage needs shapes and types."""
    part = BatchPart({"x": samples_at(positions), "name": "a"}, positions, 6)
    start = 0
    for size, value in zip(sizes, part.cut(sizes), strict=True):
        expected = list(range(start, start + size))
        start += size
        complete = set(expected) <= set(positions)
        assert is_missing(value) is not complete
        assert (value["x"].shape, value["x"].dtype, value["name"]) == (
            (size, 2),
            torch.float32,
            "a",
        )
        if complete:
            assert value["x"].tolist() == [[position] * 2 for position in expected]
    assert part.is_whole == (len(positions) == 6)
    assert len(part) == 6


@pytest.mark.parametrize("positions", [[1, 1], [1, 0], [-1, 0], [0, 4], [4], [-1]], ids=str)
def test_positions_that_do_not_ascend_within_the_batch_are_refused(positions):
    """A sample in the place of another one would be trained with its target."""
    message = r"the positions of a BatchPart ascend from 0 to at most 3, the last of its 4 samples"
    with pytest.raises(SettingError, match=message):
        BatchPart(samples_at(positions), positions, 4)


@pytest.mark.parametrize("count", [1, 3])
def test_every_position_needs_one_row(count):
    """With more or fewer rows it is not known which sample is which."""
    message = f"a BatchPart has 2 positions and values of {count} samples"
    with pytest.raises(SettingError, match=message):
        BatchPart(samples_at(list(range(count))), [0, 2], 4)
    with pytest.raises(SettingError, match="a BatchPart's values must be tensors"):
        BatchPart((samples_at([0, 1]), torch.zeros(3)), [0, 2], 4)


def test_a_part_without_samples_describes_them_by_one_row_or_none():
    """A process of a middle stage reads nothing, and still has to know the shapes."""
    for rows in (0, 1):
        part = BatchPart((torch.zeros(rows, 3, dtype=torch.int64), "a"), [], 5)
        tensor, constant = part.on_meta
        assert (tensor.shape, tensor.dtype, tensor.is_meta) == ((5, 3), torch.int64, True)
        assert constant == "a"
        assert not part.is_whole


def test_values_are_contiguous_and_without_a_graph():
    """Processes without these values cannot know their strides, and the whole batch must be the
    same for all.
    """
    weight = torch.ones(3, requires_grad=True)
    transposed = torch.arange(6.0).reshape(3, 2).t() * weight
    part = BatchPart(transposed, [0, 2], 4)
    assert part.value.is_contiguous()
    assert not part.value.requires_grad
    assert part.value.tolist() == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]


def test_tensors_that_share_memory_are_separate_afterwards():
    """Other processes cannot know that they share it; one tensor in two places stays one."""
    x = torch.arange(4.0).reshape(2, 2)
    part = BatchPart([x, x[:, :1], x], [0, 1], 2)
    first, second, third = part.value
    assert first is third
    first.zero_()
    assert second.tolist() == [[0.0], [2.0]]
    assert x.tolist() == [[0.0, 1.0], [2.0, 3.0]]


def test_copies_of_tensors_that_share_memory_are_contiguous():
    """Their strides would be known to this process alone."""
    x = torch.arange(6.0).reshape(3, 2).t()
    part = BatchPart([x, x[:, :1]], [0, 1], 2)
    assert all(tensor.is_contiguous() for tensor in part.value)
    assert part.value[0].tolist() == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]


def test_values_that_share_no_memory_are_not_copied():
    """A batch may be large."""
    x, y = torch.zeros(2, 3), torch.zeros(2)
    part = BatchPart((x, y), [0, 1], 2)
    pointers = [tensor.data_ptr() for tensor in part.value]
    assert pointers == [x.data_ptr(), y.data_ptr()]


def test_the_whole_value_is_what_every_process_knows():
    """The samples only where all are there; else shapes and types of the whole batch."""
    x = samples_at([0, 1, 2])
    assert whole_value(x) is x
    assert whole_value(None) is None
    assert torch.equal(whole_value(BatchPart(x, range(3), 3)), x)
    partial = whole_value(BatchPart(x, range(3), 4))
    assert (partial.shape, partial.is_meta) == ((4, 2), True)


def test_a_value_is_missing_if_any_of_its_tensors_is():
    """One missing tensor is enough to make a micro-batch useless; constants are never missing."""
    loaded, missing = torch.zeros(1), torch.zeros(1, device="meta")
    assert [
        is_missing(value) for value in (loaded, missing, (loaded, "a"), (loaded, missing), 1)
    ] == [
        False,
        True,
        False,
        True,
        False,
    ]


def test_all_processes_of_a_batch_make_micro_batches_of_one_form():
    """Whatever a process has read, shares and signature are those of the batch read whole."""
    x, y = samples_at([0, 1, 2, 3, 4]), torch.arange(5)
    complete_batch = make_batch(
        BatchPart(x, range(5), 5), BatchPart(y, range(5), 5), 2, step=3, training=True
    )
    for present in itertools.chain([[]], itertools.combinations(range(5), 3)):
        positions = list(present)
        part_x = BatchPart(samples_at(positions), positions, 5)
        part_y = BatchPart(y[positions or [0]], positions, 5)
        batch = make_batch(part_x, part_y, 2, step=3, training=True)
        assert batch.signature == complete_batch.signature
        assert [(part.shape, part.is_meta) for part in batch.whole] == [
            ((5, 2), True),
            ((5,), True),
        ]
        assert batch.shares == complete_batch.shares == [3 / 5, 2 / 5]
        assert [len(part) for part in batch.inputs] == [3, 2]
        complete = {
            number: set(present) >= set(rows) for number, rows in enumerate(([0, 1, 2], [3, 4]))
        }
        assert [is_missing(part) for part in batch.inputs] == [not complete[0], not complete[1]]
        assert [is_missing(part) for part in batch.targets] == [not complete[0], not complete[1]]


def test_sizes_of_micro_batches_are_those_of_the_copies_and_part_of_the_signature():
    """Copies of a pipeline have batches of their own, so that sizes need not be nearly equal."""
    x = samples_at([0, 1, 2, 3])
    uneven = make_batch(BatchPart(x, range(4), 4, sizes=(1, 3)), None, 4, step=0, training=True)
    assert [part[:, 0].tolist() for part in uneven.inputs] == [[0.0], [1.0, 2.0, 3.0]]
    assert uneven.shares == [1 / 4, 3 / 4]
    other = make_batch(BatchPart(x, range(4), 4, sizes=(3, 1)), None, 4, step=0, training=True)
    even = make_batch(BatchPart(x, range(4), 4), None, 2, step=0, training=True)
    assert len({uneven.signature, other.signature, even.signature}) == 3
    part = BatchPart(x, range(4), 4, sizes=(1, 3))
    for targets in (x, part):
        with_targets = make_batch(part, targets, 4, step=0, training=True)
        assert [len(rows) for rows in with_targets.inputs] == [1, 3]
        assert [len(rows) for rows in with_targets.targets] == [1, 3]
