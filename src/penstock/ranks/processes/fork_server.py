"""The fork server of `launch`: a process that imports torch and Penstock once and forks the ranks.

Importing torch takes seconds of every process. A rank that is forked from a process that has done
so starts in milliseconds, and the ranks share the memory of what was imported.

The server has one thread and never uses an accelerator, so that forking it is safe. The launcher
asks for a rank through a socket: the message names a file with a `Request`, and brings the
launcher's standard output, its standard error and the end of a pipe to which the rank's exit
status is written. The answer is the rank's process id, with a file descriptor of the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import weakref
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypedDict

from penstock.ranks.processes import rank_process
from penstock.ranks.processes.rank_process import end_with_parent, finish

#: What every rank imports. torch._dynamo is imported by the first optimizer that is constructed,
#: and numpy.ma, in 0.1 s, by the first Pipeline.
_MODULES = (
    "torch._dynamo",
    "penstock.runtime.pipeline",
    "penstock.ranks.process_world",
    "numpy.ma",
    "pydantic.dataclasses",
)

#: What torch._dynamo imports at the end of a process, where it is installed.
_OPTIONAL_MODULES = ("tabulate",)

#: Variables of a rank, shown first in case the others need more room.
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")

#: Places in /proc/self/stat, behind the command's name, see proc(5): fields 48 and 50.
_ARG_START, _ENV_START = 45, 47

#: Seconds without ranks after which the server ends, so that an idle notebook does not hold its
#: memory.
_IDLE_S = 120.0

#: Answers of the server before its first request.
READY, THREADED = b"ready", b"threaded"


class Request(TypedDict):
    """The settings of a rank, apart from its job.

    Attributes:
        environment: the rank's environment variables.
        path: entries of `sys.path`.
        folder: working directory.
        job: file with the pickled function and its arguments.
        result: file for the value or the error.
    """

    environment: dict[str, str]
    path: list[str]
    folder: str
    job: str
    result: str


@dataclass(frozen=True)
class _Rank:
    """A forked rank that runs.

    Attributes:
        pid: process id.
        status: where its exit status is written.
    """

    pid: int
    status: Connection


@dataclass(frozen=True)
class _Fork:
    """The start of a forked process: its request and the descriptors of its output."""

    request: Request
    output: int
    errors: int


def rank_command() -> list[str]:
    """Return the command of a rank's process, without its arguments."""
    # -P: a file in the working directory must not hide a module.
    return [sys.executable, "-P", "-m", "penstock.ranks.processes.rank_process"]


def serve(control: socket.socket, launcher: int) -> _Fork | None:
    """Fork ranks as they are requested, and report their exit statuses.

    Args:
        control: connection to the launcher.
        launcher: descriptor of the launcher's process.

    Returns:
        In a forked process, what it is to run. In the server None, when the launcher has ended or
        has closed the connection and no rank runs, or after `_IDLE_S` without a rank.
    """
    ranks: dict[int, _Rank] = {}
    open_to_requests = True
    while open_to_requests or ranks:
        sources = [launcher, *ranks, *([control.fileno()] if open_to_requests else [])]
        ready, _, _ = select.select(sources, [], [], None if ranks else _IDLE_S)
        if not ready or launcher in ready:
            return None
        for process in [process for process in ready if process in ranks]:
            _report(process, ranks.pop(process))
        if control.fileno() in ready:
            fork = _receive(control, ranks, launcher)
            if isinstance(fork, _Fork):
                return fork
            open_to_requests = fork
    return None


def _report(process: int, rank: _Rank) -> None:
    """Write the exit status of a rank that has ended."""
    _, status = os.waitpid(rank.pid, 0)
    with contextlib.suppress(OSError):  # the launcher does not wait for it any more
        rank.status.send_bytes(str(os.waitstatus_to_exitcode(status)).encode())
    rank.status.close()
    os.close(process)


