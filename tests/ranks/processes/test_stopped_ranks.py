"""Ranks that a signal has stopped: the launcher ends them, and ranks that wait for them say so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from tests.time_limits import HANG_S
from torch.distributed import HashStore

from penstock.errors import RunError
from penstock.ranks.processes.stopped_ranks import StoppedRanks
from penstock.transport.attempt_store import separate_attempts
from penstock.transport.liveness import stopped_processes
from penstock.transport.liveness.stopped_processes import LOOK_S, LostSiblings

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the state of a process is in Linux's /proc"
)


@pytest.fixture
def children():
    """Two processes that wait, as ranks 0 and 1 of a launcher."""
    command = [sys.executable, "-S", "-c", "print(flush=True); input()"]
    processes = []
    for rank in range(2):
        environment = {**os.environ, "RANK": str(rank)}
        processes.append(
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
            )
        )
    for process in processes:
        # /proc shows the new environment some time after the return of Popen.
        process.stdout.readline()
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def clock(monkeypatch):
    """The clock of the watch, which the test moves."""
    fake = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(stopped_processes, "time", SimpleNamespace(monotonic=lambda: fake.now_s))
    return fake


def look(watch: StoppedRanks, clock: SimpleNamespace) -> dict[int, str]:
    """Look at the ranks, `LOOK_S` after the last look."""
    clock.now_s += LOOK_S
    return watch.end_overdue()


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a process by SIGSTOP, and wait until it has stopped."""
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def test_a_stopped_rank_is_ended_after_the_limit_and_named(children, clock):
    """The other one, which waits, is left alone."""
    watch = StoppedRanks(children, limit_s=2 * LOOK_S)
    assert look(watch, clock) == {}
    stop(children[1])
    assert look(watch, clock) == {}
    reasons = look(watch, clock)
    assert list(reasons) == [1]
    assert "was stopped by a signal (SIGSTOP) for 1 s" in reasons[1]
    assert children[1].wait() == -signal.SIGKILL
    assert children[0].poll() is None


def test_a_rank_that_goes_on_is_not_ended(children, clock):
    """Looks are counted anew after each stop."""
    watch = StoppedRanks(children, limit_s=2 * LOOK_S)
    for _ in range(2):
        stop(children[0])
        assert look(watch, clock) == {}
        children[0].send_signal(signal.SIGCONT)
        os.waitpid(children[0].pid, os.WCONTINUED)
        assert look(watch, clock) == {}


def test_looks_in_quick_succession_count_once(children, clock):
    """The launcher looks at every end of a rank, too."""
    watch = StoppedRanks(children, limit_s=2 * LOOK_S)
    stop(children[0])
    assert look(watch, clock) == {}
    assert [watch.end_overdue() for _ in range(10)] == [{}] * 10
    assert list(look(watch, clock)) == [0]


def test_a_missing_rank_that_was_stopped_is_named_to_those_that_wait_for_it(children, clock):
    """It could not join, and so sends no heartbeats. A rank that has joined is not looked at."""
    siblings = LostSiblings(launcher=os.getpid(), limit_s=2 * LOOK_S)
    for child in children:
        stop(child)
    clock.now_s += LOOK_S
    siblings.check([1])
    siblings.check([1])
    clock.now_s += LOOK_S
    name = rf"rank 1 on host .* \(pid {children[1].pid}\)"
    with pytest.raises(RunError, match=f"{name} has been stopped by a signal .* before it joined"):
        siblings.check([1])
    LostSiblings(launcher=children[0].pid, limit_s=LOOK_S).check([0, 1])


def test_a_rank_that_ends_before_it_joins_is_named(children, clock):
    """Only if it was there: it may also be that nobody has started it yet."""
    siblings = LostSiblings(launcher=os.getpid())
    clock.now_s += LOOK_S
    siblings.check([1, 2])
    children[1].kill()
    os.waitid(os.P_PID, children[1].pid, os.WEXITED | os.WNOWAIT)
    clock.now_s += LOOK_S
    with pytest.raises(RunError, match=rf"rank 1 on host .* \(pid {children[1].pid}\) has ended"):
        siblings.check([1, 2])


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_join_under_torchrun_name_one_that_was_stopped(children, monkeypatch, rank):
    """Long before the time limit of joining, for which rank 0 waits as well as the others."""
    monkeypatch.setattr(stopped_processes, "LOOK_S", 0.0)
    monkeypatch.setattr(stopped_processes.LostSiblings.__init__, "__defaults__", (None, 0.0))
    monkeypatch.setattr(os, "getppid", os.getpid)
    stop(children[1 - rank])
    with pytest.raises(RunError, match=f"rank {1 - rank} on host .* before it joined the run"):
        separate_attempts(HashStore(), rank, 2, timeout_s=HANG_S)
