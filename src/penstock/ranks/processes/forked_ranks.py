"""The launcher's side of the fork server: it keeps one server, and holds the ranks that it forks."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from penstock.ranks.processes.fork_server import READY, Request, rank_command

#: Variables that no library reads at import: they name the running test or command, or a folder that
#: torch sets in the launcher, with its first optimizer, and reads whenever it uses it.
_VOLATILE = frozenset({"PYTEST_CURRENT_TEST", "_", "TORCHINDUCTOR_CACHE_DIR"})

#: A server may end while a request is on its way, as it was idle: the second one has just started.
_ATTEMPTS = 2


class RankProcess(Protocol):
    """A rank's process, as `subprocess.Popen` has it."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """

    def send_signal(self, sig: int) -> None:
        """Send a signal; nothing happens if the process has ended."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def kill(self) -> None:
        """Send SIGKILL."""


class ForkedProcess:
    """A rank that the fork server has forked; see `RankProcess`.

    Args:
        pid: process id.
        process: file descriptor of the process, for signals.
        status: pipe from which its exit status is read.
    """

    def __init__(self, pid: int, process: int, status: Connection) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._process, self._status = process, status
        self._lock = threading.Lock()

    def __del__(self) -> None:
        os.close(self._process)

    def poll(self) -> int | None:
        """See `RankProcess.poll`."""
        with self._lock:
            if self.returncode is None and self._status.poll():
                try:
                    self.returncode = int(self._status.recv_bytes())
                except EOFError:  # the server has ended, and the kernel has killed its ranks
                    self.returncode = -signal.SIGKILL
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """See `RankProcess.wait`."""
        while (status := self.poll()) is None:
            if not self._status.poll(timeout):
                raise subprocess.TimeoutExpired(f"rank with pid {self.pid}", timeout or 0.0)
        return status

    def terminate(self) -> None:
        """See `RankProcess.terminate`."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """See `RankProcess.kill`."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, sig: int) -> None:
        """See `RankProcess.send_signal`."""
        with contextlib.suppress(ProcessLookupError):  # it has ended
            signal.pidfd_send_signal(self._process, sig)


class _Server:
    """A running fork server.

    Args:
        inherited: what its ranks inherit from it, see `_inherited_state`.
    """

    def __init__(self, inherited: object) -> None:
        self.inherited = inherited
        self.owner = os.getpid()
        self._ready = False
        self._control, server_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = "penstock.ranks.processes.fork_server"
        command = [
            sys.executable,
            # A file in the working directory must not hide a module.
            "-P",
            "-m",
            program,
            str(server_socket.fileno()),
            str(self.owner),
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search_path())}
        # Libraries that read it at import must not start threads in a process that is forked.
        environment["OMP_NUM_THREADS"] = "1"
        self._process = subprocess.Popen(  # noqa: S603 - our own program
            command,
            env=environment,
            pass_fds=[server_socket.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        server_socket.close()

    def answer(self) -> bool:
        """Wait until the server is ready. Returns False if it cannot fork."""
        # The server has ended before it answered: it counts as unable to fork.
        with contextlib.suppress(OSError):
            self._ready = self._control.recv(64) == READY
        return self._ready

    def fork(self, request: Path) -> ForkedProcess | None:
        """Fork a rank for the `Request` in a file; None if the server has ended."""
        reader, writer = Pipe(duplex=False)
        with contextlib.ExitStack() as stack:
            stack.callback(writer.close)
            descriptors = [_output(stack, 1), _output(stack, 2), writer.fileno()]
            try:
                socket.send_fds(self._control, [str(request).encode()], descriptors)
                message, processes, _, _ = socket.recv_fds(self._control, 64, 1)
            except OSError:
                # The server has ended; below, no answer means that.
                message = b""
            except BaseException:
                # Interrupted, as by Ctrl-C: the next request would read this answer.
                self._control.close()
                raise
        return ForkedProcess(int(message), processes[0], reader) if message else None

    def close(self) -> None:
        """End the server when its last rank has ended."""
        self._control.close()
        # In a fork of the launcher the server is not a child, and cannot be waited for.
        if self.owner == os.getpid():
            if not self._ready:
                # It imports torch, for seconds, and reads nothing before it is through.
                self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)


class ForkServer:
    """Forks ranks from one server, which starts with the first rank and anew when what ranks
    inherit from it has changed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: _Server | None = None
        self._refused = sys.platform != "linux" or not hasattr(os, "pidfd_open")

    def start(self, request: Request, folder: Path) -> ForkedProcess | None:
        """Fork a rank.

        Args:
            request: what it is to run.
            folder: where files for the server may be written.

        Returns:
            The rank's process; None where the system or the imported libraries do not allow a
            fork, so that the rank has to be started as a new process.
        """
        file = folder / f"request-{request['environment']['RANK']}"
        file.write_text(json.dumps(request))
        with self._lock:
            for _ in range(_ATTEMPTS):
                server = self._current()
                process = server.fork(file) if server else None
                if process is not None:
                    return process
                self._drop()
        return None

    def _current(self) -> _Server | None:
        """Return the server, started if there is none that ranks can inherit from."""
        inherited = _inherited_state()
        server = self._server
        if server and (server.owner != os.getpid() or server.inherited != inherited):
            self._drop()
        if self._server is None and not self._refused:
            self._server = _Server(inherited)
            try:
                self._refused = not self._server.answer()
            except BaseException:
                # Interrupted, as by Ctrl-C: the next request would read this answer.
                self._drop()
                raise
        return None if self._refused else self._server

    def _drop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def close(self) -> None:
        """End the server."""
        with self._lock:
            self._drop()


def start_rank(environment: dict[str, str], job: Path, result: Path) -> RankProcess:
    """Start a process of `penstock.ranks.processes.rank_process`, by a fork where that is possible.

    Args:
        environment: its environment variables, `RANK` among them.
        job: file with the pickled function and its arguments.
        result: file for the value or the error.
    """
    request = Request(
        environment=environment,
        path=search_path(),
        folder=str(Path.cwd()),
        job=str(job),
        result=str(result),
    )
    forked = FORK_SERVER.start(request, job.parent)
    if forked is not None:
        return forked
    return subprocess.Popen(  # noqa: S603 - our own program
        [*rank_command(), str(job), str(result), str(os.getpid())],
        env=environment,
        stdin=subprocess.DEVNULL,
    )


def search_path() -> list[str]:
    """Return `sys.path` with the working directory spelt out."""
    return [entry or str(Path.cwd()) for entry in sys.path]


def _inherited_state() -> object:
    """Return what a process inherits from its parent and cannot be told later.

    Libraries read their settings from the environment when they are imported.
    """
    import resource  # Linux has it, as it has fork servers

    environment = {name: value for name, value in os.environ.items() if name not in _VOLATILE}
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    limits = [resource.getrlimit(getattr(resource, name)) for name in names]
    return environment, limits, os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)


def _output(stack: contextlib.ExitStack, descriptor: int) -> int:
    """Return the descriptor if it is open, else one of the null device."""
    try:
        os.fstat(descriptor)
    except OSError:
        descriptor = os.open(os.devnull, os.O_WRONLY)
        stack.callback(os.close, descriptor)
    return descriptor


#: The fork server of this process. Starting one takes seconds, so launches share it.
FORK_SERVER = ForkServer()
atexit.register(FORK_SERVER.close)
