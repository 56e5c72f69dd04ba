"""Metrics of a run."""

from __future__ import annotations

import pytest

from penstock.errors import FileError
from penstock.report.metrics_file import read_metrics


def metrics(tmp_path, text):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    return read_metrics(path)


def test_a_resumed_run_repeats_steps_and_the_later_line_counts(tmp_path):
    """The steps after the last checkpoint are trained twice."""
    text = '{"step": 1, "loss": 3}\n{"step": 2, "loss": 2}\n{"step": 2, "loss": 1}\n'
    assert metrics(tmp_path, text).curve("loss") == ([1.0, 2.0], [3.0, 1.0])


def test_the_torn_line_of_a_killed_run_is_ignored(tmp_path):
    """A run that was killed is still worth a report."""
    read = metrics(tmp_path, '{"step": 1, "loss": 3}\n{"step": 2, "lo')
    assert read.curve("loss") == ([1.0], [3.0])


def test_steps_and_epochs_are_apart(tmp_path):
    """An evaluation has the step after which it took place."""
    text = '{"step": 1, "loss": 3}\n{"step": 1, "epoch": 1, "test_loss": 2, "busy": [1]}\n'
    read = metrics(tmp_path, text)
    assert read.curve("test_loss", epochs=True) == ([1.0], [2.0])
    assert read.curve("test_loss") == ([], [])
    assert read.curve("busy", epochs=True) == ([], [])


@pytest.mark.parametrize(
    "line", ["nonsense", "[1]", '{"loss": 1}', '{"step": "1"}', '{"step": true}', "", "{}\x00"]
)
def test_a_damaged_line_is_refused_with_its_number(tmp_path, line):
    """The message says where to look."""
    with pytest.raises(FileError, match=r"line 2|NUL bytes"):
        metrics(tmp_path, f'{{"step": 1}}\n{line}\n')
