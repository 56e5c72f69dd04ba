"""What every command does about errors that are not its own."""

from __future__ import annotations

import importlib

import pytest

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
