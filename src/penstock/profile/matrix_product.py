"""Seconds of a matrix product on a GPU, by its shape.

    share of the peak = BEST x m / (m + EDGE) x n / (n + EDGE) x k / (k + DEPTH)

A product of m x k by k x n is computed in tiles of its result. Small m or n leave tiles partly
empty and the last wave of tiles short; small k leaves little work per tile to hide its start and
end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

#: Share of the peak that large products reach, half widths of the result, and half depth. Fitted to
#: the seven throughputs of Narayanan et al. 2021, table 1 (benchmarks/scale).
BEST: Final = 0.75
EDGE: Final = 96.0
DEPTH: Final = 192.0


@final
@dataclass(frozen=True)
class MatrixProduct:
    """`count` equal products of m x k by k x n."""

    m: float
    n: float
    k: float
    count: float = 1.0

    @property
    def flops(self) -> float:
        """Operations: a multiplication and an addition are two."""
        return 2.0 * self.m * self.n * self.k * self.count

    @property
    def efficiency(self) -> float:
        """Share of the device's peak that products of this shape reach."""
        rows, columns = self.m / (self.m + EDGE), self.n / (self.n + EDGE)
        return BEST * rows * columns * self.k / (self.k + DEPTH)

    def transposed(self) -> tuple[MatrixProduct, MatrixProduct]:
        """Return the products of the backward: for the gradient of the input and of the weights."""
        return (
            MatrixProduct(self.m, self.k, self.n, self.count),
            MatrixProduct(self.k, self.n, self.m, self.count),
        )

    def seconds(self, flops_per_s: float, bytes_per_s: float, width: int = 2) -> float:
        """Return the seconds on a device: those of its operations, or of its bytes if longer.

        Args:
            flops_per_s: peak of the device.
            bytes_per_s: bandwidth of its memory.
            width: bytes of a number.
        """
        numbers = self.m * self.k + self.k * self.n + self.m * self.n
        traffic_s = width * self.count * numbers / bytes_per_s
        return max(self.flops / (flops_per_s * self.efficiency), traffic_s)
