"""Processes that a signal has stopped for too long, with states and a clock that the test sets.

Real processes are looked at in tests/ranks/processes/test_stopped_ranks.py.
"""

from __future__ import annotations

import os
import random
import sys
from types import SimpleNamespace

import pytest

from penstock.errors import RunError
from penstock.transport.liveness import stopped_processes
from penstock.transport.liveness.heartbeat_process import State
from penstock.transport.liveness.stopped_processes import (
    LIMIT_S,
    LOOK_S,
    LostSiblings,
    StopLooks,
    ranks_of_launcher,
)


@pytest.fixture
def clock(monkeypatch):
    """The clock of the module."""
    fake = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(stopped_processes, "time", SimpleNamespace(monotonic=lambda: fake.now_s))
    return fake


def test_looks_are_half_a_second_apart_with_some_jitter(clock):
    """A caller that comes a little early is not turned away; a long pause is one look."""
    looks = StopLooks(LIMIT_S)
    due_s = []
    for part in range(128):
        clock.now_s = 1000.0 + part / 64
        if looks.due():
            due_s.append(part)
    assert due_s == [0, 29, 58, 87, 116]
    clock.now_s = 2000.0
    assert [looks.due() for _ in range(3)] == [True, False, False]


@pytest.mark.parametrize("seed", range(20))
def test_a_rank_is_overdue_by_its_own_looks_in_a_row(seed):
    """A slow reference: the last looks of the rank, as many as fill the limit, all found it stopped."""
    choose = random.Random(seed)
    limit_s = choose.choice([0.0, 0.5, 1.0, 1.2, 2.0])
    looks, history = StopLooks(limit_s), {rank: [] for rank in range(3)}
    for _ in range(60):
        rank = choose.randrange(3)
        history[rank].append(choose.random() < 0.75)
        count = 1
        while count * LOOK_S < limit_s:
            count += 1
        expected = len(history[rank]) >= count and all(history[rank][-count:])
        assert looks.overdue(rank, stopped=history[rank][-1]) is expected


@pytest.fixture
def ranks(monkeypatch):
    """The ranks of launcher 99 by process id, and the processes that are stopped."""
    fake = SimpleNamespace(pids={}, stopped=set(), launchers=[])

    def ranks_of(launcher):
        fake.launchers.append(launcher)
        return dict(fake.pids)

    def state(pid):
        return State.STOPPED if pid in fake.stopped else State.RUNNING

    monkeypatch.setattr(stopped_processes, "ranks_of_launcher", ranks_of)
    monkeypatch.setattr(stopped_processes, "process_state", state)
    monkeypatch.setattr(stopped_processes.socket, "gethostname", lambda: "h")
    return fake


def test_a_missing_rank_is_named_with_the_seconds_of_its_stop(clock, ranks):
    """5 s by default; ranks that have joined, or that nobody has started, are not looked at."""
    siblings = LostSiblings(99)
    ranks.pids, ranks.stopped = {1: 11, 2: 12, 3: 13}, {11, 12}
    for _ in range(9):
        siblings.check([3, 2, 4])
        siblings.check([3, 2, 4])
        clock.now_s += LOOK_S
    message = (
        "rank 2 on host h (pid 12) has been stopped by a signal (SIGSTOP) for 5 s, before it joined "
        "the run"
    )
    with pytest.raises(RunError) as raised:
        siblings.check([3, 2, 4])
    assert str(raised.value) == message
    assert ranks.launchers == [99] * 10


def test_a_missing_rank_that_has_ended_is_named_with_the_process_that_it_was(clock, ranks):
    """Only the last look counts: a rank that was restarted has another process."""
    siblings = LostSiblings()
    ranks.pids = {1: 11, 2: 12}
    siblings.check([1, 2])
    ranks.pids = {1: 21}
    siblings.check([1, 2])
    clock.now_s += LOOK_S
    siblings.check([1])
    ranks.pids = {}
    siblings.check([1])
    clock.now_s += LOOK_S
    siblings.check([2])
    clock.now_s += LOOK_S
    siblings.check([1, 2])
    ranks.pids = {2: 32}
    clock.now_s += LOOK_S
    siblings.check([2])
    ranks.pids = {}
    clock.now_s += LOOK_S
    with pytest.raises(RunError) as raised:
        siblings.check([0, 2])
    assert str(raised.value) == "rank 2 on host h (pid 32) has ended before it joined the run"
    assert ranks.launchers[0] == os.getppid()


def test_a_limit_of_the_caller_decides_and_is_in_the_message(clock, ranks):
    """Of two stopped ranks the first one is named."""
    siblings = LostSiblings(99, limit_s=1.0)
    ranks.pids, ranks.stopped = {1: 11, 2: 12}, {11, 12}
    siblings.check([2, 1])
    clock.now_s += LOOK_S
    with pytest.raises(RunError, match=r"^rank 2 .* for 1 s, before"):
        siblings.check([2, 1])


@pytest.mark.skipif(sys.platform != "linux", reason="processes are in Linux's /proc")
def test_ranks_are_the_children_of_the_launcher_that_have_not_ended(tmp_path, monkeypatch):
    """By RANK, else by Slurm's number. Names of programs may have spaces and parentheses."""
    table = [
        (11, b"python", b"S", 99, b"A=1\0RANK=3\0SLURM_PROCID=8\0"),
        (12, b"a) S 98 (b", b"T", 99, b"SLURM_PROCID=4\0NOTHING\0EMPTY=\0"),
        (13, b"python", b"Z", 99, b"RANK=5\0"),
        (14, b"python", b"S", 98, b"RANK=6\0"),
        (15, b"python", b"S", 99, b"RANK=one\0SLURM_PROCID=7\0"),
        (16, b"python", b"S", 99, b"OTHER=a=b\0"),
        (17, b"python", b"S", 99, b"TEXT=RANK=1\0RANK=10\0"),
    ]
    for pid, name, state, parent, variables in table:
        folder = tmp_path / str(pid)
        folder.mkdir()
        stat = b"%d (%s) %s %d 99 99" % (pid, name, state, parent)
        (folder / "stat").write_bytes(stat)
        (folder / "environ").write_bytes(variables)
    for name, stat in (("18", b""), ("19", b"19 (x) S 99"), ("self", b"1 (x) S 99")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stat").write_bytes(stat)
    monkeypatch.setattr(stopped_processes, "Path", lambda _: tmp_path)
    assert ranks_of_launcher(99) == {3: 11, 4: 12, 10: 17}
    assert ranks_of_launcher(98) == {6: 14}
