"""DeepSpeed's balancing: minimise the difference between the heaviest and the lightest stage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.partition.catalogue import check_stages
from penstock.partition.chain_dp import RANGE, best_cut, stage_sums
from penstock.partition.validation import check_costs


def partition_balanced(weights: Sequence[float], stages: int) -> list[int]:
    """Balance stage weights by dynamic programming on (heaviest - lightest stage).

    Each state (layers so far, stages so far) keeps only the cut with the least difference, and
    among equal ones the one whose last stage is shortest. The result is not optimal, not even for
    the difference, because the best cut may contain a prefix that is not the best of its state.

        weights             | 5 1 1 1 1 1 1 5, 3 stages
        cut                 | 5 1  .  1 1 1 1 1  .  5

    >>> partition_balanced([5, 1, 1, 1, 1, 1, 1, 5], 3)
    [2, 5, 1]

    Args:
        weights: one per layer, finite and not negative.
        stages: from 1 to the number of layers.

    Returns:
        The number of layers of every stage.

    Raises:
        PartitionError: the weights or the number of stages are invalid.

    Source: DeepSpeed 38327e0, runtime/utils.py, partition_balanced; same choices, computed a row at
    a time in O(stages n^2).
    """
    numbers = check_costs(weights, "weights")
    layers = len(numbers)
    stages = check_stages(layers, stages)
    prefix = np.concatenate(([0.0], np.cumsum(numbers)))
    table = stage_sums(prefix, layers - stages + 1)
    return best_cut(lambda _: table, stages, layers, RANGE, longest_last=False).lengths
