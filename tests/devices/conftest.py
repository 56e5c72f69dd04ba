"""The cells of the stand-in for an accelerator: all are played once, in a process of their own."""

from __future__ import annotations

import fcntl
import json
import os
from typing import Any

import pytest

from penstock.ranks.processes.launch import launch

#: Importing these changes torch for the whole process: pytest must not look in them for doctests.
collect_ignore = [
    "graph_cells.py",
    "lookalike.py",
    "lookalike_cells.py",
    "nccl_jobs.py",
    "nccl_like.py",
]


def _run_cells(module: str) -> list[dict[str, Any]]:
    """Return the rows of a module of cells, run in a process of their own.

    A rank of `launch` is one, and has torch imported already.
    """

    def run() -> list[dict[str, Any]]:
        import importlib

        return importlib.import_module(f"tests.devices.{module}").all_rows()

    return launch(run, 1, threads=1)[0]


def _rows_of(module: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return what each cell of a module came to, by its name. A module takes many seconds: the
    workers of one run of pytest share its output.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    output = folder / f"{module}.json"
    with (folder / f"{module}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not output.exists():
            output.write_text(json.dumps(_run_cells(module)))
    return {row["cell"]: row for row in json.loads(output.read_text())}


@pytest.fixture(scope="package")
def rows(tmp_path_factory):
    """What each cell of lookalike_cells.py came to, by its name."""
    return _rows_of("lookalike_cells", tmp_path_factory)


@pytest.fixture(scope="package")
def graph_rows(tmp_path_factory):
    """What each cell of graph_cells.py came to, by its name."""
    return _rows_of("graph_cells", tmp_path_factory)
