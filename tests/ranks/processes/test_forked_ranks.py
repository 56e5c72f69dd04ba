"""The fork server: what its ranks share, what they do not, and what happens without it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from penstock.errors import RankDied
from penstock.ranks.processes import forked_ranks
from penstock.ranks.processes.forked_ranks import ForkServer, _Server
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
