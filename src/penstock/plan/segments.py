"""Selective recompute: the layers that run again before their backward, in segments."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class Selection:
    """Layers to recompute before their backward.

    Attributes:
        recomputed: their indices, ascending.
        starts: those that begin a new segment although the layer before is recomputed as well.
    """

    recomputed: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()

    def of_stage(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return the segments of the stage with the layers `first` to `end - 1`, each as its first
        layer and the layer after its last one.
        """
        return segments([layer for layer in self.recomputed if first <= layer < end], self.starts)

    @classmethod
    def of_segments(
        cls, segment_bounds: Iterable[tuple[int, int]], stage_firsts: Collection[int]
    ) -> Selection:
        """Make the selection that has these segments.

        Args:
            segment_bounds: first layer, and layer after the last one, of each segment.
            stage_firsts: first layers of the stages.
        """
        ordered = sorted(segment_bounds)
        ends = {end for _, end in ordered}
        layers = tuple(layer for first, end in ordered for layer in range(first, end))
        starts = tuple(first for first, _ in ordered if first in ends and first not in stage_firsts)
        return cls(layers, starts)


def segments(recomputed: Iterable[int], starts: Collection[int] = ()) -> list[tuple[int, int]]:
    """Group layers into runs of consecutive ones, each as its first layer and the layer after its
    last one.

    >>> segments([1, 2, 3, 6]), segments([1, 2, 3, 6], starts=[3])
    ([(1, 4), (6, 7)], [(1, 3), (3, 4), (6, 7)])

    Args:
        recomputed: indices of layers, in any order.
        starts: layers that begin a new run.
    """
    runs: list[tuple[int, int]] = []
    for layer in sorted(recomputed):
        if runs and runs[-1][1] == layer and layer not in starts:
            runs[-1] = (runs[-1][0], layer + 1)
        else:
            runs.append((layer, layer + 1))
    return runs
