"""The fork server: what its ranks share, what they do not, and what happens without it."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from multiprocessing import Pipe
from types import SimpleNamespace

import psutil
import pytest

from penstock.errors import RankDied
from penstock.ranks.processes import forked_ranks
from penstock.ranks.processes.forked_ranks import ForkedProcess, ForkServer, _Server
from penstock.ranks.processes.launch import launch


@pytest.fixture
def server(monkeypatch):
    """A fork server of the test's own, which ends with it."""
    fork_server = ForkServer()
    monkeypatch.setattr(forked_ranks, "FORK_SERVER", fork_server)
    yield fork_server
    fork_server.close()


def describe():
    """What a rank sees of its process."""
    import os
    import random
    import sys
    from pathlib import Path

    import numpy as np
    import torch

    return {
        "parent": os.getppid(),
        "command": Path("/proc/self/cmdline").read_text(),
        "environment": Path("/proc/self/environ").read_text().split("\0"),
        "variable": os.environ.get("PENSTOCK_TEST"),
        "cache": os.environ.get("TORCHINDUCTOR_CACHE_DIR"),
        "folder": str(Path.cwd()),
        "path": sys.path,
        "draws": (random.random(), float(np.random.random_sample())),  # noqa: NPY002
        "seed": torch.initial_seed(),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
    }


def test_launches_share_a_server_until_the_environment_changes_or_it_is_killed(
    server, monkeypatch, tmp_path
):
    """Libraries read their settings from the environment when the server imports them. The folder of
    compiled code is no such setting: torch sets it in the launcher with the first optimizer.
    """
    monkeypatch.delenv("PENSTOCK_TEST", raising=False)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    first, second = launch(describe, 2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (third,) = launch(describe, 1)
    assert first["parent"] == second["parent"] == third["parent"] != os.getpid()
    assert third["folder"] == third["cache"] == str(tmp_path)
    assert third["path"][0] == str(tmp_path)
    monkeypatch.setenv("PENSTOCK_TEST", "a value")
    (fourth,) = launch(describe, 1)
    assert (third["variable"], fourth["variable"]) == (None, "a value")
    assert fourth["parent"] != third["parent"]
    assert not psutil.pid_exists(third["parent"])

    # The out-of-memory killer may choose the server: it takes its ranks with it and is replaced. The
    # test shares the server, whose start takes seconds.
    def kill_parent():
        import threading

        os.kill(os.getppid(), signal.SIGKILL)
        threading.Event().wait()

    with pytest.raises(RankDied, match=r"was killed by SIGKILL"):
        launch(kill_parent, 1)
    assert launch(os.getppid, 1)[0] not in (os.getpid(), fourth["parent"])


def test_ranks_draw_different_numbers_and_hold_no_descriptor_of_each_other():
    """A forked process starts with its parent's generators; torch's have a fixed seed anyway."""
    ranks = launch(describe, 3)
    assert len({rank["draws"] for rank in ranks}) == 3
    assert len({rank["seed"] for rank in ranks}) == 1
    assert len({rank["descriptors"] for rank in ranks}) == 1


def test_ps_shows_a_forked_rank_as_the_program_that_it_runs():
    """Tools find ranks by their command and their variables; the kernel has those of the server."""
    ranks = launch(describe, 2)
    for number, rank in enumerate(ranks):
        assert rank["command"].rstrip("\0").endswith("-m\0penstock.ranks.processes.rank_process")
        assert f"RANK={number}" in rank["environment"]
        assert "WORLD_SIZE=2" in rank["environment"]


def test_a_rank_runs_its_own_finalizers_and_none_of_the_server(tmp_path):
    """Those of the libraries that the server has imported would take longer than all else that a
    short rank does.
    """

    def run(folder):
        import weakref
        from pathlib import Path

        class Value:
            pass

        value = run.value = Value()
        inherited = sum(finalizer.atexit for finalizer in weakref.finalize._registry)
        weakref.finalize(value, Path(folder, "finalized").touch)
        return inherited

    assert launch(run, 1, str(tmp_path)) == [0]
    assert (tmp_path / "finalized").exists()


def test_a_rank_looks_schedules_and_rules_up_without_imports():
    """The server has imported their modules, and read which plug-ins are installed."""

    def look_up():
        import importlib.metadata
        import sys

        from penstock.schedule.catalogue import FAMILIES
        from penstock.weights.catalogue import WEIGHT_RULES

        before = set(sys.modules)
        importlib.metadata.entry_points = None  # must not be called
        names = [FAMILIES.find("1f1b").name, WEIGHT_RULES.find("stash").name]
        return names, sorted(set(sys.modules) - before)

    assert launch(look_up, 1) == [(["1f1b", "stash"], [])]


def test_without_a_server_ranks_are_new_processes(server):
    """Systems without descriptors of processes, and libraries that start threads at import."""
    server._refused = True
    (rank,) = launch(describe, 1)
    assert rank["parent"] == os.getpid()
    assert "penstock.ranks.processes.rank_process" in rank["command"]


def test_output_goes_where_the_launchers_goes_now(capfd):
    """Not to where it went when the server started."""
    for word in ("first", "second"):
        launch(print, 1, word)
        assert capfd.readouterr().out == f"{word}\n"


def test_a_request_that_is_interrupted_ends_the_server(monkeypatch, tmp_path):
    """Its answer, a process, would be taken for that of the next request."""
    server = object.__new__(_Server)
    server._control, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def interrupt(*details):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(socket, "recv_fds", interrupt)
        with pytest.raises(KeyboardInterrupt):
            server.fork(tmp_path / "request")
    assert server.fork(tmp_path / "request") is None, "and so it is replaced"
    other_end.close()


def test_a_server_that_still_imports_is_killed_when_it_is_closed():
    """It reads nothing before it is ready, so that Ctrl-C would wait for the import of torch."""
    server = object.__new__(_Server)
    server.owner, server._ready = os.getpid(), False
    server._control, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server._process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    server.close()
    assert server._process.wait() == -signal.SIGKILL
    other_end.close()


@pytest.mark.parametrize(
    ("message", "can_fork"), [(b"ready", True), (b"threaded", False), (None, False)]
)
def test_only_a_server_that_is_ready_forks(message, can_fork):
    """One with threads cannot, nor one that has ended before it answered."""
    server = object.__new__(_Server)
    server._control, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server._ready = False
    if message is not None:
        other_end.send(message)
    other_end.close()
    assert server.answer() is can_fork
    server._control.close()


def test_a_server_of_another_process_is_left_to_its_owner():
    """A fork of the launcher has its connection alone."""
    server = object.__new__(_Server)
    server.owner, server._ready, server._process = -1, False, None
    server._control, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with other_end:
        server.close()
        assert other_end.recv(1) == b""


def test_a_server_starts_without_threads_and_finds_the_modules_of_its_owner(monkeypatch):
    """Libraries start threads at import; its output is nobody's."""
    started = []
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setattr(forked_ranks, "search_path", lambda: ["/a", "/b"])
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **more: started.append((command, more))
    )
    server = _Server("inherited")
    ((command, more),) = started
    assert command[:-2] == [sys.executable, "-P", "-m", "penstock.ranks.processes.fork_server"]
    assert command[-2:] == [str(more["pass_fds"][0]), str(os.getpid())]
    environment = {**os.environ, "PYTHONPATH": "/a:/b", "OMP_NUM_THREADS": "1"}
    assert more["env"] == environment
    assert {more[name] for name in ("stdin", "stdout", "stderr")} == {subprocess.DEVNULL}
    assert (server.inherited, server.owner) == ("inherited", os.getpid())
    server._control.close()


