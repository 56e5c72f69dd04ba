"""Transport inside one process: a dictionary that threads put payloads into and take them from."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from dataclasses import dataclass

from penstock.schedule.lower import Message
from penstock.transport.payload import Payload
from penstock.transport.transport import TransportLost, TransportTimeout


class Exchange:
    """What the ranks of one process share: payloads on their way, by sender, receiver and message;
    of one message in the order sent.

    Copies of a stage send each other the same message at every update, and one of two may be an
    update ahead.
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
        """Wait for a payload and take it."""
        with self._changed:
            came = self._changed.wait_for(
                lambda: key in self._payloads or self._closed is not None, deadline_s
            )
            if key in self._payloads:
                waiting = self._payloads[key]
                payload = waiting.popleft()
                if not waiting:
                    del self._payloads[key]
                return payload
            if came:
                raise TransportLost(self._closed)
            raise TransportTimeout

    def close(self, why: str) -> None:
        """Let everybody who waits, or will wait, go with `TransportLost`."""
        with self._changed:
            self._closed = why
            self._changed.notify_all()

    def reopen(self) -> None:
        """Forget a failed step: nothing is on its way any more."""
        with self._changed:
            self._closed = None
            self._payloads.clear()


@dataclass(frozen=True)
class _Arrival:
    exchange: Exchange
    key: tuple[int, int, Message]
    deadline_s: float

    def wait(self) -> Payload:
        return self.exchange.take(self.key, self.deadline_s)


@dataclass(frozen=True)
class MemoryTransport:
    """One rank's end of an `Exchange`."""

    rank: int
    exchange: Exchange
    deadline_s: float
    shares: bool = True

    def send(self, peer: int, message: Message, payload: Payload, signature: str) -> None:
        """See `Transport.send`; the tensors are handed over, not copied."""
        del signature
        self.exchange.put((self.rank, peer, message), payload)

    def post(self, peer: int, message: Message, signature: str) -> _Arrival:
        """See `Transport.post`."""
        del signature
        return _Arrival(self.exchange, (peer, self.rank, message), self.deadline_s)

    def release(self, before: int) -> None:
        """Nothing is ever under way here."""

    def drain(self) -> None:
        """Nothing is ever under way here."""
