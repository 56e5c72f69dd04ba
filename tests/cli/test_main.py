"""What every command does about errors that are not its own."""

from __future__ import annotations

import importlib
import subprocess

import pytest

from penstock.cli.discarded_output import discarded_output

DRAW = ["draw", "--schedule", "1f1b", "--stages", "2", "--micro-batches", "2"]


def test_a_full_disk_is_one_message_with_status_1(penstock, monkeypatch):
    """Any write may meet it; there is no traceback."""

    def write(*words, **options):
        raise OSError(28, "No space left on device", "out.svg")

    monkeypatch.setattr(importlib.import_module("penstock.draw.draw"), "draw", write)
    run = penstock(*DRAW)
    assert (run.status, run.err) == (
        1,
        "error: a file cannot be written (out.svg): No space left on device\n",
    )


def test_another_error_of_the_system_is_a_defect_and_shows_its_place(penstock, monkeypatch):
    """A traceback helps to report it."""

    def write(*words, **options):
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(importlib.import_module("penstock.draw.draw"), "draw", write)
    with pytest.raises(OSError, match="Bad file descriptor"):
        penstock(*DRAW)


@pytest.mark.parametrize("hidden", [2**50, 2**62])
def test_memory_that_is_exhausted_is_one_message_with_status_1(penstock, hidden):
    """Torch raises a RuntimeError, for a tensor that is too large for the host or for any host."""
    run = penstock("profile", "--model", "mlp", "--model-option", f"hidden={hidden}")
    assert (run.status, run.out, run.err.count("\n")) == (1, "", 1)
    assert run.err.startswith("error: there is not enough memory: ")


@pytest.mark.parametrize("words", [["-q", "list", "weights"], ["list", "weights", "--quiet"]])
def test_quiet_prints_no_results(penstock, words):
    """A script that only needs the exit status or a file gets no output; the flag may come last."""
    assert penstock(*words) == (0, "", "")


def test_quiet_discards_the_output_of_other_processes_and_restores_it(capfd):
    """Ranks write to the descriptor that they inherit."""
    with discarded_output():
        subprocess.run(["echo", "from a rank"], check=True)
    subprocess.run(["echo", "afterwards"], check=True)
    assert capfd.readouterr().out == "afterwards\n"


def test_verbose_adds_where_an_error_was_raised(penstock):
    """Bug reports need it; without the flag an error is one line."""
    words = ["list", "planer"]
    plain, verbose = penstock(*words), penstock("-v", *words)
    assert plain.err.count("\n") == 1
    assert verbose.status == plain.status == 2
    assert verbose.err.startswith(plain.err + "Traceback")
    assert "in list_names" in verbose.err
