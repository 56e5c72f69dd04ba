"""Values of a script's own classes between processes that `ps.launch` starts. Under torchrun, in
tests/ranks/test_torchrun.py, the same script runs.
"""

from __future__ import annotations

import runpy
from pathlib import Path

SCRIPT = Path(__file__).with_name("crossing_script.py")


def test_classes_of_a_script_cross_between_processes(capsys):
    """Refused in version 0.1. One tensor stays one, strides and flags are the sender's, and
    gradients are those of plain PyTorch to the bit.
    """
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert capsys.readouterr().out == "differs: [[], []]\n"
