"""Operations of all ranks on small tensors over one NCCL communicator: losses and norms.

They replace messages through host memory, for which the host would wait until the device has
computed what is sent. Every rank calls the same operations in the same order. A stream of its own
carries them, so that neither the host nor the ops of stages wait until a result is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import RunError
from penstock.transport.transport import TransportLost
from penstock.transport.wire import DeviceTransfer, Wire, is_lost

if TYPE_CHECKING:
    Transfer = Callable[[], dist.Work | None]


class DeviceCollectives:
    """One rank's end of the communicator of all ranks.

    Args:
        wire: the rank's links; its `everyone` is the communicator.
    """

    def __init__(self, wire: Wire) -> None:
        assert wire.everyone is not None
        self._wire, self._group = wire, wire.everyone

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._wire.device

    def broadcast(self, tensor: Tensor, source: int) -> DeviceTransfer | None:
        """Start to send a tensor from rank `source` to all others, in place.

        Args:
            tensor: contiguous, on the device, of the same shape and dtype on all ranks.
            source: the rank that has the values.

        Raises:
            TransportLost: the communicator is closed.
            RunError: NCCL refuses the tensor.
        """
        first = self._wire.ranks[source]
        return self._begin(
            lambda: dist.broadcast(tensor, first, group=self._group, async_op=True),
            f"the broadcast of rank {source}",
        )

    def sum(self, tensor: Tensor) -> DeviceTransfer | None:
        """Start to replace a tensor by its sum over all ranks. Arguments and errors as above."""
        return self._begin(
            lambda: dist.all_reduce(tensor, group=self._group, async_op=True),
            "the sum over all ranks",
        )

    def wait(self, transfer: DeviceTransfer | None) -> None:
        """Let the current stream wait for an operation; the host goes on. Raises as `Wire.wait`."""
        if transfer is not None:
            self._wire.wait(transfer)

    def _begin(self, transfer: Transfer, text: str) -> DeviceTransfer | None:
        """Start an operation.

        Raises:
            TransportLost: the communicator is closed.
            RunError: NCCL refuses the tensor.
        """
        try:
            work = transfer()
        except RuntimeError as error:
            if self._wire.lost or is_lost(error):
                raise TransportLost(str(error)) from error
            raise RunError(
                f"rank {self._wire.rank}: {text} failed: {type(error).__name__}: {error}"
            ) from error
        return None if work is None else DeviceTransfer(work, text)
