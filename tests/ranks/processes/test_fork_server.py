"""The loop of the fork server, without forks; tests/ranks/processes/test_forked_ranks.py has real ones."""

from __future__ import annotations

import json
import os
import weakref
from types import SimpleNamespace

import pytest

from penstock.ranks.processes import fork_server
from penstock.ranks.processes.fork_server import (
    _Fork,
    _leave_finalizers_to_server,
    _Rank,
    _receive,
    _report,
    serve,
)


class Control:
    """The connection to the launcher, whose descriptor is 5."""

    def __init__(self) -> None:
        self.closed = False

    def fileno(self):
        """The descriptor."""
        return 5

    def close(self):
        """Note the end."""
        self.closed = True


@pytest.fixture
def rounds(monkeypatch):
    """Let these descriptors be ready, round by round, and note what is asked for and done."""
    fake = SimpleNamespace(ready=[], asked=[], reports=[], answers=[])

    def select(sources, _, __, timeout_s):
        fake.asked.append((sorted(sources), timeout_s))
        return fake.ready.pop(0), [], []

    def receive(control, ranks, launcher):
        answer = fake.answers.pop(0)
        if isinstance(answer, int) and not isinstance(answer, bool):
            ranks[answer] = f"rank {answer}"
            return True
        return answer

    monkeypatch.setattr(fork_server.select, "select", select)
    monkeypatch.setattr(fork_server, "_receive", receive)
    monkeypatch.setattr(fork_server, "_report", lambda *given: fake.reports.append(given))
    return fake


def test_ranks_are_forked_and_reported_until_the_launcher_closes_the_connection(rounds):
    """The server stays for the ranks that still run, and waits without a limit while there are any."""
    rounds.ready = [[5], [5], [21, 5], [5], [20]]
    rounds.answers = [20, 21, 22, False]
    rounds.ready[3:] = [[5], [20], [22]]
    assert serve(Control(), 7) is None
    idle_s = fork_server._IDLE_S
    assert rounds.asked == [
        ([5, 7], idle_s),
        ([5, 7, 20], None),
        ([5, 7, 20, 21], None),
        ([5, 7, 20, 22], None),
        ([7, 20, 22], None),
        ([7, 22], None),
    ]
    assert rounds.reports == [(21, "rank 21"), (20, "rank 20"), (22, "rank 22")]


@pytest.mark.parametrize("ready", [[], [7], [7, 20]])
def test_the_server_ends_with_the_launcher_or_when_it_is_idle(rounds, ready):
    """Whatever its ranks do: the kernel ends them with it."""
    rounds.ready, rounds.answers = [[5], ready], [20]
    assert serve(Control(), 7) is None
    assert rounds.reports == []


def test_a_forked_process_leaves_the_loop_with_its_request(rounds):
    """Ranks that have ended are reported before."""
    fork = _Fork({}, 1, 2)
    rounds.ready, rounds.answers = [[5], [20, 5]], [20, fork]
    assert serve(Control(), 7) is fork
    assert rounds.reports == [(20, "rank 20")]


@pytest.mark.parametrize(("status", "text"), [(0, b"0"), (3 << 8, b"3"), (9, b"-9")])
def test_an_exit_status_is_sent_as_python_has_it(monkeypatch, status, text):
    """Of a signal a negative number; a launcher that no longer waits is no error."""
    sent, closed = [], []
    connection = SimpleNamespace(send_bytes=sent.append, close=lambda: closed.append("status"))
    monkeypatch.setattr(fork_server.os, "waitpid", lambda pid, _: (pid, status))
    monkeypatch.setattr(fork_server.os, "close", closed.append)
    _report(20, _Rank(4242, connection))
    assert (sent, closed) == ([text], ["status", 20])

    def fail(_):
        raise BrokenPipeError

    connection.send_bytes = fail
    _report(20, _Rank(4242, connection))
    assert closed == ["status", 20] * 2


@pytest.mark.parametrize("forked", [False, True])
def test_a_request_forks_a_rank_that_holds_no_descriptor_of_others(monkeypatch, tmp_path, forked):
    """The server answers with the process; the rank closes all that is the server's."""
    path, events = tmp_path / "request", []
    path.write_text(json.dumps({"job": "j"}))
    message = str(path).encode()
    monkeypatch.setattr(fork_server.socket, "recv_fds", lambda *_: (message, [31, 32, 33], 0, None))
    monkeypatch.setattr(fork_server.socket, "send_fds", lambda *given: events.append(given[1:]))
    monkeypatch.setattr(fork_server.os, "fork", lambda: 0 if forked else 4242)
    monkeypatch.setattr(fork_server.os, "close", events.append)
    monkeypatch.setattr(fork_server.os, "pidfd_open", lambda pid: pid + 1)
    monkeypatch.setattr(fork_server, "end_with_parent", lambda pid: events.append(("parent", pid)))

    def connection(descriptor, *, readable):
        assert not readable
        return SimpleNamespace(close=lambda: events.append(f"status {descriptor}"))

    monkeypatch.setattr(fork_server, "Connection", connection)
    other = SimpleNamespace(close=lambda: events.append("status of another"))
    ranks, control = {20: _Rank(1, other)}, Control()
    result = _receive(control, ranks, 7)
    if forked:
        assert result == _Fork({"job": "j"}, 31, 32)
        assert events == [("parent", os.getpid()), "status 33", "status of another", 20, 7]
        assert control.closed
    else:
        assert result is True
        assert events == [31, 32, ([b"4242"], [4243])]
        assert ranks[4243].pid == 4242
        assert not control.closed


def test_an_empty_message_is_the_end_of_requests(monkeypatch):
    """The launcher has closed its end."""
    monkeypatch.setattr(fork_server.socket, "recv_fds", lambda *_: (b"", [], 0, None))
    assert _receive(Control(), {}, 7) is False


def test_finalizers_of_imports_do_not_run_at_the_exit_of_a_rank():
    """They still run when their object goes."""
    calls = []
    value = type("Value", (), {})()
    finalizer = weakref.finalize(value, calls.append, 1)
    others = {one: one.atexit for one in weakref.finalize._registry if one is not finalizer}
    try:
        _leave_finalizers_to_server()
        assert not any(one.atexit for one in weakref.finalize._registry)
    finally:
        for one, at_exit in others.items():
            one.atexit = at_exit
    del value
    assert calls == [1]
