"""Every example is run, and what it prints is held against what it is known to print.

Examples run in this process, which has imported torch and whose fork server starts their ranks: a
process of their own spends all its time on imports. The first one runs without torch, and so by
itself; the last one runs in ranks that have the variables of torchrun.
"""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from tests.time_limits import HANG_S

from penstock.ranks.processes.launch import launch

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def run(*command: str, cwd: Path) -> str:
    """What a command prints, once it has ended well."""
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    result = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture
def run_here(tmp_path, monkeypatch, capsys):
    """Run an example as a program in this process, in a folder of its own; return what it prints."""
    monkeypatch.chdir(tmp_path)

    def run_path(example: str) -> str:
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / example), run_name="__main__")
        return capsys.readouterr().out

    return run_path


def expected(example: str) -> str:
    """The output that is kept beside an example."""
    return (EXAMPLES / example).with_suffix(".out").read_text(encoding="utf-8")


def without_fractions(text: str) -> str:
    """The text with a # for every decimal fraction, which another processor rounds otherwise."""
    return re.sub(r"\d+\.\d+", "#", text)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_every_example_says_what_it_shows_tells_and_takes(path):
    """Who opens an example wants to know first whether it is the right one."""
    said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert [
        word
        for word in ("Shows:", "Story:", "Takes:")
        if not re.search(rf"^{word} \S", said, re.MULTILINE)
    ] == []


def test_simulating_prints_its_golden_output_without_torch(tmp_path):
    """Planning answers at once and anywhere, to the last digit."""
    script = "import runpy, sys; sys.modules['torch'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    assert run("-c", script, str(EXAMPLES / "01_simulate.py"), cwd=tmp_path) == expected(
        "01_simulate.py"
    )


def test_training_in_threads_prints_its_golden_output_but_for_fractions(run_here):
    """That no gradient differs, and that a checkpoint goes on under another cut, is printed as
    words and whole numbers.
    """
    printed = run_here("02_train_in_threads.py")
    assert without_fractions(printed) == without_fractions(expected("02_train_in_threads.py"))
    first, last = re.search(r"loss (\S+) at first, (\S+) after", printed).groups()
    assert float(last) < 0.1 < float(first)


@pytest.mark.parametrize("example", ["04_any_model.py", "05_pipe.py"])
def test_the_other_ways_in_print_their_golden_output_but_for_fractions(example, run_here):
    """A model that is traced, and a pipeline that is a module."""
    assert without_fractions(run_here(example)) == without_fractions(expected(example))


def test_training_with_launch_plans_and_learns_the_digits(run_here):
    """The way from a model to a plan to processes that train, as a user goes it."""
    printed = run_here("03_train_with_launch.py")
    assert "on 2 of 2 ranks of local:2: 2 stages" in printed
    right = [
        float(share)
        for share in re.findall(
            r"^epoch \d: loss \S+, test accuracy (\S+)%$", printed, re.MULTILINE
        )
    ]
    assert len(right) == 3
    assert right[-1] > 90
    assert re.search(r"^a step: \S+ ms predicted, \S+ ms the last one$", printed, re.MULTILINE)


def test_training_with_torchruns_variables_goes_on_with_another_number_of_processes(
    tmp_path, monkeypatch, capfd
):
    """A checkpoint knows nothing of the cut. Ranks of `launch` have the variables that torchrun sets;
    what torchrun does besides is tested in tests/ranks/test_torchrun.py.
    """

    def run_rank(words: list[str]) -> None:
        import runpy
        import sys

        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")

    words = [str(EXAMPLES / "train_torchrun.py"), "--folder", "kept", "--epochs"]
    monkeypatch.chdir(tmp_path)
    for ranks, epochs in ((2, 1), (1, 2)):
        launch(run_rank, ranks, [*words, str(epochs)], threads=1)
        printed = capfd.readouterr().out
        assert re.findall(r"^epoch (\d)", printed, re.MULTILINE) == [str(epochs - 1)]
