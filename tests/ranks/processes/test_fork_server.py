"""The loop of the fork server, without forks; tests/ranks/processes/test_forked_ranks.py has real ones."""

from __future__ import annotations

import json
import os
import signal
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from penstock.ranks.processes import fork_server
from penstock.ranks.processes.fork_server import (
    _Fork,
    _leave_finalizers_to_server,
    _Rank,
    _receive,
    _report,
    serve,
)
from penstock.transport import host_memory


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


@pytest.fixture
def starting(monkeypatch, tmp_path):
    """Start the server without imports, forks or signals, and note what it does."""
    fake = SimpleNamespace(log=[], threads=["1"], parent=50, fork=None)

    def note(name, result=None):
        return lambda *given: fake.log.append((name, *given)) or result

    class Exit(BaseException):
        """The end of the process."""

    def end(status):
        fake.log.append(("exit", status))
        raise Exit

    fake.Exit = Exit
    monkeypatch.setattr(fork_server.signal, "signal", note("signal"))
    monkeypatch.setattr(fork_server.os, "pidfd_open", note("pidfd", 7))
    monkeypatch.setattr(fork_server.os, "getppid", lambda: fake.parent)
    monkeypatch.setattr(fork_server.os, "_exit", end)
    monkeypatch.setattr(host_memory, "disable_memory_trimming", note("memory"))
    monkeypatch.setattr(torch, "set_num_threads", note("threads"))
    calls = {name: note(name) for name in ("disable", "collect", "enable", "freeze")}
    monkeypatch.setattr(fork_server, "gc", SimpleNamespace(**calls))
    monkeypatch.setattr(fork_server, "_import_modules", note("imports"))
    monkeypatch.setattr(fork_server, "_leave_finalizers_to_server", note("finalizers"))
    monkeypatch.setattr(
        fork_server, "Path", lambda _: SimpleNamespace(iterdir=lambda: iter(fake.threads))
    )
    monkeypatch.setattr(fork_server, "serve", lambda *given: note("serve")(*given) or fake.fork)
    monkeypatch.setattr(fork_server, "_run_rank", note("run", 3))
    fake.control = SimpleNamespace(send=note("send"))
    return fake


def test_the_server_imports_before_it_is_ready_and_ignores_signals_to_its_group(starting):
    """Ranks are to save at SIGTERM, which reaches the server as well; memory is frozen to be shared."""
    with pytest.raises(starting.Exit):
        fork_server.main(starting.control, 50)
    ignored = [
        (number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    ]
    assert [entry[1:] for entry in starting.log if entry[0] == "signal"] == ignored
    assert starting.log[3:] == [
        ("pidfd", 50),
        ("memory",),
        ("disable",),
        ("threads", 1),
        ("imports",),
        ("finalizers",),
        ("collect",),
        ("enable",),
        ("freeze",),
        ("send", b"ready"),
        ("serve", starting.control, 7),
        ("exit", 0),
    ]


def test_a_forked_rank_runs_and_returns_its_status(starting):
    """It is the same program, with the request of the rank."""
    starting.fork = _Fork({}, 1, 2)
    assert fork_server.main(starting.control, 50) == 3
    assert starting.log[-1] == ("run", starting.fork)


def test_a_server_that_has_threads_or_whose_launcher_has_ended_serves_no_other(starting):
    """A fork copies one thread alone, and locks that others hold."""
    starting.threads = ["1", "2"]
    assert fork_server.main(starting.control, 50) == 0
    assert starting.log[-1] == ("send", b"threaded")
    starting.log.clear()
    starting.parent = 1
    assert fork_server.main(starting.control, 50) == 1
    assert "imports" not in [name for name, *_ in starting.log]


@pytest.mark.parametrize("size", [40, 400])
def test_command_and_environment_are_written_where_the_kernel_reads_them(monkeypatch, size):
    """Variables of the rank come first, in case there is no room for all; the last byte is a NUL."""
    fields = [str(number) for number in range(60)]
    fields[45:49] = ["1000", "1200", "2000", str(2000 + size)]
    stat = "4242 (a) b) " + " ".join(fields)
    writes = []
    monkeypatch.setattr(fork_server, "Path", lambda _: SimpleNamespace(read_text=lambda: stat))
    library = SimpleNamespace(memmove=lambda *given: writes.append(given))
    monkeypatch.setattr(fork_server, "ctypes", library)
    monkeypatch.setattr(fork_server, "rank_command", lambda: ["python", "-m", "rank"])
    environment = {"HOME": "h" * 30, "MASTER_ADDR": "here", "RANK": "3", "WORLD_SIZE": "4"}
    fork_server._show_as_program({"environment": environment})
    command, variables = writes
    assert command == (1000, b"python\0-m\0rank".ljust(200, b"\0"), 200)
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "HOME")
    text = "\0".join(f"{name}={environment[name]}" for name in names).encode()
    assert variables == (2000, text[: size - 1].ljust(size, b"\0"), size)
    assert variables[1].endswith(b"\0")


@pytest.mark.parametrize("bad_fork", [False, True])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_rank_takes_over_output_environment_folder_and_path(monkeypatch, bad_fork, unbuffered):
    """As a new process would have inherited them; each draws its own random numbers."""
    log = []

    def note(name, result=None):
        return lambda *given, **more: log.append((name, *given, *more.values())) or result

    modules = {
        "numpy": SimpleNamespace(random=SimpleNamespace(seed=note("numpy seed"))),
        "torch": SimpleNamespace(cuda=SimpleNamespace(_is_in_bad_fork=lambda: bad_fork)),
    }
    system = SimpleNamespace(
        dup2=note("dup2"),
        close=note("close"),
        chdir=note("chdir"),
        isatty=lambda descriptor: descriptor == 1,
        execv=note("execv"),
        getppid=lambda: 50,
        environ={"OLD": "1"},
    )
    program = SimpleNamespace(
        path=["/old"], stdout=SimpleNamespace(reconfigure=note("stdout")), executable="python"
    )
    monkeypatch.setattr(fork_server, "os", system)
    monkeypatch.setattr(fork_server, "sys", program)
    monkeypatch.setattr(fork_server, "random", SimpleNamespace(seed=note("seed")))
    monkeypatch.setattr(fork_server, "_show_as_program", note("show"))
    monkeypatch.setattr(fork_server, "importlib", SimpleNamespace(import_module=modules.get))
    monkeypatch.setattr(fork_server, "rank_process", SimpleNamespace(main=note("main", 5)))
    environment = {"RANK": "3", "PYTHONUNBUFFERED": unbuffered}
    request = {
        "environment": environment,
        "path": ["/a"],
        "folder": "/b",
        "job": "/job",
        "result": "/result",
    }
    assert fork_server._run_rank(_Fork(request, 31, 32)) == 5
    assert system.environ == environment
    assert program.path == ["/a"]
    command = ["python", "-P", "-m", "penstock.ranks.processes.rank_process"]
    arguments = [*command, "/job", "/result", "50"]
    assert log == [
        ("dup2", 31, 1),
        ("dup2", 32, 2),
        ("close", 31),
        ("close", 32),
        ("chdir", "/b"),
        ("show", request),
        ("stdout", True, bool(unbuffered)),
        ("seed",),
        ("numpy seed",),
        *([("execv", "python", arguments)] if bad_fork else []),
        ("main", Path("/job"), Path("/result")),
    ]
