"""The global gradient norm, where ranks exchange norms on their devices.

Every parameter of the model has a place in one vector. A rank fills the places of the stages whose
home it is, all others are 0, so that the sum over all ranks is exact. No host waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.optim.clipping import total_norm
from penstock.ranks.processes.rank_reports import Report, exchange
from penstock.runtime.assembly import Assembly
from penstock.runtime.interpreter import Interpreter
from penstock.transport.devices.device_collectives import DeviceCollectives
from penstock.values.constants import dtype_name, dtype_of


class _Layout(NamedTuple):
    """The places of norms in the vector, after that of `nonfinite`.

    Attributes:
        offsets: by stage, the place of its first parameter.
        length: number of places.
        dtype: of the vector.
    """

    offsets: Mapping[int, int]
    length: int
    dtype: torch.dtype


class DeviceNorms:
    """Exchanges the norms of gradients among all ranks.

    Args:
        assembly: the stages of this rank.
        homes: by rank, the stages whose norms it contributes.
        norm_type: exponent of the norm, above 0: a parameter without a gradient counts as 0.
        collectives: operations of all ranks.
    """

    def __init__(
        self,
        assembly: Assembly,
        homes: Mapping[int, Sequence[int]],
        norm_type: float,
        collectives: DeviceCollectives,
    ) -> None:
        self._assembly, self._homes = assembly, homes
        self._norm_type, self._collectives = norm_type, collectives
        # For one epoch, see `GlobalStep.epoch`.
        self._epoch = -1
        self._layout = _Layout({}, 1, torch.float32)

    def total(
        self, interpreter: Interpreter, rows: Sequence[Tensor], nonfinite: Tensor, epoch: int
    ) -> tuple[Tensor, Tensor]:
        """Return the global norm, and the sum of `nonfinite` over all ranks.

        Args:
            interpreter: that of this rank.
            rows: for each stage whose home is this rank, the norms of its gradients.
            nonfinite: above 0 if this rank has a gradient that is not finite.
            epoch: changes when parameters are frozen or thawed, on all ranks alike.

        Raises:
            PeerFailed: another rank has failed.
        """
        if epoch != self._epoch:
            self._layout, self._epoch = self._agree_on_layout(interpreter), epoch
        layout = self._layout
        vector = torch.zeros(layout.length, dtype=layout.dtype, device=self._collectives.device)
        vector[:1] = nonfinite
        for stage, row in zip(self._homes[interpreter.rank], rows, strict=True):
            offset = layout.offsets[stage]
            vector[offset : offset + len(row)] = row

        def exchange_norms() -> Tensor:
            """Sum the vectors, and take the norm on rank 0, so that all have the same bits."""
            self._collectives.wait(self._collectives.sum(vector))
            norm = total_norm([vector[1:]], self._norm_type).to(vector.device)
            self._collectives.wait(self._collectives.broadcast(norm, 0))
            return norm

        norm = interpreter.guard.during("the norms of all ranks", exchange_norms)
        return norm, vector[:1].float()

    def _agree_on_layout(self, interpreter: Interpreter) -> _Layout:
        """Exchange the numbers and dtypes of parameters through host memory.

        A parameter without a gradient has a place, too: so the layout stays as it is in an epoch.
        """
        counts: list[list[int]] = []
        dtypes: list[str] = []
        for stage in self._homes[interpreter.rank]:
            parameters = interpreter.stages[stage].update.parameters
            counts.append([stage, len(parameters)])
            dtypes += {dtype_name(parameter.dtype) for parameter in parameters}
        report = Report(interpreter.rank, "", [counts, dtypes])
        reports = exchange(self._assembly.world, {interpreter.rank: report})
        sizes: dict[int, int] = {}
        all_dtypes: list[torch.dtype] = []
        for rank_report in reports:
            rank_counts, rank_dtypes = rank_report.value
            sizes.update({int(stage): int(count) for stage, count in rank_counts})
            all_dtypes += [dtype_of(name) for name in rank_dtypes]
        offsets, length = {}, 1
        for stage, size in sorted(sizes.items()):
            offsets[stage] = length
            length += size
        return _Layout(offsets, length, reduce(torch.promote_types, all_dtypes or [torch.float32]))


def device_norms(
    assembly: Assembly, homes: Mapping[int, Sequence[int]], norm_type: float
) -> DeviceNorms | None:
    """Return what exchanges norms on the devices of the ranks; None where messages carry them.

    Arguments as for `DeviceNorms`. Norms with an exponent of 0 or below count parameters without a
    gradient, and go in messages.
    """
    collectives = assembly.world.collectives
    if collectives is None or norm_type <= 0:
        return None
    return DeviceNorms(assembly, homes, norm_type, collectives)
