"""Waits of one rank for other ranks: errors of the transport become those of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from penstock.errors import DeadlineExceeded, PeerFailed, RunError
from penstock.ranks.status_board import Board
from penstock.transport.transport import TransportLost, TransportTimeout

T = TypeVar("T")

#: Seconds to wait for the reason of a failure, once a link is lost: the rank that failed closes its
#: links before its reason has reached the board.
_REASON_PATIENCE_S = 2.0


@dataclass(frozen=True)
class PeerGuard:
    """Converts the transport's errors on one rank.

    Attributes:
        rank: the rank.
        board: where it finds the status and the failures of other ranks.
    """

    rank: int
    board: Board

    def __call__(self, peer: int, action: Callable[[], T]) -> T:
        """Call `action`, which may wait for rank `peer`.

        Raises:
            PeerFailed: the peer failed or ended.
            DeadlineExceeded: it did not answer in time.
        """
        return self.during(f"rank {peer}", action)

    def during(self, awaited: str, action: Callable[[], T]) -> T:
        """Call `action`, which waits for what `awaited` describes. Raises as `__call__`."""
        started = time.monotonic()
        try:
            return action()
        except (TransportTimeout, TransportLost) as error:
            raise self.error(error, awaited, time.monotonic() - started) from error

    def cause(self, awaited: str) -> PeerFailed | None:
        """Return the error for what another rank's failure has spoilt; None if none has failed.

        A message that NCCL's abort has ended arrives as garbage, without an error.

        Args:
            awaited: what was received.
        """
        reason = self.board.failure(patience_s=_REASON_PATIENCE_S)
        return None if reason is None else PeerFailed(self.rank, awaited, reason)

    def error(
        self, error: TransportTimeout | TransportLost, awaited: str, waited_s: float
    ) -> RunError:
        """Return the error of a run for an error of the transport.

        Args:
            error: what the transport raised.
            awaited: what the rank waited for.
            waited_s: seconds for which it waited.
        """
        if isinstance(error, TransportTimeout):
            return DeadlineExceeded(self.rank, awaited, waited_s, self.board.describe_others())
        reason = self.board.failure(patience_s=_REASON_PATIENCE_S)
        return PeerFailed(
            self.rank, awaited, reason or "the rank that was to send it ended without a message"
        )
