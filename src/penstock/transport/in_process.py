"""Transport between threads of one process: a dictionary of payloads that are in flight."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from dataclasses import dataclass

from penstock.schedule.lower import Message
from penstock.transport.payload import Payload
from penstock.transport.transport import TransportLost, TransportTimeout


class Exchange:
    """The payloads in flight between the ranks of one process, by sender, receiver and message;
    those of one message in the order sent.

    Replicas of a stage send each other the same message at every update, and one of two may be an
    update ahead: so there may be several payloads of one message.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._payloads: defaultdict[tuple[int, int, Message], deque[Payload]] = defaultdict(deque)
        self._closed: str | None = None

    def put(self, key: tuple[int, int, Message], payload: Payload) -> None:
        """Leave a payload for its receiver."""
        with self._changed:
            self._payloads[key].append(payload)
            self._changed.notify_all()

    def take(self, key: tuple[int, int, Message], deadline_s: float) -> Payload:
        """Wait for a payload and remove it.

        Raises:
            TransportTimeout: it did not arrive within the deadline.
            TransportLost: the exchange was closed.
        """
        with self._changed:
            notified = self._changed.wait_for(
                lambda: key in self._payloads or self._closed is not None, deadline_s
            )
            if key in self._payloads:
                queue = self._payloads[key]
                payload = queue.popleft()
                if not queue:
                    del self._payloads[key]
                return payload
            if notified:
                raise TransportLost(self._closed)
            raise TransportTimeout

    def close(self, why: str) -> None:
        """End all present and future waits with `TransportLost`."""
        with self._changed:
            self._closed = why
            self._changed.notify_all()

    def reopen(self) -> None:
        """Discard all payloads in flight after a failed step."""
        with self._changed:
            self._closed = None
            self._payloads.clear()


@dataclass(frozen=True)
class _Arrival:
    """See `Arrival`."""

    exchange: Exchange
    key: tuple[int, int, Message]
    deadline_s: float

    def wait(self) -> Payload:
        """See `Arrival.wait`."""
        return self.exchange.take(self.key, self.deadline_s)


@dataclass(frozen=True)
class MemoryTransport:
    """One rank's end of an `Exchange`."""

    rank: int
    exchange: Exchange
    deadline_s: float
    shares: bool = True

    def arrives_at_once(self, peer: int) -> bool:
        """See `Transport.arrives_at_once`."""
        del peer
        return True

    def send(self, peer: int, message: Message, payload: Payload, signature: str) -> int:
        """See `Transport.send`; the receiver gets the sender's tensors, not copies."""
        del signature
        self.exchange.put((self.rank, peer, message), payload)
        return payload.nbytes

    def post(self, peer: int, message: Message, signature: str) -> _Arrival:
        """See `Transport.post`."""
        del signature
        return _Arrival(self.exchange, (peer, self.rank, message), self.deadline_s)

    def release(self, before: int) -> None:
        """See `Transport.release`. Nothing to do: a sent message has left at once."""

    def drain(self) -> None:
        """See `Transport.drain`. Nothing to do: a sent message has left at once."""
