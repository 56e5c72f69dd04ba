"""Checksums of weights and batches."""

from __future__ import annotations

import zlib

import pytest
import torch

from penstock.ranks import checksum as module
from penstock.ranks.checksum import (
    SAMPLE,
    WHOLE_BYTES,
    batch_checksum,
    checksum,
    format_numbers,
    values_of,
    whole_checksum,
)

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_changed_number_changes_the_checksum_of_every_dtype(dtype):
    """NumPy has neither bfloat16 nor float8; skipping such tensors would make all batches equal."""
    one = torch.tensor([0, 1, 1, 0]).to(dtype)
    other = torch.tensor([0, 1, 0, 0]).to(dtype)
    assert checksum(one) == checksum(one.clone()) is not None
    assert checksum(one) != checksum(other)
    assert batch_checksum([one], 5)[0] != batch_checksum([other], 5)[0]


def test_tensors_without_readable_numbers_have_no_checksum():
    """Meta and sparse tensors are compared by shape and dtype alone."""
    assert checksum(torch.ones(3, device="meta")) is None
    assert checksum(torch.eye(3).to_sparse()) is None
    assert batch_checksum([torch.eye(3).to_sparse()], 0) == batch_checksum(
        [torch.ones(3, 3).to_sparse()], 0
    )


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[:, 1:], lambda x: x.t()])
def test_views_have_the_checksum_of_their_values(view):
    """Targets are often a non-contiguous slice of the inputs."""
    x = torch.randn(64, 65)
    assert checksum(view(x)) == checksum(view(x).contiguous())
    assert batch_checksum([view(x)], 3) == batch_checksum([view(x).contiguous()], 3)
    assert whole_checksum([view(x)]) == whole_checksum([view(x).contiguous()])


def test_a_shuffled_batch_is_found_by_the_sample():
    """In the steady state only some numbers of a large tensor are read."""
    x = torch.randn(128, 784)
    shuffled = x[torch.randperm(128, generator=torch.Generator().manual_seed(1))]
    for turn in range(64, 96):
        assert batch_checksum([x], turn) == batch_checksum([x.clone()], turn)
        assert batch_checksum([x], turn)[0] != batch_checksum([shuffled], turn)[0]