def _receive(control: socket.socket, ranks: dict[int, _Rank], launcher: int) -> _Fork | bool:
    """Handle one message of the launcher.

    Returns:
        In the forked process a `_Fork`. In the server whether more requests may come.
    """
    message, descriptors, _, _ = socket.recv_fds(control, 4096, 3)
    if not message:
        return False
    output, errors, status_end = descriptors
    request: Request = json.loads(Path(message.decode()).read_bytes())
    status = Connection(status_end, readable=False)
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        end_with_parent(server)
        status.close()
        for process, rank in ranks.items():
            rank.status.close()
            os.close(process)
        control.close()
        os.close(launcher)
        return _Fork(request, output, errors)
    os.close(output)
    os.close(errors)
    # The server is the parent: until it waits for the rank, the id cannot become that of another.
    process = os.pidfd_open(pid)
    ranks[process] = _Rank(pid, status)
    socket.send_fds(control, [str(pid).encode()], [process])
    return True


def _show_as_program(request: Request) -> None:
    """Make ps and /proc show the rank's own command and environment, as of a new process.

    The kernel reads both from where they lay when the program was started. Nothing else reads them
    there: `os.environ.clear` has removed all pointers of the C library to that memory.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    names = [name for name in _RANK_VARIABLES if name in request["environment"]]
    names += [name for name in request["environment"] if name not in names]
    variables = [f"{name}={request['environment'][name]}" for name in names]
    for place, texts in ((_ARG_START, rank_command()), (_ENV_START, variables)):
        start, end = int(fields[place]), int(fields[place + 1])
        content = b"\0".join(text.encode(errors="surrogateescape") for text in texts)
        if end > start:
            size = end - start
            ctypes.memmove(start, content[: size - 1].ljust(size, b"\0"), size)


def _run_rank(fork: _Fork) -> int:
    """Take over what a new process would have inherited from the launcher, and run the rank."""
    request = fork.request
    os.dup2(fork.output, 1)
    os.dup2(fork.errors, 2)
    os.close(fork.output)
    os.close(fork.errors)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path[:] = request["path"]
    _show_as_program(request)
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdout.reconfigure(line_buffering=os.isatty(1), write_through=unbuffered)  # type: ignore[union-attr]
    # Forked processes share the state of Python's generators; new ones would each have their own.
    random.seed()
    importlib.import_module("numpy").random.seed()
    if importlib.import_module("torch").cuda._is_in_bad_fork():
        # An import has initialised CUDA in the server, which a forked process cannot use.
        arguments = [request["job"], request["result"], str(os.getppid())]
        os.execv(sys.executable, [*rank_command(), *arguments])  # noqa: S606 - our program
    return rank_process.main(Path(request["job"]), Path(request["result"]))


def _import_modules() -> None:
    """Import what ranks need, and what takes as long as imports in each: the entry points of all
    installed distributions, which pydantic and Penstock read to find plug-ins.

    No plug-in is imported: a rank warns of one that cannot be.
    """
    for module in _MODULES:
        importlib.import_module(module)
    for module in _OPTIONAL_MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    from pydantic import TypeAdapter

    from penstock.registry import find_plugins
    from penstock.schedule.catalogue import FAMILIES
    from penstock.weights.catalogue import WEIGHT_RULES

    TypeAdapter(int)
    find_plugins()
    FAMILIES.import_modules()
    WEIGHT_RULES.import_modules()


def _leave_finalizers_to_server() -> None:
    """Let no rank run the finalizers of what the server has imported.

    They are those of the server's process, which ends without them: a rank has no use for the
    removal of torch's operator libraries, which would take 30 ms of each.
    """
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        finalizer.atexit = False


def main(control: socket.socket, launcher_pid: int) -> int:
    """Import what ranks need, then serve. Returns the exit status, of the server or of a rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher receives Ctrl-C and ends all ranks
    # A cluster's scheduler signals all processes of a job: the ranks still have to save, and would
    # end with the server, which ends with the launcher.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    launcher = os.pidfd_open(launcher_pid)
    if os.getppid() != launcher_pid:
        return 1
    from penstock.transport.host_memory import disable_memory_trimming

    disable_memory_trimming()
    gc.disable()  # else collections walk again and again through all that has been imported
    import torch

    torch.set_num_threads(1)
    _import_modules()
    _leave_finalizers_to_server()
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        control.send(THREADED)
        return 0
    gc.collect()
    gc.enable()
    gc.freeze()  # a collection in a rank would write to, and so copy, all memory that is shared
    control.send(READY)
    fork = serve(control, launcher)
    if fork is None:
        os._exit(0)  # nothing is buffered, and tearing down torch would take a second
    return _run_rank(fork)


if __name__ == "__main__":
    finish(main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])))
