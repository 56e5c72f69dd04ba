"""Checksums of weights and batches."""

from __future__ import annotations

import pytest
import torch

from penstock.ranks.checksum import (
    SAMPLE,
    WHOLE_BYTES,
    batch_checksum,
    checksum,
    format_numbers,
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
