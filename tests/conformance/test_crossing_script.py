"""Values of a script's own classes between processes: started by `ps.launch`, and under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.time_limits import HANG_S

SCRIPT = Path(__file__).with_name("crossing_script.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize(
    ("start", "expected"), [([], ["differs: [[], []]"]), (TORCHRUN, ["differs: []"] * 2)]
)
def test_classes_of_a_script_cross_between_processes(start, expected):
    """Refused in version 0.1. One tensor stays one, strides and flags are the sender's, and
    gradients are those of plain PyTorch to the bit.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, *start, str(SCRIPT)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert [line for line in result.stdout.splitlines() if "differs" in line] == expected
