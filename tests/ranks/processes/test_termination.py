"""SIGTERM to a launcher reaches its ranks, and ends it when they have ended."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.errors import RunError
from penstock.ranks.processes.termination import passing_sigterm_on


class Process:
    """A process that notes its signals."""

    def __init__(self):
        self.signals = []

    def send_signal(self, sig):
        """Note a signal."""
        self.signals.append(sig)


def wait(*processes, signals=0, failure=None):
    """Wait for ranks, while this process gets SIGTERM some times; the ranks may fail."""
    with passing_sigterm_on(processes):
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGTERM)
        if failure is not None:
            raise failure


def test_sigterm_is_passed_on_and_ends_the_launcher_when_the_ranks_have_ended():
    """They may save meanwhile. The handler of before is there again."""
    process = Process()
    with pytest.raises(SystemExit, match="143"):
        wait(process, signals=1)
    assert process.signals == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_ranks_that_the_signal_has_ended_are_no_failure():
    """The launcher ends with the status of SIGTERM, not with an error."""
    with pytest.raises(SystemExit, match="143"):
        wait(signals=1, failure=RunError("rank 0 was killed by SIGTERM"))
    with pytest.raises(RunError, match="by SIGKILL"):
        wait(failure=RunError("rank 0 was killed by SIGKILL"))


def test_a_second_sigterm_does_not_wait():
    """A rank may not end."""
    process = Process()
    with pytest.raises(SystemExit, match="143"):
        wait(process, signals=2, failure=AssertionError("the second signal ends the wait"))
    assert process.signals == [signal.SIGTERM]


def test_a_handler_of_the_program_stays():
    """`penstock train` has one, which saves."""
    seen: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        process = Process()
        wait(process, signals=1)
        assert (seen, process.signals) == ([signal.SIGTERM], [])
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_a_thread_other_than_the_main_one_waits_without_a_handler():
    """Python has none there: a launch in a notebook's thread works, and SIGTERM ends the process."""
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(wait, Process()).result() is None
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
