"""The cells of the stand-in for an accelerator: all are played once, in a process of their own."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Importing these changes torch for the whole process: pytest must not look in them for doctests.
collect_ignore = [
    "graph_cells.py",
    "lookalike.py",
    "lookalike_cells.py",
    "nccl_jobs.py",
    "nccl_like.py",
]

_FOLDER = Path(__file__).parent
_SOURCE = _FOLDER.parents[1] / "src"


def _output_of(script):
    """The lines that a script of cells prints."""
    path = os.pathsep.join([str(_SOURCE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(_FOLDER / script)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _rows_of(script, tmp_path_factory):
    """What each cell of a script came to, by its name. A script takes half a minute: the workers of
    one run of pytest share its output.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    output = folder / f"{script}.json"
    with (folder / f"{script}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not output.exists():
            output.write_text(_output_of(script))
    parsed = [json.loads(line) for line in output.read_text().splitlines()]
    return {row["cell"]: row for row in parsed}


@pytest.fixture(scope="package")
def rows(tmp_path_factory):
    """What each cell of lookalike_cells.py came to, by its name."""
    return _rows_of("lookalike_cells.py", tmp_path_factory)


@pytest.fixture(scope="package")
def graph_rows(tmp_path_factory):
    """What each cell of graph_cells.py came to, by its name."""
    return _rows_of("graph_cells.py", tmp_path_factory)
