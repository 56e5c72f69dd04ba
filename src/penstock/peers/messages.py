"""JSON messages between a process that runs a study and the processes that it starts.

JSON, not pickle: a message comes from a process that has loaded another library, and nothing in it
is executed.
"""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from typing import Any, final

from penstock.errors import RunError
from penstock.files.json_values import json_value

#: A message of one step's time and loss takes 60 bytes: a million steps fit.
_MAX_BYTES = 64 * 2**20


class PeerFailed(RunError):
    """A process of a system raised an exception or died."""


class PeerTimeout(PeerFailed):
    """A process of a system did not answer within its time limit."""


class PeerMissing(RunError):
    """A package that a system needs is not installed."""


@final
class Channel:
    """One end of a socket on which messages are JSON objects."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def send(self, message: dict[str, Any]) -> None:
        """Send a message of plain values.

        Raises:
            OSError: the other process has ended.
        """
        self.connection.send_bytes(json.dumps(message).encode())

    def receive(self) -> dict[str, Any]:
        """Wait for a message.

        Raises:
            EOFError, OSError: the other process has ended.
            PeerFailed: the message is no JSON object.
        """
        content = self.connection.recv_bytes(_MAX_BYTES)
        # Losses of a run that diverged are not finite.
        message = json_value(content.decode(), "the message of a process", finite=False)
        if not isinstance(message, dict):
            raise PeerFailed("a process sent a message that is no JSON object")
        return message

    def close(self) -> None:
        """Close the socket."""
        self.connection.close()
