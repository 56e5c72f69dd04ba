"""The minimal programs of the libraries are counted by one rule, and they train the same model.

Peers are not installed with Penstock. To run their programs too, install them into a folder and put
it on the path: `pip install --no-deps --target peers torchgpipe==0.0.7 fairscale==0.4.13`, then
`PYTHONPATH=peers pytest tests/test_library_programs.py`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from tests.time_limits import HANG_S

import penstock as ps

FOLDER = Path(__file__).parents[1] / "examples" / "libraries"
COUNTER = runpy.run_path(str(FOLDER / "count_lines.py"))
REPORT = re.compile(r"^loss (\S+) at first, (\S+) after 30 batches$", re.MULTILINE)

# Found and not imported: it takes 2 s, in every worker that collects the tests.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None, reason="the digits come with scikit-learn"
)


def losses(printed: str) -> tuple[float, float]:
    """The first and the last loss that a program printed."""
    reports = REPORT.findall(printed)
    assert len(reports) == 1, f"one process reports, not {len(reports)}:\n{printed}"
    first, last = reports[0]
    return float(first), float(last)


def run_here(file: str) -> tuple[float, float]:
    """Run a program in this process, which has imported torch already; its fork server starts the
    ranks of `launch`.
    """
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.syspath_prepend(str(FOLDER))
        runpy.run_path(str(FOLDER / file), run_name="__main__")
        sys.modules.pop("workload", None)
    return losses(printed.getvalue())


def run_program(file: str, processes: int = 0) -> tuple[float, float]:
    """Run a program of a peer in a process of its own, or in several under torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    result = subprocess.run(
        [sys.executable, *(launcher if processes else []), str(FOLDER / file)],
        env=variables,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return losses(result.stdout)


@cache
def plain_losses() -> tuple[float, float]:
    """The losses of plain training."""
    return run_here("train_plain.py")


def check_losses(file_losses: tuple[float, float]) -> None:
    """Compare with plain training: what differs is the order of sums."""
    assert file_losses == pytest.approx(plain_losses(), abs=1e-4)


def test_the_workload_learns_within_its_batches():
    """On a plateau all programs would agree, whatever they did."""
    first, last = plain_losses()
    assert first > 2.3
    assert last < 1.2


def test_the_program_of_pipe_has_the_losses_of_plain_training():
    """A module in the user's own loop."""
    torch.set_num_threads(1)
    check_losses(run_here("train_penstock_pipe.py"))


def test_the_program_of_pipeline_has_the_losses_of_plain_training():
    """A planned pipeline of two processes."""
    check_losses(run_here("train_penstock.py"))


def test_the_program_of_torch_pipelining_has_the_losses_of_plain_training(capfd):
    """It comes with torch, so it always runs. `launch` sets the variables of torchrun, and its ranks
    start in less time.
    """

    def run_rank(folder: str) -> None:
        import runpy
        import sys

        sys.path.insert(0, folder)
        runpy.run_path(f"{folder}/train_torch_pipelining.py", run_name="__main__")

    ps.launch(run_rank, 2, str(FOLDER), threads=1)
    check_losses(losses(capfd.readouterr().out))


@pytest.mark.parametrize(
    ("package", "processes"), [("torchgpipe", 0), ("fairscale", 0), ("deepspeed", 2)]
)
def test_the_program_of_a_peer_has_the_losses_of_plain_training(package, processes):
    """A program that its library does not run would say nothing about the lines that it takes."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    check_losses(run_program(f"train_{package}.py", processes))


def test_only_lines_with_code_count():
    """Blank lines, comments and docstrings explain; a statement over two lines is two lines."""
    program = '''"""Title

of two paragraphs."""

import os  # a comment behind code
from pathlib import (
    Path,
)

# a comment
def main():
    """Do it."""
    text = """one
two"""
    return os, Path, text
'''
    count = COUNTER["count_lines"](program, "import os  # a comment behind code\n")
    assert (count.code, count.imports, count.new) == (8, 4, 7)


def test_every_program_is_counted_and_described():
    """A program without a row would not be compared."""
    files = {path.name for path in FOLDER.glob("train_*.py")}
    assert files == set(COUNTER["PROGRAMS"].values())
    assert set(COUNTER["count_programs"]()) == set(COUNTER["PROGRAMS"])


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_every_file_says_what_it_shows_tells_and_takes(path):
    """As all examples do."""
    text = path.read_text(encoding="utf-8")
    assert re.search(r"^Shows: \S.*^Story: \S.*^Takes: \S", text, re.MULTILINE | re.DOTALL)
