"""How the command starts: at once, and without what the verb does not need."""

from __future__ import annotations

import os
import subprocess
import sys


def test_simulate_loads_no_torch():
    """Planning works on a laptop without a GPU, and answers before one has looked away."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from penstock.cli.main import status\n"
        "raise SystemExit(status(['simulate', '--schedule', '1f1b', '--stages', '2', '--micro-batches', '2', '--json']))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert '"makespan"' in process.stdout


def test_a_reader_that_goes_away_is_no_traceback():
    """`penstock schedules | head -0` must end quietly."""
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [sys.executable, "-m", "penstock", "schedules"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert "Traceback" not in process.stderr


def test_no_colour_codes_leave_a_terminal_less_run():
    """Escape codes in a log file are noise."""
    words = [
        sys.executable,
        "-m",
        "penstock",
        "draw",
        "--schedule",
        "gpipe",
        "--stages",
        "2",
        "--micro-batches",
        "2",
    ]
    process = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "\x1b" not in process.stdout