BAD_FORK = """
from pathlib import Path

if "penstock.ranks.processes.fork_server" in Path("/proc/self/cmdline").read_text():
    import torch

    torch.cuda._is_in_bad_fork = lambda: True
"""


def test_a_rank_that_cannot_use_cuda_after_the_fork_starts_as_a_new_program(
    server, tmp_path, monkeypatch
):
    """An import that initialises CUDA in the server makes it unusable in forked processes."""

    def program():
        import sys

        return sys.argv[0]

    (tmp_path / "sitecustomize.py").write_text(BAD_FORK)
    monkeypatch.syspath_prepend(str(tmp_path))
    (path,) = launch(program, 1)
    assert path.endswith("rank_process.py")


def test_an_idle_server_ends(monkeypatch):
    """Without a request or a rank for a time."""
    from penstock.ranks.processes import fork_server

    monkeypatch.setattr(fork_server, "_IDLE_S", 0.01)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        launcher = os.pidfd_open(os.getpid())
        try:
            assert fork_server.serve(theirs, launcher) is None
        finally:
            os.close(launcher)


class FakeServer:
    """A server of this process that forks as often as it is told."""

    def __init__(self, inherited):
        self.inherited, self.owner = inherited, os.getpid()
        self.forks, self.answers, self.closed = [], True, False

    def answer(self):
        """Whether it can fork."""
        return self.answers

    def fork(self, file):
        """Fork a rank, unless the server has ended."""
        return self.forks.pop(0)

    def close(self):
        """Note the end."""
        self.closed = True


@pytest.fixture
def servers(monkeypatch):
    """The servers that are started, in order, and what they inherit."""
    fake = SimpleNamespace(started=[], inherited="a", forks=[], answers=True)

    def start(inherited):
        server = FakeServer(inherited)
        server.forks, server.answers = fake.forks, fake.answers
        fake.started.append(server)
        return server

    monkeypatch.setattr(forked_ranks, "_Server", start)
    monkeypatch.setattr(forked_ranks, "_inherited_state", lambda: fake.inherited)
    return fake


REQUEST = {"environment": {"RANK": "3"}, "job": "j"}


