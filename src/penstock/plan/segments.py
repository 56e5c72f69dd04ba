"""Which layers run again before their backward, and which of them together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class Selection:
    """Layers that run again, ascending, and those among them that begin a segment of their own
    though the layer before does, too.
    """

    recomputed: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()

    def of_stage(self, first: int, end: int) -> list[tuple[int, int]]:
        """The segments of a stage that has layers `first` up to the one before `end`: the first
        layer of each, and one past its last.
        """
        return segments([layer for layer in self.recomputed if first <= layer < end], self.starts)

    @classmethod
    def of_segments(cls, found: Iterable[tuple[int, int]], firsts: Collection[int]) -> Selection:
        """The selection that has these segments, where stages begin at the layers `firsts`."""
        ordered = sorted(found)
        ends = {end for _, end in ordered}
        layers = tuple(layer for first, end in ordered for layer in range(first, end))
        return cls(
            layers, tuple(first for first, _ in ordered if first in ends and first not in firsts)
        )


def segments(recomputed: Iterable[int], starts: Collection[int] = ()) -> list[tuple[int, int]]:
    """Runs of consecutive layers: the first of each, and one past its last.

    >>> segments([1, 2, 3, 6]), segments([1, 2, 3, 6], starts=[3])
    ([(1, 4), (6, 7)], [(1, 3), (3, 4), (6, 7)])

    Args:
        recomputed: indices of layers, in any order.
        starts: layers at which a run is cut.
    """
    return list(_runs(sorted(recomputed), starts))


def _runs(layers: list[int], starts: Collection[int]) -> Iterator[tuple[int, int]]:
    first = None
    for place, layer in enumerate(layers):
        if first is None:
            first = layer
        after = layers[place + 1] if place + 1 < len(layers) else None
        if after != layer + 1 or after in starts:
            yield first, layer + 1
            first = None
