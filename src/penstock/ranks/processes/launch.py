"""Start one process per rank on this host, watch the processes, and return results or errors."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import cloudpickle

from penstock.cluster.local import available_cores
from penstock.errors import RankDied, RunError, SettingError
from penstock.ranks.foreign_text import foreign_text
from penstock.ranks.processes.forked_ranks import RankProcess, search_path, start_rank
from penstock.ranks.processes.launch_folders import locked_folder
from penstock.ranks.processes.rank_variables import rank_variables
from penstock.ranks.processes.stopped_ranks import StoppedRanks
from penstock.ranks.processes.termination import passing_sigterm_on
from penstock.transport.addresses import launch_interface
from penstock.transport.liveness.stopped_processes import LOOK_S
from penstock.transport.unix_store import VARIABLE, StoreServer
from penstock.units import format_ranks

#: Seconds for which other ranks may go on after one has failed, to report what they saw.
_GRACE_S = 3.0

#: Seconds after which a process that ignores SIGTERM is killed.
_TERMINATE_S = 1.0


class RankFailed(RunError):
    """A rank raised an exception.

    Attributes:
        rank: the rank.
        remote_traceback: its traceback, which is also a note of this error.
    """

    def __init__(self, rank: int, message: str, remote_traceback: str) -> None:
        self.rank, self.remote_traceback = rank, remote_traceback
        super().__init__(message)
        self.add_note(f"on rank {rank}:\n{remote_traceback}")


class Recovery(Protocol):
    """Collects from the ranks what another attempt needs, after one of them has failed."""

    def begin(self, store: StoreServer) -> None:
        """Called before the ranks start, with their store."""

    def collect(self, store: StoreServer, processes: Sequence[RankProcess]) -> None:
        """Called when a rank has failed. The others know why, and run or end."""


@dataclass
class _Child:
    """The process of a rank.

    Attributes:
        rank: the rank.
        process: its process.
        result: the file that the process writes at its end.
        stopped: why the launcher has ended it, if it was stopped by a signal.
        content: of the result file, once it has been read; it may be large.
    """

    rank: int
    process: RankProcess
    result: Path
    stopped: str | None = None
    content: dict[str, Any] | None = None

    def describe_end(self) -> str:
        """Return how the process has ended."""
        return self.stopped or _describe_exit(self.process.returncode)

    def record(self) -> dict[str, Any] | None:
        """Return the content of the result file, a value or an error; None if there is no file."""
        if self.content is None and self.result.exists():
            self.content = cloudpickle.loads(self.result.read_bytes())
        return self.content

    @property
    def failed(self) -> bool:
        """Whether the process has ended with an error or without a result.

        One that was killed after it had written its value has not failed: SIGTERM may reach a rank
        that has just saved and ended.
        """
        if self.process.poll() is None:
            return False
        record = self.record()
        return record is None or "error" in record

    @property
    def silent(self) -> bool:
        """Whether the process has ended without writing a result or an error."""
        return self.failed and not self.result.exists()


def launch(
    fn: Callable[..., Any],
    ranks: int,
    *args: Any,
    threads: int | None = None,
    on_start: Callable[[Sequence[RankProcess]], None] | None = None,
    recovery: Recovery | None = None,
) -> list[Any]:
    """Run `fn(*args)` in `ranks` processes that can make a `Pipeline` together, and wait for all.

    Works from scripts, notebooks and the interactive prompt: the function is pickled by value, and
    the main module is not run again. Each process has the environment of a torchrun rank (`RANK`,
    `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT`).

    Args:
        fn: the function that every rank runs.
        ranks: number of processes, at least 1.
        args: arguments of `fn`; they and the results must be picklable.
        threads: number of threads that torch uses in each rank; by default the host's cores divided
            by `ranks`.
        on_start: called with the processes of the ranks when all have been started, such as to
            pass on signals.
        recovery: see `Recovery`.

    Returns:
        The results of `fn`, by rank.

    Raises:
        RankFailed: a rank raised an exception; the message is that of the first. The other ranks
            are stopped.
        RankDied: the process of a rank ended without a result or an error. The others are stopped.
        SettingError: `ranks` is below 1, the function or its arguments cannot be pickled, or this host
            does not have the address in `PENSTOCK_BIND`.

    Examples:
        ```python
        launch(lambda: "done", ranks=2)  # ["done", "done"]
        ```
    """
    if ranks < 1:
        raise SettingError(f"launch starts 1 rank or more, not {ranks}")
    try:
        pickled = cloudpickle.dumps((fn, args))
    except Exception as error:
        raise SettingError(
            f"{getattr(fn, '__name__', fn)} or its arguments cannot be sent to the ranks: {error}"
        ) from error
    threads_per_rank = threads or max(1, available_cores() // ranks)
    # The folder can be entered by this user alone. The store is in this process, so that it
    # outlasts the ranks and can tell each what has happened to the others.
    with (
        locked_folder("penstock-launch-") as folder,
        StoreServer(folder / "store") as store,
    ):
        job = folder / "job"
        job.write_bytes(pickled)
        if recovery is not None:
            recovery.begin(store)
        port = _free_port()
        children: list[_Child] = []
        try:
            for rank in range(ranks):
                result = folder / f"result-{rank}"
                environment = _environment(rank, ranks, port, threads_per_rank)
                environment[VARIABLE] = f"{port}:{store.path}"
                children.append(_Child(rank, start_rank(environment, job, result), result))
            processes = [child.process for child in children]
            if on_start is not None:
                on_start(processes)
            with passing_sigterm_on(processes):
                _watch(children, store, recovery)
            return [(child.record() or {})["value"] for child in children]
        except KeyboardInterrupt:
            # At SIGTERM, which `_stop` sends, ranks may save first. Ctrl-C ends them at once.
            for child in children:
                child.process.kill()
            raise
        finally:
            _stop(children)


def _environment(rank: int, ranks: int, port: int, threads: int) -> dict[str, str]:
    """Return the environment of the process of a rank, as torchrun sets it.

    Address and port are for functions that call torch's init_process_group themselves; nothing
    listens there otherwise.
    """
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")
    }
    interface = launch_interface()
    if interface is not None and "GLOO_SOCKET_IFNAME" not in inherited:
        # By default gloo listens on the address that the host's name resolves to.
        inherited["GLOO_SOCKET_IFNAME"] = interface
    return {
        **inherited,
        **rank_variables(rank, ranks, port),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(search_path()),
    }


def _free_port() -> int:
    """Return a TCP port of the loopback address that nothing listens on at present."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _watch(children: list[_Child], store: StoreServer, recovery: Recovery | None) -> None:
    """Wait until all ranks have ended.

    Raises:
        RankFailed, RankDied: a rank has failed.
    """
    ended = threading.Condition()
    stopped = StoppedRanks([child.process for child in children])
    for child in children:
        threading.Thread(target=_announce_end, args=(child, ended), daemon=True).start()
    with ended:
        while not (failed := [child for child in children if child.failed]):
            if all(child.process.poll() is not None for child in children):
                return
            ended.wait(LOOK_S)
            for rank, reason in stopped.end_overdue().items():
                children[rank].stopped = reason
    # Other ranks that wait for the failed one get its error at once; theirs may add information.
    _publish_failure(store, _reason(failed[0]))
    if recovery is not None:
        recovery.collect(store, [child.process for child in children])
    deadline = time.monotonic() + _GRACE_S
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, deadline - time.monotonic()))
    # Before the remaining processes are stopped, which would look like failures.
    error = _first_error(failed[0], children)
    _stop(children)
    raise error