def test_ranks_inherit_variables_limits_cores_and_priority(monkeypatch):
    """A rank can be told none of them later. Names of running tests and commands do not count."""
    before = forked_ranks._inherited_state()
    for name in ("PYTEST_CURRENT_TEST", "_", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "other")
    assert forked_ranks._inherited_state() == before
    changes = (
        lambda patch: patch.setenv("MKL_NUM_THREADS", "77"),
        lambda patch: patch.setattr(resource, "getrlimit", lambda limit: (1, limit)),
        lambda patch: patch.setattr(os, "sched_getaffinity", lambda process: {1000}),
        lambda patch: patch.setattr(os, "getpriority", lambda *process: 19),
    )
    for change in changes:
        with monkeypatch.context() as patch:
            change(patch)
            assert forked_ranks._inherited_state() != before
    assert forked_ranks._inherited_state() == before


def test_a_server_is_shared_until_what_ranks_inherit_has_changed(servers, tmp_path):
    """Or this process is a fork of its owner, to which it does not belong."""
    fork_server = ForkServer()
    servers.forks = ["one", "two", "three", "four"]
    assert [fork_server.start(REQUEST, tmp_path) for _ in range(2)] == ["one", "two"]
    assert json.loads((tmp_path / "request-3").read_text()) == REQUEST
    assert len(servers.started) == 1
    servers.inherited = "b"
    assert fork_server.start(REQUEST, tmp_path) == "three"
    servers.started[1].owner = -1
    assert fork_server.start(REQUEST, tmp_path) == "four"
    assert [server.inherited for server in servers.started] == ["a", "b", "b"]
    assert [server.closed for server in servers.started] == [True, True, False]
    fork_server.close()
    fork_server.close()
    assert servers.started[2].closed


@pytest.mark.parametrize(
    ("forks", "answers", "rank", "started"),
    [
        ([None, "one"], True, "one", 2),
        ([None, None, "one"], True, None, 2),
        ([], False, None, 1),
    ],
)
def test_a_server_that_ended_meanwhile_is_replaced_once(
    servers, tmp_path, forks, answers, rank, started
):
    """One that cannot fork is not started again."""
    fork_server = ForkServer()
    servers.forks, servers.answers = forks, answers
    assert fork_server.start(REQUEST, tmp_path) == rank
    assert len(servers.started) == started
    if not answers:
        assert fork_server.start(REQUEST, tmp_path) is None
        assert len(servers.started) == 1


def test_an_interrupt_while_a_server_starts_ends_that_server(servers, tmp_path):
    """The next request would read its answer."""

    def interrupt(_):
        raise KeyboardInterrupt

    fork_server = ForkServer()
    servers.forks = ["one"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeServer, "answer", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fork_server.start(REQUEST, tmp_path)
    assert servers.started[0].closed
    assert fork_server.start(REQUEST, tmp_path) == "one"


def test_the_exit_status_of_a_forked_rank_is_read_once_from_its_pipe():
    """Where the server has ended without one, the kernel has killed its ranks."""
    for content, expected in ((b"3", 3), (b"-9", -9), (None, -signal.SIGKILL)):
        reader, writer = Pipe(duplex=False)
        rank = ForkedProcess(os.getpid(), os.pidfd_open(os.getpid()), reader)
        assert rank.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            rank.wait(0.0)
        if content is not None:
            writer.send_bytes(content)
        writer.close()
        assert rank.wait(60.0) == rank.returncode == rank.poll() == expected


def test_signals_reach_the_process_by_its_descriptor(monkeypatch):
    """A process that has ended gets none, and that is no error. The descriptor goes with the rank."""
    sent = []
    reader, _ = Pipe(duplex=False)
    rank = ForkedProcess(1, os.open(os.devnull, os.O_RDONLY), reader)
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *given: sent.append(given))
    rank.terminate()
    rank.kill()
    rank.send_signal(signal.SIGUSR1)
    assert [number for _, number in sent] == [signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1]
    assert {descriptor for descriptor, _ in sent} == {rank._process}

    def ended(*_):
        raise ProcessLookupError

    monkeypatch.setattr(signal, "pidfd_send_signal", ended)
    rank.kill()
    descriptor = rank._process
    del rank
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_launcher_without_standard_output_gives_its_ranks_the_null_device(monkeypatch):
    """A daemon has closed it."""
    with contextlib.ExitStack() as stack:
        assert forked_ranks._output(stack, 1) == 1

        def closed(_):
            raise OSError

        monkeypatch.setattr(os, "fstat", closed)
        descriptor = forked_ranks._output(stack, 1)
        monkeypatch.undo()
        assert os.readlink(f"/proc/self/fd/{descriptor}") == os.devnull  # noqa: PTH115
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_the_working_directory_is_spelt_out_in_the_search_path(monkeypatch, tmp_path):
    """A rank may begin in another one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "/a", ""])
    assert forked_ranks.search_path() == [str(tmp_path), "/a", str(tmp_path)]
