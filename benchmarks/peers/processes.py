"""Peers' processes, seen from the benchmark: started, told what to do, waited for, and ended
whatever happens.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from adapters.catalogue import System
from cells import Cell, Cuts, Spec
from torch._C._distributed_c10d import TCPStore

HERE = Path(__file__).parent
#: Seconds that making a system may take, or its first step.
LIMIT_S = 60


class NotInstalled(Exception):
    """A peer's package is not there."""


class PeerBroke(Exception):
    """A rank raised, died, or did not answer in time."""


class Nursery:
    """A peer's first process, from which its ranks are forked."""

    def __init__(self, system: System, folder: Path | None, log: Path) -> None:
        paths = [str(folder)] if folder else []
        paths += [
            str(HERE),
            *(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path),
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            **dict(system.variables),
        }
        command = [
            sys.executable,
            "-P",
            str(HERE / "rank.py"),
            json.dumps(system.imports),
            str(os.getpid()),
        ]
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                text=True,
            )
        self.missing: str | None = None
        self.versions: dict[str, str] | None = None

    def ready(self) -> dict[str, str]:
        """Versions of what it has loaded.

        Raises:
            NotInstalled: a module is not there.
            PeerBroke: it ended while loading.
        """
        if self.versions is None and self.missing is None:
            assert self.process.stdout
            line = self.process.stdout.readline()
            if not line:
                raise PeerBroke(f"its imports ended the process; see {self.log}")
            message = json.loads(line)
            self.versions, self.missing = message.get("versions"), message.get("missing")
        if self.versions is None:
            raise NotInstalled(f"not installed ({self.missing})")
        return self.versions

    def fork(self, address: str) -> None:
        """One rank, which will connect to the address."""
        assert self.process.stdin
        self.process.stdin.write(address + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """It, and by that all its ranks."""
        self.process.kill()
        self.process.wait()


class Team:
    """The ranks of one system, in one cell. They sleep but while they are told something."""

    def __init__(
        self,
        system: System,
        nursery: Nursery,
        cell: Cell,
        cuts: Cuts,
        files: tuple[Path, Path | None],
    ) -> None:
        nursery.ready()
        self.system = system
        self.ranks = system.ranks(cell, cuts)
        # The store lives here, as with torchrun, on a port that the system chooses.
        self._store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=120)
        )
        where = "/dev/shm" if Path("/dev/shm").is_dir() else None
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-peers-", dir=where)
        self.connections: list[Connection] = []
        self.pids: list[int] = []
        self._handles: list[int] = []
        try:
            address = str(Path(self._folder.name) / "socket")
            with Listener(address, family="AF_UNIX") as listener:
                listener._listener._socket.settimeout(30)  # type: ignore[attr-defined]
                for _ in range(self.ranks):
                    nursery.fork(address)
                    connection = listener.accept()
                    self.connections.append(connection)
                    self.pids.append(connection.recv()["value"])
                    self._handles.append(os.pidfd_open(self.pids[-1]))
            weights, gradients = files
            specs = [
                Spec(
                    system.name,
                    cell,
                    cuts,
                    rank,
                    self.ranks,
                    system.threads(cell),
                    self._store.port,
                    self._folder.name,
                    str(weights),
                    None if gradients is None else str(gradients),
                )
                for rank in range(self.ranks)
            ]
            self.tell("make", [(spec,) for spec in specs], LIMIT_S)
        except BaseException as error:
            self.end()
            if isinstance(error, OSError):
                raise PeerBroke(f"its ranks did not start: {error}") from error
            raise

    def tell(
        self,
        name: str,
        args: list[tuple[Any, ...]],
        limit_s: float,
        only: Sequence[int] | None = None,
    ) -> list[Any]:
        """All ranks (or only some) do something at once, each with its own arguments; what they
        answer, by rank.

        Raises:
            PeerBroke: see there. Its ranks are ended then.
        """
        targets = list(range(self.ranks)) if only is None else list(only)
        try:
            for rank in targets:
                self.connections[rank].send((name, args[rank]))
            return self._answers(targets, name, time.monotonic() + limit_s)
        except BaseException as error:
            self.end()
            if isinstance(error, OSError | EOFError):
                raise PeerBroke(f"a rank died in {name}") from error
            raise

    def _answers(self, targets: list[int], name: str, until: float) -> list[Any]:
        waiting = {self.connections[rank]: rank for rank in targets}
        answers: dict[int, Any] = {}
        while waiting:
            ready = wait(list(waiting), max(0.0, until - time.monotonic()))
            if not ready:
                for handle in self._handles:
                    signal.pidfd_send_signal(handle, signal.SIGUSR1)
                time.sleep(0.2)  # they write into the log where they are
                raise PeerBroke(f"ranks {sorted(waiting.values())} did not finish {name} in time")
            for connection in ready:
                assert isinstance(connection, Connection)
                answer = connection.recv()
                if "error" in answer:
                    raise PeerBroke(
                        f"rank {waiting[connection]}, {name}: {answer['error']}\n{answer['traceback']}"
                    )
                answers[waiting.pop(connection)] = answer["value"]
        return [answers[rank] for rank in targets]

    def end(self) -> None:
        """All its ranks, at once."""
        for handle in self._handles:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        for handle in self._handles:
            wait([handle], 10)  # it can be read when the process is gone
            os.close(handle)
        for connection in self.connections:
            connection.close()
        self._handles, self.connections = [], []
        self._folder.cleanup()
