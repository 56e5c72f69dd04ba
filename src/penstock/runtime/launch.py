"""Start one process per rank on this host, watch them, and bring back what they return or why they
failed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
from torch._C._distributed_c10d import PrefixStore, TCPStore

from penstock.errors import RankDied, RunError, SettingError
from penstock.runtime.forked_ranks import RankProcess, search_path, start_rank

_GRACE_S = 3.0


class RankFailed(RunError):
    """A rank raised; its own traceback is `remote_traceback`, and a note to this error's."""

    def __init__(self, rank: int, message: str, remote_traceback: str) -> None:
        self.rank, self.remote_traceback = rank, remote_traceback
        super().__init__(message)
        self.add_note(f"on rank {rank}:\n{remote_traceback}")


@dataclass
class _Child:
    rank: int
    process: RankProcess
    result: Path

    def record(self) -> dict[str, Any] | None:
        """What it has written down: its value, or its error; None if it has not, or not yet."""
        return cloudpickle.loads(self.result.read_bytes()) if self.result.exists() else None

    @property
    def failed(self) -> bool:
        """Whether it has ended otherwise than it should."""
        status = self.process.poll()
        return status is not None and (status != 0 or not self.result.exists())

    @property
    def silent(self) -> bool:
        """Whether it has ended without a word."""
        return self.failed and not self.result.exists()


def launch(fn: Callable[..., Any], ranks: int, *args: Any, threads: int | None = None) -> list[Any]:
    """Run `fn(*args)` in `ranks` processes that can make a `Pipeline` together, and wait for all.

    Works from scripts, notebooks and the interactive prompt: the function travels by value, and the
    main module is not run again. Each process is a rank as under torchrun (`RANK`, `WORLD_SIZE`,
    `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT`).

    Args:
        fn: what every rank runs.
        ranks: number of processes, at least 1.
        args: passed to `fn`; they and the results must pickle (they stay between these processes).
        threads: threads that torch uses in each rank; by default the host's cores divided by
        `ranks`.

    Returns:
        What `fn` returned, by rank.

    Raises:
        RankFailed: a rank raised; the message is that of the first that did.
        RankDied: a rank's process ended without a word. The others are stopped in either case.
        SettingError: `ranks` is below 1, or the function or its arguments do not pickle.
    """
    if ranks < 1:
        raise SettingError(f"launch starts 1 rank or more, not {ranks}")
    try:
        pickled = cloudpickle.dumps((fn, args))
    except Exception as error:
        raise SettingError(
            f"{getattr(fn, '__name__', fn)} or its arguments cannot be sent to the ranks: {error}"
        ) from error
    # The store lives here, so that it outlasts any rank and can say what became of the others.
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    per_rank = threads or max(1, len(os.sched_getaffinity(0)) // ranks)
    with tempfile.TemporaryDirectory(prefix="penstock-launch-") as folder:
        job = Path(folder) / "job"
        job.write_bytes(pickled)
        children: list[_Child] = []
        try:
            for rank in range(ranks):
                result = Path(folder) / f"result-{rank}"
                environment = {
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(store.port),
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                    "OMP_NUM_THREADS": str(per_rank),
                    "PYTHONPATH": os.pathsep.join(search_path()),
                }
                process = start_rank(environment, job, result)
                children.append(_Child(rank, process, result))
            _watch(children, store)
            return [(child.record() or {})["value"] for child in children]
        finally:
            _stop(children)


def _watch(children: list[_Child], store: TCPStore) -> None:
    """Until all have ended well; raise when one has not."""
    ended = threading.Condition()
    waiting = [
        threading.Thread(target=_announce, args=(child, ended), daemon=True) for child in children
    ]
    for thread in waiting:
        thread.start()
    with ended:
        while not (failed := [child for child in children if child.failed]):
            if all(child.process.poll() == 0 for child in children):
                return
            ended.wait()
    # Those who wait for it are told at once, and may still say something useful.
    _tell(store, _words(failed[0]))
    until = time.monotonic() + _GRACE_S
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, until - time.monotonic()))
    error = _failure(
        failed[0], children
    )  # before the rest are stopped: they have not died by themselves
    _stop(children)
    raise error


def _announce(child: _Child, ended: threading.Condition) -> None:
    child.process.wait()
    with ended:
        ended.notify_all()


def _tell(store: TCPStore, reason: str) -> None:
    """Write the reason on the board of every world that the ranks have made."""
    for world in itertools.count():
        prefix = PrefixStore(f"penstock/{world}", store)
        if not prefix.check(["penstock/pid/0"]):
            break
        prefix.compare_set("penstock/failure", "", json.dumps({"rank": -1, "reason": reason}))


def _words(child: _Child) -> str:
    """Why a rank has ended."""
    record = child.record()
    return (
        record["error"]
        if record
        else f"rank {child.rank} (pid {child.process.pid}) {_how(child.process.returncode)}"
    )


def _failure(noticed: _Child, children: list[_Child]) -> RunError:
    """What began it: the first error that a rank wrote down, or the silent death that is behind the
    others' errors.
    """
    errors = [record for child in children if (record := child.record()) and "error" in record]
    # Those who were let go because another failed have less to say than that other.
    first = min(errors, key=lambda record: (record["consequence"], record["at"]), default=None)
    dead = noticed if noticed.silent else next((child for child in children if child.silent), None)
    if dead is not None and (dead is noticed or first is None or first["consequence"]):
        others = [str(child.rank) for child in children if child is not dead]
        also = f"; rank{'s' * (len(others) > 1)} {', '.join(others)} stopped" if others else ""
        return RankDied(dead.rank, dead.process.pid, _how(dead.process.returncode), also)
    assert first is not None
    return RankFailed(first["rank"], first["error"], first["traceback"])


def _how(status: int | None) -> str:
    if status is not None and status < 0:
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"was killed by signal {-status}"
    return f"ended with exit status {status} and no message"


def _stop(children: list[_Child]) -> None:
    """End whoever still runs."""
    running = [child for child in children if child.process.poll() is None]
    for child in running:
        child.process.terminate()
    until = time.monotonic() + 1.0
    for child in running:
        try:
            child.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
