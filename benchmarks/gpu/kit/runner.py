"""Sections as processes: each in a session of its own, with a limit, killed by its group's id when
it is over.

Processes are forked from one that has torch loaded and CUDA not initialised, so that no section
loads torch again.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kit.results import SectionResult, read_rows
from kit.section import Section

#: Lines of a section's output that are kept when it does not pass.
LAST_LINES = 20
#: Seconds for the stacks of a section that is over its limit to be written.
STACKS_S = 1.0
#: Seconds that a killed process is waited for. One inside the driver may take longer, and is left.
REAP_S = 10.0


class Interrupted(Exception):
    """Ctrl-C while a section ran; `result` has what it had come to."""

    def __init__(self, result: SectionResult) -> None:
        self.result = result
        super().__init__(result.name)


@dataclass(frozen=True)
class End:
    """How a process ended. `status`: its exit status, negative for a signal, None when it was
    killed at its limit.
    """

    status: int | None
    seconds: float


def load(path: Path) -> Callable[[Section], None]:
    """The `measure` of a section's file."""
    name = f"{path.parent.name}.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    measure: Callable[[Section], None] = module.measure
    return measure


def play(path: Path, section: Section, log: Path) -> SectionResult:
    """Run a section to its end or its limit.

    Raises:
        Interrupted: Ctrl-C.
    """
    interrupted = False
    started = time.monotonic()
    try:
        end = fork(lambda: load(path)(section), log, section.limit_s)
    except KeyboardInterrupt:
        interrupted = True
        end = End(None, time.monotonic() - started)
    rows, broken = read_rows(section.rows_file)
    status = _status(end, broken)
    error = None if status == "passed" else last_lines(log)
    if broken:
        error = f"{broken} lines of its output are no rows\n{error}"
    result = SectionResult(section.name, status, round(end.seconds, 2), error, rows)
    if interrupted:
        result.status = "failed"
        result.error = f"interrupted\n{error}"
        raise Interrupted(result)
    return result


def _status(end: End, broken: int) -> str:
    if end.status is None:
        return "timeout"
    if end.status == 0:
        return "failed" if broken else "passed"
    return "failed" if end.status == 1 else "crashed"


def last_lines(log: Path) -> str:
    """The end of a process's output."""
    text = log.read_bytes().decode("utf-8", errors="replace") if log.exists() else ""
    return "\n".join(line[:300] for line in text.splitlines()[-LAST_LINES:])


def fork(work: Callable[[], None], log: Path, limit_s: float) -> End:
    """Run `work` in a process of its own; what it writes goes to `log`.

    Status 1 is an exception, whose traceback is in the log.
    """
    started = time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _child(work, log)
    try:
        status = _wait(pid, started + limit_s)
        if status is None:
            _signal(pid, signal.SIGUSR1)
            _wait(pid, time.monotonic() + STACKS_S)
    finally:
        # Also after a section that ended by itself: what it has left running would take the device
        # from the next one.
        _kill(pid)
    return End(status, time.monotonic() - started)


def _child(work: Callable[[], None], log: Path) -> None:
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        work()
        status = 0
    except BaseException:  # noqa: BLE001 - the process ends here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(pid: int, until: float) -> int | None:
    """The exit status, or None while it runs."""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            return None
        time.sleep(0.02)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _kill(pid: int) -> None:
    """End the process and everything in its session's group."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        _kill_before_session(pid)
    try:
        _wait(pid, time.monotonic() + REAP_S)
    except ChildProcessError:
        return  # it was waited for already


def _kill_before_session(pid: int) -> None:
    """End a child of ours that has no group of its own yet. One that was waited for has no such id
    any more.
    """
    try:
        ended, _ = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return
    if not ended:
        _signal(pid, signal.SIGKILL)


def ask(work: Callable[[], object], folder: Path, name: str, limit_s: float) -> object:
    """What `work` returns in a process of its own, through JSON; None if it fails or takes too
    long.
    """
    answer = folder / f"{name}.json"
    answer.unlink(missing_ok=True)

    def write() -> None:
        answer.write_text(json.dumps(work()), encoding="utf-8")

    end = fork(write, folder / f"{name}.log", limit_s)
    if end.status != 0:
        return None
    value: object = json.loads(answer.read_text(encoding="utf-8"))
    return value
