"""Memory of tensors: overlaps, density, and the strides of copies, against slow references."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from penstock.values.storage import copy_of, copy_stride, is_dense, overlapping_pairs


def offsets_of(shape, stride):
    """The offsets of all elements in memory, in the order of the elements."""
    return [
        sum(place * step for place, step in zip(index, stride, strict=True))
        for index in itertools.product(*map(range, shape))
    ]


def bytes_of(tensor):
    """The addresses of all bytes of a tensor."""
    first = tensor.data_ptr()
    return {
        first + offset * tensor.itemsize + byte
        for offset in offsets_of(tensor.shape, tensor.stride())
        for byte in range(tensor.itemsize)
    }


def random_view(memory, choose):
    """A view of some memory with any shape, strides, offset and size of its elements."""
    memory = memory.view(choose.choice([torch.float32, torch.float64, torch.int16]))
    shape = [
        choose.randint(0 if choose.random() < 0.1 else 1, 3) for _ in range(choose.randint(0, 3))
    ]
    stride = [choose.randint(0, 5) for _ in shape]
    return memory.as_strided(shape, stride, choose.randint(0, 6))


def test_tensors_overlap_if_they_have_a_byte_in_common():
    """Writing to one of them would change the other; a slow reference compares all addresses."""
    choose = random.Random(0)
    memories = [torch.zeros(64, dtype=torch.float64) for _ in range(2)]
    overlaps = 0
    for _ in range(300):
        tensors = [random_view(choose.choice(memories), choose) for _ in range(4)]
        expected = tuple(
            pair
            for pair in itertools.combinations(range(4), 2)
            if bytes_of(tensors[pair[0]]) & bytes_of(tensors[pair[1]])
        )
        assert overlapping_pairs(tensors) == expected
        overlaps += bool(expected)
    assert 50 < overlaps < 300


def test_neighbours_and_interleaved_tensors_do_not_overlap():
    """Columns of a matrix are such tensors; a shared last or first byte counts."""
    memory = torch.zeros(8)
    assert overlapping_pairs([memory[:4], memory[4:]]) == ()
    assert overlapping_pairs([memory[4:], memory[:4]]) == ()
    assert overlapping_pairs([memory[:5], memory[4:]]) == ((0, 1),)
    assert overlapping_pairs([memory[4:], memory[:5]]) == ((0, 1),)
    assert overlapping_pairs([memory[::2], memory[1::2]]) == ()
    halves = memory.view(torch.int16)
    assert overlapping_pairs([halves[::2], halves[1::2]]) == ()
    assert overlapping_pairs([memory[1:2], halves[2:3]]) == ((0, 1),)
    assert overlapping_pairs([memory[1:2], halves[4:5]]) == ()


def test_empty_and_meta_tensors_overlap_with_nothing():
    """They have no memory."""
    memory = torch.zeros(4)
    absent = torch.zeros(4, device="meta")
    assert overlapping_pairs([memory, memory[:0], memory[:2]]) == ((0, 2),)
    assert overlapping_pairs([absent, absent[:2]]) == ()
    assert overlapping_pairs([memory]) == overlapping_pairs([]) == ()


def test_large_tensors_whose_ranges_overlap_count_as_overlapping():
    """Comparing all of their bytes would take too long; separate ranges are still told apart."""
    memory = torch.empty(1 << 20)
    small = [memory.as_strided((2,), (1 << 18,)), memory.as_strided((2,), (1 << 18,), 1)]
    assert overlapping_pairs(small) == ()
    pages = torch.empty(3 << 25, dtype=torch.uint8)  # never touched, so that it takes no memory
    first = pages.as_strided((2,), ((1 << 26) + 1,))
    second = pages.as_strided((2,), ((1 << 26) + 1,), 1)
    assert overlapping_pairs([first, second]) == ((0, 1),)
    assert overlapping_pairs([pages[: 1 << 26], pages[1 << 26 :]]) == ()
    assert overlapping_pairs([pages[1 << 26 :], pages[: 1 << 26]]) == ()


SHAPES = [(), (0,), (1,), (3,), (2, 3), (1, 3), (3, 1), (2, 1, 3), (2, 0, 3), (2, 2, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_dense_tensors_fill_a_range_of_memory_exactly_once(shape):
    """Strides of a dimension with one element mean nothing."""
    for stride in itertools.product(range(7), repeat=len(shape)):
        offsets = offsets_of(shape, stride)
        expected = sorted(offsets) == list(range(len(offsets)))
        assert is_dense(shape, stride) == expected, (shape, stride)


@pytest.mark.parametrize(
    ("shape", "stride", "expected"),
    [
        ((), (), None),
        ((2, 3), (3, 1), None),  # contiguous
        ((2, 0), (1, 5), None),
        ((2, 3), (1, 2), (1, 2)),
        ((1, 3), (7, 1), (7, 1)),
        ((2, 3, 4), (12, 1, 3), (12, 1, 3)),
        ((2,), (2,), (2,)),
        ((2,), (7,), (7,)),  # 8 elements of memory for 2
        ((2,), (8,), None),
        ((2, 2), (12, 3), (12, 3)),  # 16 for 4
        ((2, 2), (13, 3), None),
        ((2, 2), (1, 1), None),  # elements overlap
        ((3, 2), (1, 2), None),
        ((3, 2), (1, 3), (1, 3)),
        ((2, 3), (3, 2), None),  # positions of two dimensions interleave
        ((2, 3), (5, 2), (5, 2)),
        ((2, 1, 3), (6, 4, 2), (6, 4, 2)),  # a stride of one element means nothing
        ((4, 3), (0, 1), (0, 1)),  # expanded: repeated elements take no memory
        ((4, 2), (0, 7), (0, 7)),
        ((4, 2), (0, 8), None),
    ],
)
def test_a_copy_keeps_strides_unless_elements_overlap_or_gaps_are_large(shape, stride, expected):
    """Kernels are chosen by strides; four elements of memory for each element are the limit."""
    assert copy_stride(shape, stride) == expected


LINE = torch.arange(64.0, dtype=torch.float64)
ROWS = torch.arange(24.0).reshape(4, 6)


@pytest.mark.parametrize(
    "tensor",
    [
        ROWS,
        ROWS[1:],
        ROWS.t(),
        ROWS[1:].t(),
        ROWS[:, :4],
        ROWS[:, 1:4],
        ROWS[:, ::3],
        ROWS[1:, 1::5].t(),
        LINE[3],
        LINE[0],
        LINE[1::9],
        LINE[:0],
        LINE.as_strided((3, 3), (1, 1), 2),
        LINE.to(torch.int16)[5:9],
        torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)[1:],
    ],
)
def test_a_copy_has_the_values_strides_and_alignment_of_the_tensor(tensor):
    """A kernel that is chosen by them then rounds as with the tensor; memory is not shared."""
    copied = copy_of(tensor)
    stride = copy_stride(tuple(tensor.shape), tensor.stride())
    contiguous = torch.empty(tensor.shape, device="meta").stride()
    assert torch.equal(copied, tensor)
    assert (copied.shape, copied.dtype) == (tensor.shape, tensor.dtype)
    assert copied.stride() == (contiguous if stride is None else stride)
    if tensor.numel():
        assert copied.data_ptr() % 64 == tensor.data_ptr() % 64
        assert copied.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def test_a_gradient_goes_through_a_copy():
    """The copy is part of the graph, whichever way it is made."""
    for view in (lambda x: x, lambda x: x.t(), lambda x: x[1:, ::2]):
        x = torch.ones(3, 4, requires_grad=True)
        (copy_of(view(x)) * 3).sum().backward()
        expected = torch.zeros(3, 4)
        view(expected).fill_(3)
        assert torch.equal(x.grad, expected)


def test_an_expanded_tensor_is_not_copied():
    """torch refuses to change it in place, so that nothing can happen to it."""
    expanded = torch.arange(3.0).expand(2, 3)
    assert copy_of(expanded) is expanded
    single = torch.arange(3.0).expand(1, 3)
    assert copy_of(single) is not single


def test_one_row_that_was_expanded_to_one_row_is_copied():
    """It repeats nothing, and may be changed in place."""
    row = torch.arange(3.0)
    expanded = row.as_strided((1, 3), (0, 1))
    copied = copy_of(expanded)
    assert torch.equal(copied, expanded)
    assert copied.data_ptr() != row.data_ptr()
