"""The command before its modules are imported, and on terminals without Unicode."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from penstock import __version__
from penstock.cli import main
from penstock.cli.entry import STOPPED

DRAW = ["draw", "--schedule", "1f1b", "--stages", "2", "--micro-batches", "2"]


def _run(words, **variables):
    """Run the command in a process of its own; its output as bytes."""
    return subprocess.run(
        [sys.executable, "-m", "penstock", *words],
        capture_output=True,
        check=False,
        env={**os.environ, **variables},
    )


def test_version_is_printed_and_is_no_error(penstock):
    """Bug reports begin with it."""
    run = penstock("--version")
    assert (run.status, run.out) == (0, f"penstock {__version__}\n")


def test_a_terminal_without_unicode_gets_ascii():
    """cp1252 and ASCII lack the fills of a drawing: no UnicodeEncodeError, and F differs from B."""
    drawn = _run(DRAW, PYTHONIOENCODING="ascii")
    assert drawn.returncode == 0, drawn.stderr
    row = drawn.stdout.decode("ascii").splitlines()[1]
    assert row.startswith("rank 0 |F0:")
    assert "B0#" in row
    assert "." in row


def test_a_unicode_terminal_gets_the_same_drawing_as_before():
    """The fallback changes no stream that can encode everything."""
    drawn = _run(DRAW, PYTHONIOENCODING="utf-8")
    assert "F0░" in drawn.stdout.decode()


def test_ctrl_c_during_the_imports_prints_no_traceback(tmp_path):
    """Importing takes tenths of a second, in which an impatient user presses Ctrl-C."""
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    stopped = _run(["--help"], PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    assert (stopped.returncode, stopped.stderr) == (130, b"stopped\n")


def test_ctrl_c_before_the_command_begins_says_stopped(penstock, monkeypatch):
    """Typer ends with the same status by itself while it reads arguments, but says nothing."""

    def interrupted(words, **_):
        raise SystemExit(STOPPED)

    monkeypatch.setattr(main, "app", interrupted)
    assert penstock("list", "planners") == (STOPPED, "", "stopped\n")


def test_help_names_every_flag_in_full_on_a_narrow_terminal():
    """Panels cut `--micro-batches` to `--micro-bat…` at 60 columns."""
    helped = _run(["simulate", "--help"], COLUMNS="60", PYTHONIOENCODING="utf-8")
    assert b"--micro-batches" in helped.stdout


def test_completion_offers_the_names_of_schedules():
    """A shell asks the command itself what can follow."""
    words = {"COMP_WORDS": "penstock simulate --schedule zb-h", "COMP_CWORD": "3"}
    code = "import sys; sys.argv = ['penstock']; from penstock.cli.entry import run; run()"
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **words, "_PENSTOCK_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert set(answer.stdout.split()) >= {"zb-h1", "zb-h2"}, answer.stderr


@pytest.mark.parametrize("words", [["list", "schedules"], ["train", "--help"], DRAW])
def test_a_closed_pipe_ends_the_command_quietly(words):
    """As after `| head`: no message, and the status of a process that SIGPIPE has ended."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        ended = subprocess.run(
            [sys.executable, "-m", "penstock", *words],
            stdout=pipe,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (141, b"")