def test_small_targets_are_read_whole():
    """A single different label makes a different batch."""
    y = torch.arange(WHOLE_BYTES // 8)
    for place in (0, 17, len(y) - 1):
        other = y.clone()
        other[place] = -1
        assert batch_checksum([y], 9)[0] != batch_checksum([other], 9)[0]


def test_a_persistent_difference_is_found_within_some_batches():
    """The sampled positions change, so that every position is read at some time."""
    x = torch.zeros(WHOLE_BYTES)
    other = x.clone()
    other[1000:1016] = 1.0
    stride = len(x) // SAMPLE
    detected = [
        batch_checksum([x], turn)[0] != batch_checksum([other], turn)[0] for turn in range(stride)
    ]
    assert 0 < sum(detected) < stride
    assert whole_checksum([x]) != whole_checksum([other])


def test_numbers_of_a_batch_are_shown_in_its_own_type():
    """The message about a difference quotes them."""
    _, glimpses = batch_checksum(
        [torch.tensor([0.5, -2.0]).bfloat16(), torch.arange(9), torch.ones(0, 3)], 0
    )
    assert [format_numbers(glimpse) for glimpse in glimpses] == ["0.5, -2", "0, 1, 2, 3", "none"]


def test_the_numbers_read_of_a_large_tensor_are_evenly_spaced_and_shift_with_the_batch():
    """A slow reference: every number between the first and the last that are read."""
    x = torch.arange(3000.0)
    assert x.nbytes > WHOLE_BYTES
    stride = 3000 // SAMPLE
    starts = set()
    for turn in range(2 * stride):
        start = turn * 7919 % stride
        read = x[start::stride]
        assert len(read) in (SAMPLE, SAMPLE + 1)
        assert batch_checksum([x], turn)[0] == batch_checksum([x.clone()], turn)[0]
        assert batch_checksum([x], turn)[0] == zlib.crc32(read.numpy().tobytes(), 1)
        other = torch.full_like(x, -1.0)
        other[start::stride] = read
        assert batch_checksum([other], turn) == batch_checksum([x], turn)
        starts.add(start)
    assert starts == set(range(stride))


@pytest.mark.parametrize(("elements", "whole"), [(1024, True), (1025, False)])
def test_tensors_are_read_whole_up_to_a_size(elements, whole):
    """Targets of a classifier are; of others a sample is enough."""
    x = torch.zeros(elements)
    detected = []
    for place in range(elements):
        other = x.clone()
        other[place] = 1.0
        detected.append(batch_checksum([x], 0)[0] != batch_checksum([other], 0)[0])
    assert all(detected) == whole
    assert sum(detected) >= SAMPLE


def test_of_a_very_large_batch_a_larger_sample_is_read(monkeypatch):
    """Even the comparison of all numbers has a limit."""
    monkeypatch.setattr(module, "MOST_BYTES", 400)
    x = torch.arange(101.0)
    monkeypatch.setattr(module, "LARGE_SAMPLE", 50)
    assert whole_checksum([x]) == zlib.crc32(x[::2].numpy().tobytes(), 1)
    assert whole_checksum([x[:100]]) == zlib.crc32(x[:100].numpy().tobytes(), 1)


def test_checksums_depend_on_every_tensor_and_their_order():
    """Inputs and targets that were exchanged, or one tensor too few, are another batch."""
    a, b = torch.arange(3.0), torch.arange(3.0, 6.0)
    rows = [[a, b], [b, a], [a], [b], []]
    for function in (whole_checksum, lambda tensors: batch_checksum(tensors, 0)[0]):
        assert len({function(row) for row in rows}) == len(rows)
    expected = zlib.crc32(b.numpy().tobytes(), zlib.crc32(a.numpy().tobytes(), 1))
    assert whole_checksum([a, b]) == batch_checksum([a, b], 7)[0] == expected


def test_weights_are_read_as_they_are_and_without_a_seed():
    """Checkpoints have their checksums."""
    x = torch.arange(6.0).reshape(2, 3)
    assert checksum(x) == zlib.crc32(x.numpy().tobytes())
    assert checksum(x.t()) == zlib.crc32(x.t().contiguous().numpy().tobytes())
    assert checksum(torch.ones(2, requires_grad=True).detach()) == checksum(torch.ones(2))
    assert checksum(torch.zeros(0)) == 0


def test_views_that_are_resolved_lazily_have_the_checksum_of_their_values():
    """NumPy has no such views; a parameter has no array either."""
    values = torch.view_as_complex(torch.arange(6.0).reshape(3, 2))
    for view in (values.conj(), values.conj().imag, values.clone().requires_grad_()):
        resolved = view.detach().resolve_conj().resolve_neg()
        assert checksum(view) == checksum(resolved) is not None
    assert values_of(torch.tensor([1.0, -2.0]).bfloat16()).dtype.name == "int16"
    assert values_of(torch.ones(3).to(torch.float8_e4m3fn)).dtype.name == "uint8"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([0.123456, -12345678.0, 1e-9, 3.0, 7.0], "0.1235, -1.235e+07, 1e-09, 3"),
        ([1.0], "1"),
        ([True, False], "True, False"),
        ([7, -8, 9, 10, 11, 12], "7, -8, 9, 10"),
        ([], "none"),
    ],
)
def test_four_numbers_are_shown_with_four_digits(values, text):
    """A message about a difference has room for no more."""
    tensor = torch.tensor(values)
    (glimpse,) = batch_checksum([tensor], 0)[1]
    assert glimpse[0] is tensor.dtype
    assert format_numbers(glimpse) == text


def test_a_glimpse_is_short_and_begins_with_the_first_numbers_read():
    """Those of the last batches stay in memory."""
    x = torch.arange(100.0, dtype=torch.float64)
    (glimpse,) = batch_checksum([x], 0)[1]
    assert glimpse == (torch.float64, x[:8].numpy().tobytes())
    assert batch_checksum([torch.eye(2).to_sparse()], 0)[1] == [(torch.float32, b"")]
