"""Output of tracing: what is suppressed, for whom, and the line that announces long work."""

from __future__ import annotations

import importlib
import logging
import threading
import warnings

import pytest

from penstock.modules import export_output
from penstock.modules.export_output import announced, quietly

LOUD = logging.getLogger("torch.export")


def in_thread(function):
    """Run a function in another thread."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def export_prints(*values):
    """Print as torch.export's own code does."""
    trace = importlib.import_module("torch.export._trace")
    eval("print(*values)", vars(trace), {"values": values})


def test_warnings_logs_and_prints_of_an_export_are_suppressed(caplog, capsys, recwarn):
    """They repeat errors that are reported with the user's line; afterwards all are back."""
    with quietly():
        warnings.warn("suppressed", stacklevel=1)
        LOUD.error("suppressed")
        logging.getLogger("torch._export").error("suppressed")
        export_prints("suppressed")
    assert (caplog.messages, capsys.readouterr().out, len(recwarn)) == ([], "", 0)
    warnings.warn("reported", stacklevel=1)
    LOUD.error("reported")
    export_prints("reported", 2)
    assert caplog.messages == ["reported"]
    assert capsys.readouterr().out == "reported 2\n"
    assert [str(warning.message) for warning in recwarn] == ["reported"]


def test_output_of_other_threads_goes_on(caplog, capsys):
    """They may be exporting something else, of which nobody reports."""

    def work():
        LOUD.error("of the other")
        export_prints("of the other")

    with quietly():
        in_thread(work)
    assert caplog.messages == ["of the other"]
    assert capsys.readouterr().out == "of the other\n"


def test_a_failed_export_leaves_output_as_it_was(caplog, capsys):
    """The user goes on in the same process, in a notebook for instance."""
    with pytest.raises(KeyError), quietly():
        raise KeyError
    LOUD.error("reported")
    export_prints("reported")
    assert caplog.messages == ["reported"]
    assert capsys.readouterr().out == "reported\n"
    assert not LOUD.filters


class Timer:
    """A timer that expires when it is told to."""

    def __init__(self, seconds, function, arguments):
        self.seconds, self.expire = seconds, lambda: function(*arguments)
        self.calls = []

    def start(self):
        """Note the call."""
        self.calls.append(f"start, daemon={self.daemon}")

    def cancel(self):
        """Note the call."""
        self.calls.append("cancel")


@pytest.fixture
def timers(monkeypatch):
    """Return the timers that the module makes."""
    instances = []

    def make(*arguments):
        instances.append(Timer(*arguments))
        return instances[-1]

    monkeypatch.setattr(export_output.threading, "Timer", make)
    return instances


@pytest.mark.parametrize(("rank", "writes"), [(None, True), ("0", True), ("1", False)])
def test_long_work_is_announced_by_the_first_rank(timers, monkeypatch, capsys, rank, writes):
    """One line after two seconds, so that a short trace says nothing."""
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with announced("tracing the model"):
        (timer,) = timers
        assert (timer.seconds, timer.calls) == (2.0, ["start, daemon=True"])
        assert capsys.readouterr().err == ""
        timer.expire()
    assert timer.calls[1:] == ["cancel"]
    assert capsys.readouterr().err == ("penstock: tracing the model\n" if writes else "")


def test_work_is_logged_with_its_time(timers, caplog, monkeypatch):
    """Before and after; a failed one has no time."""
    caplog.set_level(logging.INFO, "penstock")
    times = iter([10.0, 13.25, 20.0])
    monkeypatch.setattr(export_output.time, "perf_counter", lambda: next(times))
    with announced("tracing"):
        assert caplog.messages == ["tracing"]
    assert caplog.messages == ["tracing", "tracing: 3.2 s"]
    with pytest.raises(KeyError), announced("failing"):
        raise KeyError
    assert caplog.messages[2:] == ["failing"]
    assert timers[1].calls[1:] == ["cancel"]
