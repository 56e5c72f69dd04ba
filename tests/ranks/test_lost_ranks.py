"""A rank that is lost, without a launcher of ours: the others say which, and end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.time_limits import HANG_S

SCRIPT = """
import os, signal
from tests.runtime.jobs import tiny, tiny_batch

pipe = tiny()
pipe.train_batch(*tiny_batch(0))
if os.environ["RANK"] == "0":
    os.kill(os.getpid(), signal.SIGSTOP)
while True:
    pipe.train_batch(*tiny_batch(0))
"""


#: Rank 0 before it has imported anything of Penstock.
EARLY = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"

JOIN = "from penstock.transport.process_group import join; join()"


@pytest.fixture
def reserved_port():
    """A port that no other process is given, and on which a rank can listen.

    It is bound until the end of the test. As this socket does not listen and both have SO_REUSEADDR,
    the rank may bind it too.
    """
    with socket.socket() as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind(("127.0.0.1", 0))
        yield reservation.getsockname()[1]


@pytest.mark.skipif(sys.platform != "linux", reason="the state of a process is in Linux's /proc")
def test_a_stopped_rank_is_named_also_if_it_hosts_the_store(reserved_port):
    """The store cannot be asked then: the heartbeats of all ranks do not need it.

    Version 0.1 said nothing in 700 s.
    """
    pid, errors = errors_of_the_other([SCRIPT, SCRIPT], reserved_port)
    name = f"rank 0 on host {socket.gethostname()} (127.0.0.1, pid {pid})"
    assert f"{name} has been stopped by a signal (SIGSTOP)" in errors
    assert "its last heartbeat is" in errors


@pytest.mark.skipif(sys.platform != "linux", reason="the state of a process is in Linux's /proc")
def test_rank_0_that_is_stopped_before_there_is_a_store_is_named(reserved_port):
    """The others do not wait for the store until the time limit."""
    pid, errors = errors_of_the_other([EARLY, JOIN], reserved_port)
    name = f"rank 0 on host {socket.gethostname()} (pid {pid})"
    assert f"{name} has been stopped by a signal (SIGSTOP)" in errors


def errors_of_the_other(scripts: list[str], port: int) -> tuple[int, str]:
    """Run a script per rank, of which rank 0 stops, and return its process id and rank 1's errors."""
    environment = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)]),
    }
    stopped, other = (
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={**environment, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, script in enumerate(scripts)
    )
    try:
        _, errors = other.communicate(timeout=HANG_S)
        assert other.returncode == 1
        return stopped.pid, errors
    finally:
        stopped.send_signal(signal.SIGKILL)
        stopped.communicate()
        other.kill()
