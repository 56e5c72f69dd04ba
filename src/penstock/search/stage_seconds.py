"""The seconds of every op and transfer of every stage, with all defaults of the costs filled in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SettingError
from penstock.simulate.cost_arrays import Amounts
from penstock.simulate.costs import Costs

#: Indexed by stage or boundary, then by micro-batch.
Seconds = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of every F, I and W, and of every transfer up to the next stage and back down, as
    `simulate` counts them.
    """

    forward: Seconds
    input_grad: Seconds
    weight_grad: Seconds
    up: Seconds
    down: Seconds

    @classmethod
    def of(cls, costs: Costs, micro_batches: int) -> StageSeconds:
        """Return the seconds of all stages that `costs.forward` has entries for.

        Raises:
            SettingError: `costs.forward` does not have one entry per stage, or other costs are for
                another number of stages.
        """
        stages = stages_of(costs)
        amounts = Amounts.of([costs], stages, range(micro_batches))
        forward, _, input_grad, weight_grad = amounts.work()
        up, down = amounts.crossing()
        latency = amounts.get_or("latency")

        def rows(array: NDArray[np.float64], count: int) -> Seconds:
            """Return an array as nested tuples, one row per stage or boundary."""
            # The only vector of costs; one number stands for all stages or micro-batches.
            return tuple(map(tuple, np.broadcast_to(array[0], (count, micro_batches)).tolist()))

        return cls(
            rows(forward, stages),
            rows(input_grad, stages),
            rows(weight_grad, stages),
            rows(up + latency, stages - 1),
            rows(down + latency, stages - 1),
        )


def stages_of(costs: Costs) -> int:
    """Return the number of entries in `costs.forward`.

    Raises:
        SettingError: it does not have one entry per stage.
    """
    if not isinstance(costs.forward, tuple):
        raise SettingError(
            f"costs: forward is {costs.forward!r}; it must have one entry per stage, as "
            "spread_forward makes it"
        )
    return len(costs.forward)
