"""Many tensors in few messages."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from penstock.ranks import buckets
from penstock.ranks.buckets import Packed, flat, gradient_flags, unflat


def tensors(seed):
    """Return tensors of random shapes and dtypes, some of them views with gaps."""
    rng = random.Random(seed)
    views = []
    for number in range(rng.randrange(1, 12)):
        dtype = rng.choice([torch.float32, torch.float64, torch.bfloat16])
        rows, columns = rng.randrange(0, 5), rng.randrange(1, 5)
        tensor = torch.full((rows, columns + 1), float(number), dtype=dtype)
        views.append(tensor[:, :columns] if rng.random() < 0.5 else tensor.t())
    return views


@pytest.mark.parametrize("seed", range(10))
def test_what_is_packed_is_unpacked_in_order(seed, monkeypatch):
    """Large tensors are parts of their own, up to a number; small ones one part per dtype."""
    monkeypatch.setattr(buckets, "_LARGE", 8)
    monkeypatch.setattr(buckets, "_MAX_LARGE", 2)
    values = tensors(seed)
    packed = Packed.of(values)
    restored = packed.unpacked([part.clone() for part in packed.parts])
    assert packed.count == len(values)
    for before, after in zip(values, restored, strict=True):
        assert (after.shape, after.dtype) == (before.shape, before.dtype)
        assert torch.equal(before, after)
    large = [i for i, value in enumerate(values) if value.numel() >= 8]
    assert len(packed.large) == min(2, len(large))
    assert packed.large == sorted(packed.large)
    least = min((values[i].numel() for i in packed.large), default=0)
    assert all(values[i].numel() <= least for i in large if i not in packed.large)
    small_dtypes = {value.dtype for i, value in enumerate(values) if i not in packed.large}
    assert len(packed.parts) == len(packed.large) + len(small_dtypes)


def test_a_large_tensor_is_not_copied_and_no_part_has_a_graph():
    """From exactly the least size on."""
    values = [torch.ones(1 << 16, requires_grad=True), torch.ones((1 << 16) - 1), torch.ones(2)]
    packed = Packed.of(values)
    assert packed.large == [0]
    assert packed.parts[0].data_ptr() == values[0].data_ptr()
    assert packed.parts[1].numel() == (1 << 16) + 1
    assert not any(part.requires_grad for part in packed.parts)


def test_flat_parts_are_views_of_no_tensor_and_split_by_shape():
    """In the order of first appearance of the dtypes."""
    values = [torch.ones(2), torch.ones(3).double(), torch.zeros(2, 2), torch.ones(()).double()]
    parts = flat(values)
    assert [(part.dtype, part.numel()) for part in parts] == [
        (torch.float32, 6),
        (torch.float64, 4),
    ]
    parts[0].add_(1)
    assert values[0].tolist() == [1, 1]
    views = unflat(parts, values)
    assert [view.shape for view in views] == [value.shape for value in values]
    assert views[0].tolist() == [2, 2]
    assert views[2].untyped_storage().data_ptr() == parts[0].untyped_storage().data_ptr()
    assert flat([]) == unflat([], []) == []
    with pytest.raises(ValueError, match="longer"):
        unflat(parts[:1], values)


def test_tensors_of_several_devices_have_a_flat_part_for_each():
    """A message is on one device; the order of the tensors is that of the caller."""
    meta = torch.device("meta")
    values = [torch.ones(2), torch.ones(3, device=meta), torch.zeros(2, 2)]
    packed = Packed.of(values)
    assert [(part.device.type, part.numel()) for part in packed.parts] == [("cpu", 6), ("meta", 3)]
    restored = packed.unpacked(packed.parts)
    assert [(value.device, value.shape) for value in restored] == [
        (value.device, value.shape) for value in values
    ]
    assert torch.equal(restored[2], values[2])


def test_flags_tell_which_parameters_have_a_gradient():
    """As numbers that replicas add up; equal flags are one tensor."""
    weights = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    weights[1].grad = torch.zeros(1)
    flags = gradient_flags(weights)
    assert (flags.tolist(), flags.dtype) == ([0, 1, 0], torch.uint8)
    assert gradient_flags(weights) is flags
    weights[1].grad, weights[2].grad = None, torch.ones(1)
    assert gradient_flags(weights).tolist() == [0, 0, 1]
    on_device = [nn.Parameter(torch.ones(1, device="meta"))] * 3
    assert gradient_flags(on_device).device.type == "meta"
