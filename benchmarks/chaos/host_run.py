"""One launch of a training run on hosts that are network namespaces: its processes and their output.

A process belongs to the host in whose namespace it is. Every host has a name (UTS namespace), so
that a message can be checked for the host that it names.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

# Imported before the ranks are forked, which then start in a fraction of a second.
import penstock.runtime.pipeline
import penstock.training.hosts  # noqa: F401
from penstock.cli.entry import run as run_penstock

sys.path.append(str(Path(__file__).parents[1] / "hosts"))

from namespaces import Hosts

#: Port of the store on the first host.
PORT = 29500

#: Environment of all ranks.
VARIABLES = {
    "GLOO_SOCKET_IFNAME": "eth0",
    "OMP_NUM_THREADS": "1",
    # Namespaces share the machine's memory, which hosts do not.
    "PENSTOCK_SHARED_MEMORY": "0",
}

#: Seconds between two looks at the processes.
LOOK_S = 0.05

#: Flag of unshare(2) for a host name of its own, from Linux's sched.h.
_CLONE_NEWUTS = 0x04000000

#: What a message says of a lost rank: its rank, its host, and what happened to it.
LOST = re.compile(
    r"rank (\d+) on host (\S+) \([^)]*\)(?:,? and rank \d+ [^;]*)? "
    r"(has ended|has been stopped|is missing|could not connect|has not)"
)

#: The step that a message of a loss names.
NAMED_STEP = re.compile(r"the last whole checkpoint is of step (\d+)")


class Process(Protocol):
    """A process that has been started, as `subprocess.Popen` has it."""

    pid: int

    @property
    def returncode(self) -> int | None:
        """Its exit status; minus the number of the signal that has ended it."""

    def poll(self) -> int | None:
        """Return the exit status; None before its end."""

    def wait(self) -> int:
        """Wait for its end."""


class ForkedRank:
    """A rank that is forked from this process, which has imported all that it needs.

    Args:
        host: index of its host.
        space: name of the host's network namespace.
        words: arguments of `penstock`.
        variables: added to its environment.
        log: file of its output.
    """

    def __init__(
        self, host: int, space: str, words: list[str], variables: Mapping[str, str], log: Path
    ) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        status = 1
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            _enter(space, f"host-{host}")
            os.environ.update(variables)
            sys.argv = ["penstock", *words]
            run_penstock()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:  # noqa: BLE001 - what a program does at its end
            traceback.print_exc()
        finally:
            _leave(status)

    def poll(self) -> int | None:
        """See `Process`."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int:
        """See `Process`."""
        while self.poll() is None:
            time.sleep(LOOK_S)
        assert self.returncode is not None
        return self.returncode


def _enter(space: str, name: str) -> None:
    """Move this process into a network namespace, and give it a host name of its own."""
    library = ctypes.CDLL(None, use_errno=True)
    network = os.open(f"/run/netns/{space}", os.O_RDONLY)
    if library.setns(network, 0) or library.unshare(_CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), f"cannot enter {space}")
    socket.sethostname(name)


def _leave(status: int) -> None:
    """End a forked process as a program ends."""
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(status)


