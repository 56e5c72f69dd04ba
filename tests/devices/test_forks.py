"""What is imported before ranks, and the GPU benchmark's sections, are forked must not start CUDA: a
process that is forked from one that has asked for the number of cards cannot use any.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.time_limits import HANG_S

from penstock.ranks.processes import fork_server

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu"

FORK = """
import os, torch
pid = os.fork()
if not pid:
    os._exit(torch._C._cuda_isInBadFork())
_, status = os.waitpid(pid, 0)
raise SystemExit(os.waitstatus_to_exitcode(status))
"""

#: What the process does before it forks.
BEFORE = {
    "the fork server of launch": "".join(f"import {name}\n" for name in fork_server._MODULES),
    "the GPU benchmark": (
        f"import sys; sys.path.insert(0, {str(BENCHMARK)!r}); sys.argv = ['run.py']; import run\n"
    ),
}

pytestmark = pytest.mark.skipif(
    not hasattr(torch._C, "_cuda_isInBadFork"), reason="torch is built without CUDA"
)


def status_of(code):
    """The exit status of a process: 1 if its fork cannot use CUDA."""
    return subprocess.run(
        [sys.executable, "-c", code + FORK], timeout=HANG_S, check=False
    ).returncode


@pytest.mark.parametrize("name", BEFORE)
def test_processes_that_are_forked_can_use_cuda(name):
    """Shown by torch's own mark, on machines without a card too."""
    assert status_of(BEFORE[name]) == 0


def test_the_mark_shows_a_process_that_has_counted_cards():
    """Else the test above would show nothing."""
    assert status_of("import torch; torch.cuda.is_available()\n") == 1
