"""What a stranger on the same machine tries against a run: this program runs as another user.

    python stranger.py '{"pids": [17, 18], "paths": ["/tmp/penstock-launch-x"]}'

It prints JSON: by attempt, "refused" or what it got. It needs the standard library alone.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

#: Requests of ptrace(2), and numbers of system calls of x86-64, from Linux's headers.
PTRACE_ATTACH = 16
PIDFD_OPEN, PIDFD_GETFD = 434, 438


def listening(pid: int) -> list[tuple[str, int]]:
    """Return the TCP addresses on which something listens in the network of a process."""
    addresses = []
    for row in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = row.split()
        if fields[3] == "0A":
            address, port = fields[1].split(":")
            host = socket.inet_ntoa(bytes.fromhex(address)[::-1])
            addresses.append((host, int(port, 16)))
    return addresses


def read(path: str) -> str:
    """Read a file. Returns its first bytes."""
    with Path(path).open("rb") as content:
        return repr(content.read(64))


def list_folder(path: str) -> str:
    """List a folder."""
    return str([entry.name for entry in Path(path).iterdir()])


def write(path: str) -> str:
    """Write a file into a folder."""
    (Path(path) / "stranger").write_text("x")
    return "written"


def connect(path: str) -> str:
    """Connect to a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(path)
    return "connected"


def open_descriptors(pid: int) -> str:
    """Open all descriptors of a process."""
    return str([read(str(entry)) for entry in Path(f"/proc/{pid}/fd").iterdir()])


def take_descriptor(pid: int) -> str:
    """Take a copy of a descriptor of a process."""
    return call("syscall", PIDFD_GETFD, int(call("syscall", PIDFD_OPEN, pid, 0)), 0, 0)


def call(function: str, *numbers: int) -> str:
    """Call a function of the C library. Returns its result.

    Raises:
        OSError: it is refused.
    """
    result = getattr(ctypes.CDLL(None, use_errno=True), function)(*numbers)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return str(result)


def send(pid: int, number: int) -> str:
    """Send a signal."""
    os.kill(pid, number)
    return "sent"


#: What is tried with a process, and with a folder or socket; each raises OSError if it is refused.
OF_PROCESS: dict[str, Callable[[int], str]] = {
    "read mem": lambda pid: read(f"/proc/{pid}/mem"),
    "read environ": lambda pid: read(f"/proc/{pid}/environ"),
    "read maps": lambda pid: read(f"/proc/{pid}/maps"),
    "read stack": lambda pid: read(f"/proc/{pid}/stack"),
    "list descriptors": lambda pid: list_folder(f"/proc/{pid}/fd"),
    "open descriptors": open_descriptors,
    "list mapped files": lambda pid: list_folder(f"/proc/{pid}/map_files"),
    "list folder": lambda pid: list_folder(f"/proc/{pid}/cwd"),
    "take a descriptor": take_descriptor,
    "attach": lambda pid: call("ptrace", PTRACE_ATTACH, pid, 0, 0),
    "save": lambda pid: send(pid, signal.SIGUSR1),
    "terminate": lambda pid: send(pid, signal.SIGTERM),
    "stop": lambda pid: send(pid, signal.SIGSTOP),
    "kill": lambda pid: send(pid, signal.SIGKILL),
}
OF_PATH: dict[str, Callable[[str], str]] = {
    "list": list_folder,
    "read": read,
    "write into": write,
    "connect to": connect,
}


def disturb_sockets(pid: int) -> int:
    """Connect to all TCP sockets of a run, and send what they do not expect. Returns their number."""
    addresses = listening(pid)
    for address in addresses:
        try:
            with socket.create_connection(address, timeout=5.0) as client:
                client.sendall(bytes(range(256)) * 64)
        except OSError:
            continue
    return len(addresses)


def main() -> None:
    """Try everything, and print the results."""
    job = json.loads(sys.argv[1])
    results: dict[str, str] = {}
    tried = [(name, pid, attempt) for pid in job["pids"] for name, attempt in OF_PROCESS.items()]
    tried += [(name, path, attempt) for path in job["paths"] for name, attempt in OF_PATH.items()]
    for name, target, attempt in tried:
        try:
            results[f"{name} {target}"] = attempt(target)
        except OSError as error:
            results[f"{name} {target}"] = f"refused: {error.strerror}"
    count = disturb_sockets(job["pids"][0])
    print(json.dumps({"user": os.getuid(), "sockets": count, "results": results}))


if __name__ == "__main__":
    main()
