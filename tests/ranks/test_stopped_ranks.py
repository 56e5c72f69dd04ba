"""The launcher ends ranks that a signal has stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from penstock.ranks.stopped_ranks import LOOK_S, StoppedRanks

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the state of a process is in Linux's /proc"
)


@pytest.fixture
def children():
    """Two processes that wait."""
    command = [sys.executable, "-S", "-c", "input()"]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(2)]
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def look(watch: StoppedRanks) -> dict[int, str]:
    """Look at the ranks, as if `LOOK_S` had passed since the last look."""
    watch._next_s = 0.0
    return watch.end_overdue()


def test_a_stopped_rank_is_ended_after_the_limit_and_named(children):
    """The other one, which waits, is left alone."""
    watch = StoppedRanks(children, limit_s=2 * LOOK_S)
    assert look(watch) == {}
    children[1].send_signal(signal.SIGSTOP)
    os.waitpid(children[1].pid, os.WUNTRACED)
    assert look(watch) == {}
    reasons = look(watch)
    assert list(reasons) == [1]
    assert "was stopped by a signal (SIGSTOP) for 1 s" in reasons[1]
    assert children[1].wait() == -signal.SIGKILL
    assert children[0].poll() is None


def test_a_rank_that_goes_on_is_not_ended(children):
    """Looks are counted anew after each stop."""
    watch = StoppedRanks(children, limit_s=2 * LOOK_S)
    for _ in range(2):
        children[0].send_signal(signal.SIGSTOP)
        os.waitpid(children[0].pid, os.WUNTRACED)
        assert look(watch) == {}
        children[0].send_signal(signal.SIGCONT)
        os.waitpid(children[0].pid, os.WCONTINUED)
        assert look(watch) == {}


def test_looks_in_quick_succession_count_once(children):
    """The launcher looks at every end of a rank, too."""
    watch = StoppedRanks(children, limit_s=2 * LOOK_S)
    children[0].send_signal(signal.SIGSTOP)
    os.waitpid(children[0].pid, os.WUNTRACED)
    assert [watch.end_overdue() for _ in range(10)] == [{}] * 10
