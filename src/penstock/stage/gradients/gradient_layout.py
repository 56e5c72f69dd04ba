"""Layout of the gradients of a stage in one range of bytes, and which replica sums which part.

All replicas have the same layout. The elements of one dtype are contiguous, and are divided among
the replicas in pieces of almost equal size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Pieces start at multiples of this number of elements, so that two ranks seldom write to one
#: cache line and vectorised loops start aligned.
_PIECE_ALIGNMENT = 64
#: Bytes to which the elements of a dtype are aligned.
_REGION_ALIGNMENT = 64


@dataclass(frozen=True)
class Region:
    """The elements of one dtype.

    Attributes:
        dtype: the dtype.
        start: position of the first byte.
        count: number of elements.
    """

    dtype: torch.dtype
    start: int
    count: int

    def of(self, memory: Tensor) -> Tensor:
        """Return the region of a tensor of bytes, as a flat tensor of the dtype."""
        nbytes = self.count * self.dtype.itemsize
        return memory[self.start : self.start + nbytes].view(self.dtype)

    def piece(self, position: int, pieces: int) -> tuple[int, int]:
        """Return the first element and the end of one of `pieces` pieces."""
        return self._bound(position, pieces), self._bound(position + 1, pieces)

    def _bound(self, position: int, pieces: int) -> int:
        """Return where a piece begins: at a multiple of the alignment."""
        if position == pieces:
            return self.count
        exact = position * self.count // pieces
        return exact // _PIECE_ALIGNMENT * _PIECE_ALIGNMENT


@dataclass(frozen=True)
class Place:
    """Where the gradient of one parameter is.

    Attributes:
        region: index of its region.
        start: position of its first element in the region.
        count: number of its elements.
    """

    region: int
    start: int
    count: int


class GradientLayout:
    """Places of the gradients of some parameters.

    Attributes:
        regions: one for each dtype.
        places: one for each parameter, in their order.
        nbytes: bytes of all regions.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._shapes = [parameter.shape for parameter in parameters]
        self._strides = [_dense_strides(parameter) for parameter in parameters]
        dtypes = list(dict.fromkeys(parameter.dtype for parameter in parameters))
        counts = dict.fromkeys(dtypes, 0)
        places = []
        for parameter in parameters:
            place = Place(dtypes.index(parameter.dtype), counts[parameter.dtype], parameter.numel())
            places.append(place)
            counts[parameter.dtype] += parameter.numel()
        regions = []
        position = 0
        for dtype, count in counts.items():
            regions.append(Region(dtype, position, count))
            nbytes = count * dtype.itemsize
            position += -(-nbytes // _REGION_ALIGNMENT) * _REGION_ALIGNMENT
        self.regions = tuple(regions)
        self.places = tuple(places)
        self.nbytes = position

    def flats(self, memory: Tensor) -> list[Tensor]:
        """Return the regions of a tensor of bytes."""
        return [region.of(memory) for region in self.regions]

    def views(self, memory: Tensor) -> list[Tensor]:
        """Return the place of every parameter in a tensor of bytes, in the parameter's form."""
        flats = self.flats(memory)
        views = []
        for place, shape, strides in zip(self.places, self._shapes, self._strides, strict=True):
            flat = flats[place.region][place.start : place.start + place.count]
            views.append(flat.as_strided(shape, strides))
        return views


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor if it fills its memory without gaps, else contiguous ones."""
    # 0 says that the tensor has neither gaps nor shared elements, in any order of dimensions, such as
    # channels_last.
    if tensor.is_contiguous() or torch._debug_has_internal_overlap(tensor) != 0:
        return _contiguous_strides(tensor.shape)
    return tuple(tensor.stride())


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
