"""Parts of `launch` without processes: environments, the first error, and how ranks are ended.

Real launches are in test_launch.py.
"""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from types import SimpleNamespace

import cloudpickle
import pytest
from tests.time_limits import HANG_S

from penstock.errors import RankDied
from penstock.ranks.processes import launch as module
from penstock.ranks.processes.launch import RankFailed, _Child


def test_ranks_have_the_variables_of_torchrun_and_none_of_another_one(monkeypatch):
    """A program that torchrun has started may launch ranks of its own."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("PENSTOCK_TEST", "kept")
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(module, "launch_interface", lambda: "lo")
    monkeypatch.setattr(module, "search_path", lambda: ["/a", "/b"])
    environment = module._environment(1, 3, 6123, 5)
    expected = {
        "PENSTOCK_TEST": "kept",
        "RANK": "1",
        "WORLD_SIZE": "3",
        "MASTER_PORT": "6123",
        "OMP_NUM_THREADS": "5",
        "PYTHONPATH": "/a:/b",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    assert {name: environment[name] for name in expected} == expected
    assert not any(name.startswith("TORCHELASTIC") for name in environment)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert module._environment(1, 3, 6123, 5)["GLOO_SOCKET_IFNAME"] == "eth7"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(module, "launch_interface", lambda: None)
    assert "GLOO_SOCKET_IFNAME" not in module._environment(1, 3, 6123, 5)


class Process:
    """A process that has ended with a status, or that ends by some signal."""

    def __init__(self, status=None, ends_by=()):
        self.pid, self.returncode, self.ends_by, self.log = 4000, status, ends_by, []

    def poll(self):
        """Return the status."""
        return self.returncode

    def wait(self, timeout=None):
        """Return the status, or raise as a process that still runs."""
        self.log.append("wait" if timeout is None else "limited wait")
        if self.returncode is None:
            raise subprocess.TimeoutExpired("rank", timeout)
        return self.returncode

    def terminate(self):
        """As SIGTERM."""
        self._signal("terminate", -signal.SIGTERM)

    def kill(self):
        """As SIGKILL."""
        self._signal("kill", -signal.SIGKILL)

    def _signal(self, name, status):
        self.log.append(name)
        if name in self.ends_by:
            self.returncode = status


def children_of(folder, *states):
    """The ranks of a launch; each has a status and, if it has written one, a record."""
    children = []
    for rank, (status, record) in enumerate(states):
        child = _Child(rank, Process(status), folder / f"result-{rank}")
        if record is not None:
            child.result.write_bytes(cloudpickle.dumps(record))
        children.append(child)
    return children


def error_of(rank, at, *, consequence=False):
    """The record of an error."""
    text = f"rank {rank} failed"
    return {
        "rank": rank,
        "error": text,
        "traceback": f"trace {rank}",
        "at": at,
        "consequence": consequence,
    }


VALUE = {"value": 1}


@pytest.mark.parametrize(
    ("states", "noticed", "message"),
    [
        ([(1, error_of(0, 2.0)), (1, error_of(1, 1.0))], 0, "rank 1 failed"),
        ([(1, error_of(0, 1.0, consequence=True)), (1, error_of(1, 2.0))], 0, "rank 1 failed"),
        ([(1, error_of(0, 2.0)), (None, None)], 0, "rank 0 failed"),
        ([(1, error_of(0, 2.0)), (-9, None)], 0, "rank 0 failed"),
        ([(1, error_of(0, 2.0)), (-9, None)], 1, "rank 1 (pid 4000) was killed by SIGKILL"),
        (
            [(1, error_of(0, 2.0, consequence=True)), (-9, None)],
            0,
            "rank 1 (pid 4000) was killed by SIGKILL",
        ),
        ([(0, VALUE), (3, None)], 1, "rank 1 (pid 4000) ended with exit status 3"),
        ([(0, VALUE), (1, error_of(1, 1.0))], 1, "rank 1 failed"),
    ],
)
def test_the_cause_of_a_failure_is_raised_and_not_what_followed(tmp_path, states, noticed, message):
    """The first error, unless it follows from the death of a process that could not write one."""
    children = children_of(tmp_path, *states)
    error = module._first_error(children[noticed], children)
    assert str(error).startswith(message)
    died = "pid" in message
    assert type(error) is (RankDied if died else RankFailed)
    if not died:
        assert error.remote_traceback == f"trace {error.rank}"
        assert error.__notes__ == [f"on rank {error.rank}:\ntrace {error.rank}"]


def test_control_characters_of_a_rank_do_not_reach_the_terminal(tmp_path):
    """Its error may be any text."""
    record = {**error_of(0, 1.0), "error": "a\x1b[2J"}
    children = children_of(tmp_path, (1, record))
    assert str(module._first_error(children[0], children)) == "a\\x1b[2J"


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (-9, "was killed by SIGKILL"),
        (-15, "was killed by SIGTERM"),
        (-63, "was killed by signal 63"),
        (3, "ended with exit status 3 and no message"),
        (0, "ended with exit status 0 and no message"),
        (None, "ended with exit status None and no message"),
    ],
)
def test_the_end_of_a_process_is_described(status, text, tmp_path):
    """Signals by name where they have one; a reason of the launcher comes first."""
    child = _Child(0, Process(status), tmp_path / "result")
    assert child.describe_end() == text
    child.stopped = "was stopped"
    assert child.describe_end() == "was stopped"


@pytest.mark.parametrize(
    ("status", "record", "failed", "silent"),
    [
        (None, None, False, False),
        (None, VALUE, False, False),
        (0, VALUE, False, False),
        (-15, VALUE, False, False),
        (1, error_of(0, 1.0), True, False),
        (0, None, True, True),
        (-9, None, True, True),
    ],
)
def test_a_rank_has_failed_if_it_has_ended_without_a_value(
    tmp_path, status, record, failed, silent
):
    """It is silent if it has not even written an error."""
    (child,) = children_of(tmp_path, (status, record))
    assert (child.failed, child.silent) == (failed, silent)


def test_the_reason_of_a_failure_is_written_for_every_world_of_the_ranks(tmp_path):
    """Where no rank has written one before."""
    written = []
    store = SimpleNamespace(
        find=lambda ending: [f"a/{ending}", f"b/{ending}"],
        compare_set=lambda *given: written.append(given),
    )
    module._publish_failure(store, "why")
    failure = {"rank": -1, "reason": "why"}
    assert [(key, expected) for key, expected, _ in written] == [
        ("a/penstock/failure", ""),
        ("b/penstock/failure", ""),
    ]
    assert all(json.loads(text) == failure for _, _, text in written)
    first, second = children_of(tmp_path, (1, error_of(0, 1.0)), (-9, None))
    assert module._reason(first) == "rank 0 failed"
    assert module._reason(second) == "rank 1 (pid 4000) was killed by SIGKILL"


def test_running_ranks_are_terminated_and_killed_if_they_ignore_it():
    """All at once first; those that have ended get no signal."""
    ended = Process(0)
    polite = Process(ends_by=("terminate", "kill"))
    stuck = Process(ends_by=("kill",))
    module._stop([_Child(0, process, None) for process in (ended, polite, stuck)])
    assert ended.log == []
    assert polite.log == ["terminate", "limited wait"]
    assert stuck.log == ["terminate", "limited wait", "kill", "wait"]


class Running(Process):
    """A process that runs until it gets a signal."""

    def __init__(self):
        super().__init__(ends_by=("terminate", "kill"))
        self.end = threading.Event()

    def wait(self, timeout=None):
        """Return the status; a limited wait is over at once."""
        if timeout is None:
            assert self.end.wait(HANG_S)
        return super().wait(timeout)

    def _signal(self, name, status):
        super()._signal(name, status)
        self.end.set()


def store_with(log):
    """A store of one world, which notes the reasons of failures."""
    return SimpleNamespace(
        find=lambda ending: [f"world/{ending}"],
        compare_set=lambda key, expected, value: log.append(json.loads(value)["reason"]),
    )


def test_ranks_that_still_run_are_ended_last_and_are_not_the_cause(tmp_path):
    """The others learn the reason at once; what another attempt needs is collected from all."""
    log = []
    failed = _Child(1, Process(1), tmp_path / "result-1")
    failed.result.write_bytes(cloudpickle.dumps(error_of(1, 1.0, consequence=True)))
    running = _Child(0, Running(), tmp_path / "result-0")
    children = [running, failed]
    recovery = SimpleNamespace(collect=lambda store, processes: log.append(list(processes)))
    with pytest.raises(RankFailed, match=r"^rank 1 failed\n"):
        module._watch(children, store_with(log), recovery)
    assert log == ["rank 1 failed", [running.process, failed.process]]
    assert running.process.log[-3:] == ["limited wait", "terminate", "limited wait"]


def test_a_rank_that_was_stopped_for_too_long_is_named_with_that_reason(tmp_path, monkeypatch):
    """And not by the signal with which the launcher has ended it."""
    children = [_Child(rank, Running(), tmp_path / f"result-{rank}") for rank in range(3)]

    def end_overdue():
        children[1].process.kill()
        return {1: "was stopped for 5 s"}

    watched = []

    def watch(processes):
        watched.extend(processes)
        return SimpleNamespace(end_overdue=end_overdue)

    monkeypatch.setattr(module, "StoppedRanks", watch)
    monkeypatch.setattr(module, "LOOK_S", 0.001)
    log = []
    with pytest.raises(
        RankDied, match=r"^rank 1 \(pid 4000\) was stopped for 5 s.*ranks 0, 2 stopped"
    ):
        module._watch(children, store_with(log), None)
    assert log == ["rank 1 (pid 4000) was stopped for 5 s"]
    assert watched == [child.process for child in children]


def test_a_run_is_over_when_all_ranks_have_written_their_values(tmp_path):
    """Nothing is published or ended."""
    children = children_of(tmp_path, (0, VALUE), (0, VALUE))
    module._watch(children, store_with(log := []), None)
    assert log == []
    assert all(set(child.process.log) <= {"wait"} for child in children)


def test_ranks_that_run_are_ended_where_another_cannot_be_started(monkeypatch):
    """They would wait for it; and what another attempt needs is prepared before all of them."""
    log, running = [], Running()

    def start(environment, job, result):
        log.append(f"start rank {environment['RANK']}")
        if environment["RANK"] == "1":
            raise OSError("no processes left")
        return running

    monkeypatch.setattr(module, "start_rank", start)
    recovery = SimpleNamespace(begin=lambda store: log.append("begin"))
    with pytest.raises(OSError, match="no processes left"):
        module.launch(print, 3, recovery=recovery, on_start=log.append)
    assert log == ["begin", "start rank 0", "start rank 1"]
    assert running.log == ["terminate", "limited wait"]


def test_ctrl_c_ends_all_ranks_at_once(monkeypatch):
    """At SIGTERM they could save first, for which the user does not wait."""
    running = [Running(), Running()]
    monkeypatch.setattr(
        module, "start_rank", lambda environment, *_: running[int(environment["RANK"])]
    )

    def interrupt(processes):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        module.launch(print, 2, on_start=interrupt)
    assert [process.log for process in running] == [["kill"]] * 2


@pytest.mark.parametrize(
    ("cores", "ranks", "threads", "expected"), [(8, 3, None, 2), (2, 4, None, 1), (8, 2, 3, 3)]
)
def test_cores_are_divided_among_the_ranks_unless_the_caller_says_otherwise(
    monkeypatch, cores, ranks, threads, expected
):
    """Each rank has one thread at least."""
    options, processes = [], []
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: set(range(cores)))

    def start(environment, job, result):
        options.append(environment)
        result.write_bytes(cloudpickle.dumps({"value": len(options)}))
        return Process(0)

    monkeypatch.setattr(module, "start_rank", start)
    values = module.launch(print, ranks, threads=threads, on_start=processes.extend)
    assert values == list(range(1, ranks + 1))
    assert len(processes) == ranks
    assert {environment["OMP_NUM_THREADS"] for environment in options} == {str(expected)}
    assert [environment["RANK"] for environment in options] == [str(rank) for rank in range(ranks)]
    stores = {environment[module.VARIABLE] for environment in options}
    assert len(stores) == 1
    assert stores.pop().partition(":")[0] == options[0]["MASTER_PORT"]
