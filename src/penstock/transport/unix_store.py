"""The store of the ranks of `launch`, over a Unix socket in a folder that only its user can enter.

torch's TCPStore listens on a port where every process of the machine can list, read and write its
keys, without a password. All ranks of `launch` are on one host, so that the file system
can decide who may connect. Frames are JSON: nothing that arrives is executed.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
from torch._C._distributed_c10d import Store

#: Environment variable of ranks that `launch` has started: MASTER_PORT, a colon, and the path of
#: the socket. The port tells whether another launcher has set its own variables since.
VARIABLE = "PENSTOCK_STORE"

#: Longest frame in bytes.
_MAX_FRAME = 1 << 28

_LENGTH = struct.Struct("!I")

#: Seconds between two requests of a waiting client: at first, and at most.
_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02

#: Connections that wait to be accepted.
_BACKLOG = 128


def launch_store() -> UnixStore | None:
    """Return the store of the launcher that has started this rank; None if it was not `launch`."""
    port, _, path = os.environ.get(VARIABLE, "").partition(":")
    if not path or port != os.environ.get("MASTER_PORT"):
        return None
    return _connect(path)


@cache
def _connect(path: str) -> UnixStore:
    """Return the store at a path.

    It lives as long as the process: torch's C++ side does not keep the Python object, without which
    it has no methods to call.
    """
    return UnixStore(Path(path))


class UnixStore(Store):
    """A client of a `StoreServer`; see `torch.distributed.Store`.

    Values are bytes. Every method raises `DistNetworkError` if the server has ended.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _short_path(path) as address:
            self._socket.connect(address)

    def set(self, key: str, value: str | bytes) -> None:
        """See `Store.set`."""
        self._ask("set", key, _text(value))

    def get(self, key: str) -> bytes:
        """See `Store.get`: wait for the key."""
        self.wait([key])
        return self._ask("get", key).encode("latin-1")  # type: ignore[no-any-return]

    def add(self, key: str, amount: int) -> int:
        """See `Store.add`."""
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """See `Store.compare_set`."""
        value: str = self._ask("compare_set", key, _text(expected), _text(desired))
        return value.encode("latin-1")

    def check(self, keys: Sequence[str]) -> bool:
        """See `Store.check`."""
        return bool(self._ask("check", list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """See `Store.wait`.

        Raises:
            DistStoreError: the keys are not there in time.
        """
        limit: timedelta = (
            self.timeout if timeout is None else timeout  # type: ignore[attr-defined]  # not in stubs
        )
        end_s = time.monotonic() + limit.total_seconds()
        pause_s = _PAUSE_S
        while not self.check(keys):
            if time.monotonic() >= end_s:
                raise dist.DistStoreError(f"{list(keys)} are not in the store after {limit}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def delete_key(self, key: str) -> bool:
        """See `Store.delete_key`."""
        return bool(self._ask("delete", key))

    def num_keys(self) -> int:
        """See `Store.num_keys`."""
        return int(self._ask("count"))

    def _ask(self, *request: Any) -> Any:
        """Send a request and return the answer."""
        try:
            with self._lock:
                _send(self._socket, list(request))
                answer = _receive(self._socket)
        except OSError as error:
            raise dist.DistNetworkError(f"Connection to the launcher lost: {error}") from error
        except BaseException:
            # Interrupted, such as by a signal handler: the next request would read this answer.
            self._socket.close()
            raise
        if answer is None:
            raise dist.DistNetworkError("Connection to the launcher lost: it has ended")
        return answer[0]


class StoreServer:
    """Holds the keys; a thread serves each connection.

    Args:
        path: of the socket; its folder has mode 0700.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._values: dict[str, str] = {}
        # The launcher reads and writes beside the threads of the connections, which hold the lock
        # when they call the same methods.
        self._lock = threading.RLock()
        self._closed = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _short_path(path) as address:
            self._listener.bind(address)
        path.chmod(0o600)
        self._listener.listen(_BACKLOG)
        self._connections: list[socket.socket] = []
        self._handlers: dict[str, Callable[..., Any]] = {
            "set": self.set,
            "get": self.get,
            "add": self._add,
            "compare_set": self.compare_set,
            "check": lambda keys: all(key in self._values for key in keys),
            "delete": lambda key: self._values.pop(key, None) is not None,
            "count": lambda: len(self._values),
        }
        threading.Thread(target=self._accept, name="penstock-store", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def find(self, ending: str) -> list[str]:
        """Return the keys that end with a text."""
        with self._lock:
            return [key for key in self._values if key.endswith(ending)]

    def set(self, key: str, value: str) -> None:
        """Set a value, as text with one character for every byte."""
        with self._lock:
            self._values[key] = value

    def get(self, key: str) -> str | None:
        """Return a value as text with one character for every byte; None if there is none."""
        with self._lock:
            return self._values.get(key)

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Set a value if the present one is as expected; an empty one is expected where there is none.

        Returns:
            The value afterwards; `expected` if there is still none.
        """
        with self._lock:
            present = self._values.get(key)
            if present == expected or (present is None and not expected):
                self._values[key] = desired
            return self._values.get(key, expected)

    def close(self) -> None:
        """End all connections."""
        self._closed = True
        for connection in [self._listener, *self._connections]:
            # Not connected any more.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first, and return it."""
        number = int(self._values.get(key, "0")) + amount
        self._values[key] = str(number)
        return number

    def _accept(self) -> None:
        """Accept connections until the server is closed."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_LONGEST_PAUSE_S)  # such as a launcher that has no descriptors left
                continue
            self._connections.append(connection)
            threading.Thread(
                target=self._serve, args=(connection,), name="penstock-store", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer the requests of a connection."""
        # A rank that is killed closes its end at any place of a request; the others go on.
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            while (request := _receive(connection)) is not None:
                name, *values = request
                with self._lock:
                    answer = self._handlers[name](*values)
                _send(connection, [answer])
        connection.close()


@contextlib.contextmanager
def _short_path(path: Path) -> Iterator[str]:
    """Return an address of a path that a socket's address has room for: 107 bytes on Linux."""
    if sys.platform != "linux":
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _text(value: str | bytes) -> str:
    """Return a value as text with one character for every byte."""
    return (value.encode() if isinstance(value, str) else bytes(value)).decode("latin-1")


def _send(connection: socket.socket, values: list[Any]) -> None:
    """Send a frame."""
    content = json.dumps(values).encode()
    connection.sendall(_LENGTH.pack(len(content)) + content)


def _receive(connection: socket.socket) -> list[Any] | None:
    """Receive a frame; None if the other end has closed the connection.

    Raises:
        OSError: the connection broke, or the frame is too long.
    """
    head = _read(connection, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > _MAX_FRAME:
        raise OSError(f"a frame of {length} bytes")
    content = _read(connection, length)
    if content is None:
        return None
    values: list[Any] = json.loads(content)
    return values


def _read(connection: socket.socket, count: int) -> bytes | None:
    """Read exactly `count` bytes; None at the end of the stream."""
    parts = bytearray()
    while len(parts) < count:
        # recv allocates as many bytes as it is asked for, and the count comes from the other side.
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)
