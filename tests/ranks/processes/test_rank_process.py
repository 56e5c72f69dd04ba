"""The main program of a rank, run in this process; tests/ranks/processes/test_launch.py runs real ones."""

from __future__ import annotations

import os
import signal
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import pytest
import torch

from penstock.errors import PeerFailed, SettingError
from penstock.ranks.processes import rank_process
from penstock.ranks.processes.rank_process import end_with_parent, finish, main
from penstock.transport import host_memory


@pytest.fixture
def rank(monkeypatch, tmp_path):
    """Run a job as rank 3 does, and return its exit status and its record."""
    events = []
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(rank_process.signal, "signal", lambda *given: events.append(given))
    monkeypatch.setattr(torch, "set_num_threads", events.append)
    monkeypatch.setattr(host_memory, "disable_memory_trimming", lambda: events.append("memory"))
    named = SimpleNamespace(prctl=lambda *given: events.append(given))
    monkeypatch.setattr(rank_process, "ctypes", SimpleNamespace(CDLL=lambda _: named))
    job, result = tmp_path / "job", tmp_path / "result"

    def run(function, *args):
        job.write_bytes(cloudpickle.dumps((function, args)))
        status = main(job, result)
        assert not result.with_suffix(".partial").exists()
        return status, cloudpickle.loads(result.read_bytes())

    return SimpleNamespace(run=run, events=events, job=job, result=result, folder=tmp_path)


def test_a_value_comes_back_with_status_0(rank):
    """Ctrl-C is the launcher's, SIGTERM ends the rank, and the number of threads is its own."""
    assert rank.run(lambda a, b: [a, b], 1, 2) == (0, {"value": [1, 2]})
    assert rank.events[:5] == [
        (signal.SIGINT, signal.SIG_IGN),
        (signal.SIGTERM, signal.SIG_DFL),
        (signal.SIGUSR1, signal.SIG_IGN),
        "memory",
        2,
    ]
    if sys.platform == "linux":
        assert rank.events[5] == (15, b"penstock-rank3")


def test_the_file_of_the_result_is_open_before_the_job_runs(rank):
    """The job may use up all descriptors, and its error is still reported."""
    partial = rank.result.with_suffix(".partial")
    assert rank.run(lambda path: Path(path).exists(), str(partial)) == (0, {"value": True})


@pytest.mark.parametrize("status", [None, 0])
def test_leaving_with_status_0_is_a_value_of_none(rank, status):
    """As of a program that ends well."""

    def leave():
        raise SystemExit(status)

    assert rank.run(leave) == (0, {"value": None})


@pytest.mark.parametrize(
    ("error", "text", "consequence"),
    [
        (KeyError("x"), "rank 3: KeyError: 'x'", False),
        (SettingError("no"), "no", False),
        (SystemExit(2), "rank 3: SystemExit: 2", False),
        (KeyboardInterrupt(), "rank 3: KeyboardInterrupt: ", False),
        (PeerFailed(3, "F", "rank 1 failed"), None, True),
    ],
)
def test_an_error_comes_back_with_its_trace_and_whether_it_follows_from_another(
    rank, error, text, consequence
):
    """Errors of Penstock name the rank themselves."""

    def fail():
        raise error

    status, record = rank.run(fail)
    assert status == 1
    assert record["error"] == (str(error) if text is None else text)
    assert (record["rank"], record["consequence"]) == (3, consequence)
    assert "in fail" in record["traceback"]
    assert record["at"] > 0
    assert "value" not in record


def unpicklable():
    """Return a value that cannot be sent."""

    def fail(_):
        raise ValueError("not this")

    return type("Unpicklable", (), {"__reduce__": fail})()


def test_a_value_that_cannot_be_sent_is_an_error_with_its_type(rank):
    """And with the reason."""
    status, record = rank.run(unpicklable)
    assert status == 1
    assert (
        record["error"] == "rank 3: the Unpicklable that it returned cannot be sent back: not this"
    )


def test_a_job_that_cannot_be_read_is_an_error_of_the_rank(rank):
    """A module may be missing there."""
    rank.job.write_bytes(b"no pickle")
    assert main(rank.job, rank.result) == 1
    assert cloudpickle.loads(rank.result.read_bytes())["error"].startswith(
        "rank 3: UnpicklingError"
    )


def test_a_result_that_cannot_be_written_is_printed(rank, monkeypatch, capsys):
    """No half of it is left under its name."""

    class Full:
        """A file on a disk that is full."""

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def write(self, _):
            """Fail."""
            raise OSError(28, "No space left on device")

    rank.job.write_bytes(cloudpickle.dumps((int, ())))
    partial = rank.result.with_suffix(".partial")
    path = SimpleNamespace(
        with_suffix=lambda _: SimpleNamespace(open=lambda _: Full(), rename=None)
    )
    assert main(rank.job, path) == 1
    assert capsys.readouterr().err.startswith("rank 3: its result: [Errno 28] No space left")
    rank.job.write_bytes(cloudpickle.dumps((int, ("x",))))
    assert main(rank.job, path) == 1
    assert capsys.readouterr().err.startswith("rank 3: ValueError: invalid literal")
    assert not partial.exists()
    assert not rank.result.exists()


class Exit(BaseException):
    """The end of the process."""


@pytest.fixture
def exits(monkeypatch):
    """What a process does before it ends."""
    events = []

    def end(status):
        events.append(("exit", status))
        raise Exit

    monkeypatch.setattr(rank_process.os, "_exit", end)
    return events


@pytest.mark.parametrize("is_parent", [True, False])
def test_a_process_ends_with_its_parent(monkeypatch, exits, is_parent):
    """Also if that has ended before the kernel was asked."""
    monkeypatch.setattr(rank_process.sys, "platform", "linux")
    library = SimpleNamespace(prctl=lambda *given: exits.append(given))
    monkeypatch.setattr(rank_process, "ctypes", SimpleNamespace(CDLL=lambda _: library))
    parent = os.getppid() + (not is_parent)
    if is_parent:
        end_with_parent(parent)
    else:
        with pytest.raises(Exit):
            end_with_parent(parent)
    assert exits == [(1, signal.SIGKILL)] + [("exit", 1)] * (not is_parent)


def test_a_rank_that_succeeds_ends_its_threads_and_exit_functions_and_one_that_fails_does_not(
    monkeypatch, exits, tmp_path
):
    """Files that are still open are flushed last, when exit functions have written to them. Other
    objects of the program do not matter, such as a weak proxy whose object is gone.
    """
    file = (tmp_path / "out").open("w")
    dead_proxy = weakref.proxy(set())

    def at_exit():
        exits.append("atexit")
        file.write("x")

    monkeypatch.setattr(rank_process.threading, "_shutdown", lambda: exits.append("threads"))
    monkeypatch.setattr(rank_process.atexit, "_run_exitfuncs", at_exit)
    streams = {
        name: SimpleNamespace(flush=lambda name=name: exits.append(name))
        for name in ("stdout", "stderr")
    }
    with monkeypatch.context() as patch:
        for name, stream in streams.items():
            patch.setattr(rank_process.sys, name, stream)
        with pytest.raises(Exit):
            finish(3)
    assert exits == ["stdout", "stderr", ("exit", 3)]
    exits.clear()
    with pytest.raises(Exit):
        finish(0)
    assert exits == ["threads", "atexit", ("exit", 0)]
    assert (tmp_path / "out").read_text() == "x"
    file.close()
    del dead_proxy


def test_where_a_gpu_was_used_the_c_library_ends_the_process(monkeypatch):
    """Profilers write their records then."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(SystemExit) as raised:
        finish(0)
    assert raised.value.code == 0
