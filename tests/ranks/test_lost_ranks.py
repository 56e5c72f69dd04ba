"""A rank that is lost, without a launcher of ours: the others say which, and end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest
from tests.time_limits import HANG_S

SCRIPT = """
import os, signal, torch
import penstock as ps

torch.manual_seed(0)
pipe = ps.Pipeline(
    [torch.nn.Linear(4, 4) for _ in range(2)],
    loss=torch.nn.functional.mse_loss,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    balance=[1, 1],
    schedule="1f1b",
    micro_batches=2,
)
x = torch.ones(4, 4)
print(float(pipe.train_batch(x, x)), flush=True)
if os.environ["RANK"] == "0":
    os.kill(os.getpid(), signal.SIGSTOP)
while True:
    pipe.train_batch(x, x)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the state of a process is in Linux's /proc")
def test_a_stopped_rank_is_named_also_if_it_hosts_the_store():
    """The store cannot be asked then: the heartbeats of all ranks do not need it.

    Version 0.1 said nothing in 700 s.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    stopped, other = (
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    )
    try:
        _, errors = other.communicate(timeout=HANG_S)
        assert other.returncode == 1
        name = f"rank 0 on host {socket.gethostname()} (127.0.0.1, pid {stopped.pid})"
        assert f"{name} has been stopped by a signal (SIGSTOP)" in errors
        assert "its last heartbeat is" in errors
    finally:
        stopped.send_signal(signal.SIGKILL)
        stopped.communicate()
        other.kill()
