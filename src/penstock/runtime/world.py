"""World: the ranks of a run, those that live in this process, and what they say to each other
outside programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from penstock.runtime.board import Board
from penstock.runtime.calls import Calls
from penstock.transport.payload import TensorForm
from penstock.transport.transport import Transport

T = TypeVar("T")


class World(Protocol):
    """All ranks of a run. Methods without a rank are called by every process of the run, in the
    same order.
    """

    size: int
    local_ranks: tuple[int, ...]
    calls: Calls

    @property
    def receives_on_device(self) -> bool:
        """Whether a posted receive occupies the device until its message comes, as NCCL's kernels
        do.
        """
        ...

    def device(self, rank: int) -> torch.device:
        """Where a local rank computes."""
        ...

    def transport(self, rank: int) -> Transport:
        """A local rank's end of its links."""
        ...

    def board(self, rank: int) -> Board:
        """A local rank's view of the board."""
        ...

    def run(self, job: Callable[[int], T]) -> dict[int, T]:
        """Run `job` for every local rank at once. If one fails, all ranks everywhere are stopped
        and the first error raised.
        """
        ...

    def broadcast(self, value: Any, source: int, form: TensorForm | None = None) -> Any:
        """What rank `source` holds, a nested value of tensors, on every rank. `form` is given when
        it is one known tensor.
        """
        ...

    def gather(
        self, local: Mapping[int, Sequence[Tensor]], forms: Mapping[int, Sequence[TensorForm]]
    ) -> dict[int, list[Tensor]]:
        """The tensors of all ranks on rank 0's process, on the CPU; elsewhere nothing. `forms`
        describes all ranks' tensors.
        """
        ...

    def tell(self, numbers: Tensor) -> None:
        """Called by one rank: let all other processes `hear` some doubles, in the order of telling,
        and go on at once.

        Raises:
            TransportLost: the links are closed.
        """
        ...

    def hear(self, source: int, count: int) -> Callable[[], Tensor]:
        """Expect that many doubles from rank `source` of another process; what is returned waits
        for them.
        """
        ...

    def barrier(self) -> None:
        """Go on when all have come here."""
        ...

    def abandon(self, error: BaseException) -> None:
        """Stop all ranks everywhere because of an error outside `run`."""
        ...

    def close(self) -> None:
        """Let go of threads and links."""
        ...
