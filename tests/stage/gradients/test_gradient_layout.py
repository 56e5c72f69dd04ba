"""Places of gradients in one range of bytes, and the pieces that replicas sum."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.stage.gradients.gradient_layout import GradientLayout, Region


def parameters():
    """Return parameters of several dtypes and memory layouts, in mixed order."""
    return [
        nn.Parameter(torch.zeros(5, 3)),
        nn.Parameter(torch.zeros(7, dtype=torch.float64)),
        nn.Parameter(torch.zeros(3, 4).t()),
        nn.Parameter(torch.zeros((), dtype=torch.float64)),
        nn.Parameter(torch.zeros(4, 6)[:, :2]),
        nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)),
        nn.Parameter(torch.zeros(1, 2, 3, 4).to(memory_format=torch.channels_last)),
    ]


def test_every_gradient_has_a_place_of_its_own_in_the_form_of_its_parameter():
    """Written one after the other, all are read as written; a dense layout of memory stays."""
    values = parameters()
    layout = GradientLayout(values)
    memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
    views = layout.views(memory)
    for number, (view, parameter) in enumerate(zip(views, values, strict=True)):
        assert (view.shape, view.dtype) == (parameter.shape, parameter.dtype)
        dense = parameter.is_contiguous() or number in (2, 6)
        assert view.stride() == (parameter.stride() if dense else (2, 1))
        view.fill_(number + 1)
    for number, view in enumerate(views):
        assert (view == number + 1).all()
    flat = torch.cat([region.double() for region in layout.flats(memory)])
    assert flat.sum() == sum((n + 1) * p.numel() for n, p in enumerate(values))
    assert len(flat) == sum(p.numel() for p in values), "no element is between two gradients"


def test_regions_are_aligned_and_end_within_the_bytes():
    """Kernels are faster on aligned memory; each dtype has one region, in order of appearance."""
    layout = GradientLayout(parameters())
    dtypes = [torch.float32, torch.float64, torch.bfloat16]
    assert [region.dtype for region in layout.regions] == dtypes
    assert [region.count for region in layout.regions] == [15 + 12 + 8 + 24, 8, 2]
    end = 0
    for region in layout.regions:
        assert region.start % 64 == 0
        assert end <= region.start < end + 64
        end = region.start + region.count * region.dtype.itemsize
    assert end <= layout.nbytes < end + 64
    assert GradientLayout([]).nbytes == 0


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 1000, 4096])
@pytest.mark.parametrize("pieces", [1, 2, 3, 7])
def test_pieces_cover_a_region_without_gaps_in_almost_equal_parts(count, pieces):
    """They begin at whole cache lines of the smallest dtypes."""
    region = Region(torch.float32, 0, count)
    end = 0
    for position in range(pieces):
        first, piece_end = region.piece(position, pieces)
        assert first == end
        assert first % 64 == 0
        end = piece_end
        assert abs((piece_end - first) - count / pieces) <= 64 + 1
    assert end == count
