"""Wrong words on the command line are one line that quotes the value, with exit status 2."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["partition", "profile.json", "--stages", "1e400"],
            "--stages '1e400': must be a whole number; see penstock partition --help",
        ),
        (
            ["plan", "--budget=abc"],
            "--budget 'abc': must be a number; see penstock plan --help",
        ),
        (
            ["train", "--lr", "1", "--batch", ""],
            "--batch '': must be a whole number; see penstock train --help",
        ),
        (["resize", "run", "two"], "ranks: must be a whole number; see penstock resize --help"),
        (["plan", "--budget"], "Option '--budget' requires an argument; see penstock plan --help"),
        (["xyzzy"], "No such command 'xyzzy'; see penstock --help"),
        (["resize"], "Missing argument 'run'; see penstock resize --help"),
    ],
)
def test_wrong_words_are_one_line_with_the_value(penstock, words, message):
    """Typer prints four lines, of which none quotes a value that is no number."""
    assert penstock(*words) == (2, "", f"error: {message}\n")


def test_a_misspelt_flag_is_answered_with_the_right_one(penstock):
    """The nearest flag is what the user looks for in the help."""
    run = penstock("plan", "--planer", "auto")
    assert (run.status, run.out, run.err.count("\n")) == (2, "", 1)
    assert "--planner" in run.err


def test_no_command_prints_the_help(penstock):
    """The name of the program alone prints what it can do."""
    run = penstock()
    assert run.status == 2
    assert "Commands:" in run.out + run.err