@dataclass
class HostRun:
    """A launch of one run on all hosts, one rank each; rank i is on host i.

    Attributes:
        hosts: where it runs.
        folder: of the logs of this launch.
        launchers: the first process of every host: torchrun, or the rank itself.
    """

    hosts: Hosts
    folder: Path
    launchers: list[Process] = field(default_factory=list)

    def start(self, words: list[str], launcher: str) -> None:
        """Start `penstock` with some words on all hosts.

        Args:
            words: arguments of `penstock`.
            launcher: "torchrun"; or "variables" for ranks with RANK, WORLD_SIZE, … of a script.
        """
        size = len(self.hosts.names)
        for rank, space in enumerate(self.hosts.names):
            if launcher == "torchrun":
                program = [*self._torchrun(rank, size), sys.executable, "-m", "penstock", *words]
                self.launchers.append(self.start_program(rank, program))
                continue
            variables = VARIABLES | {
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": self.hosts.addresses[0],
                "MASTER_PORT": str(PORT),
            }
            self.launchers.append(ForkedRank(rank, space, words, variables, self.log(rank)))

    def start_program(
        self, host: int, program: list[str], variables: Mapping[str, str] | None = None
    ) -> Process:
        """Start a program on a host; its output is added to that of the host.

        Args:
            host: index of the host.
            program: the program and its arguments.
            variables: added to its environment.
        """
        table = self.folder / "hosts"
        rows = [f"{address} host-{i}" for i, address in enumerate(self.hosts.addresses)]
        table.write_text("\n".join(["127.0.0.1 localhost", *rows]) + "\n")
        named = f'mount --bind {table} /etc/hosts && hostname host-{host} && exec "$@"'
        shell = ["unshare", "--uts", "--mount", "sh", "-c", named, "sh"]
        with self.log(host).open("ab") as output:
            everything = {**VARIABLES, **(variables or {})}
            return self.hosts.start(host, [*shell, *program], everything, output.fileno())

    def _torchrun(self, rank: int, size: int) -> list[str]:
        """Return the words that start a program by torchrun on a host."""
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(size), "--node-rank", str(rank), "--nproc-per-node", "1"),
            *("--master-addr", self.hosts.addresses[0], "--master-port", str(PORT)),
            "--no-python",
        ]

    def log(self, host: int) -> Path:
        """Return the file with the output of a host."""
        return self.folder / f"host-{host}.log"

    def text(self, host: int) -> str:
        """Return the output of a host so far."""
        return self.log(host).read_text(errors="replace")

    def processes(self, host: int) -> dict[int, str]:
        """Return the processes of a host that have not ended: their command lines by id."""
        space = Path(f"/run/netns/{self.hosts.names[host]}").stat().st_ino
        present: dict[int, str] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if (entry / "ns/net").stat().st_ino != space:
                    continue
                if (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    words = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    present[int(entry.name)] = words.decode(errors="replace")
        return present

    def rank(self, host: int) -> int | None:
        """Return the process of a host's rank; None if there is none."""
        launcher = self.launchers[host]
        if isinstance(launcher, ForkedRank):
            return launcher.pid if launcher.poll() is None else None
        for pid, words in self.processes(host).items():
            if "penstock train" in words and "torch.distributed.run" not in words:
                return pid
        return None

    def agent(self, host: int) -> int:
        """Return the process of a host's launcher."""
        return self.launchers[host].pid

    def link(self, host: int, *, up: bool) -> None:
        """Connect the cable of a host, or pull it."""
        state = "up" if up else "down"
        words = ["ip", "-n", self.hosts.names[host], "link", "set", "eth0", state]
        subprocess.run(words, check=True)

    def power_off(self, host: int) -> None:
        """End all processes of a host; its link is down before, so that no last packet leaves."""
        self.link(host, up=False)
        while present := self.processes(host):
            signal_all(present, signal.SIGKILL)
            time.sleep(LOOK_S / 5)
            self.launchers[host].poll()

    def wait(self, done: Callable[[], bool], limit_s: float) -> float | None:
        """Wait until something is so. Returns the seconds; None if it is not after `limit_s`."""
        started = time.monotonic()
        while not done():
            if time.monotonic() - started > limit_s:
                return None
            time.sleep(LOOK_S)
        return time.monotonic() - started

    def gone(self, hosts: Iterable[int]) -> bool:
        """Whether no process is left on some hosts."""
        for host in hosts:
            self.launchers[host].poll()
            if self.processes(host):
                return False
        return True

    def close(self) -> dict[int, dict[int, str]]:
        """End what is left. Returns it: processes by host."""
        left = {}
        for host, process in enumerate(self.launchers):
            present = self.processes(host)
            if present:
                left[host] = present
                signal_all(present, signal.SIGKILL)
            process.wait()
            self.link(host, up=True)
        return left


def signal_all(pids: Iterable[int], number: int) -> None:
    """Send a signal to processes, as far as they are there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