def _announce_end(child: _Child, ended: threading.Condition) -> None:
    """Wait for the end of a process, in a thread, and notify `_watch`."""
    child.process.wait()
    with ended:
        ended.notify_all()


def _publish_failure(store: StoreServer, reason: str) -> None:
    """Write the reason of a failure on the status board of every world that the ranks have made."""
    failure = json.dumps({"rank": -1, "reason": reason})
    for key in store.find("penstock/pid/0"):
        store.compare_set(key.removesuffix("pid/0") + "failure", "", failure)


def _reason(child: _Child) -> str:
    """Return why a rank has ended."""
    record = child.record()
    if record:
        error: str = record["error"]
        return error
    return f"rank {child.rank} (pid {child.process.pid}) {child.describe_end()}"


def _first_error(noticed: _Child, children: list[_Child]) -> RunError:
    """Return the error that caused the failure of a run.

    That is the first error that a rank has written, or the death of a process that caused the
    others' errors.

    Args:
        noticed: the rank whose failure was noticed first.
        children: all ranks.
    """
    first = _first_record(children)
    dead = noticed if noticed.silent else next((child for child in children if child.silent), None)
    # A process that dies after another rank's error is a consequence of it, unless that error
    # itself is one, such as of a lost link.
    if dead is None or (dead is not noticed and first is not None and not first["consequence"]):
        assert first is not None
        return RankFailed(first["rank"], foreign_text(first["error"]), first["traceback"])
    stopped = [child.rank for child in children if child is not dead]
    suffix = f"; {format_ranks(stopped)} stopped" if stopped else ""
    return RankDied(dead.rank, dead.process.pid, dead.describe_end(), suffix)


def _first_record(children: list[_Child]) -> dict[str, Any] | None:
    """Return the first error that a rank has written, None if there is none.

    Errors that are consequences of another rank's failure come last.
    """
    records = [child.record() for child in children]
    errors = [record for record in records if record and "error" in record]
    return min(errors, key=lambda record: (record["consequence"], record["at"]), default=None)


def _describe_exit(status: int | None) -> str:
    """Return how a process ended, from its exit status."""
    if status is not None and status < 0:
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:
            # Real-time signals have numbers only.
            return f"was killed by signal {-status}"
    return f"ended with exit status {status} and no message"


def _stop(children: list[_Child]) -> None:
    """End the processes that still run."""
    running = [child for child in children if child.process.poll() is None]
    for child in running:
        child.process.terminate()
    deadline = time.monotonic() + _TERMINATE_S
    for child in running:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            # It ignores SIGTERM, or does not return from a call.
            child.process.kill()
            child.process.wait()
