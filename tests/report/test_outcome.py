"""The outcome of a run."""

from __future__ import annotations

import json

import pytest

from penstock.errors import FileError
from penstock.report.outcome import read_outcome


def test_an_outcome_is_read_whatever_other_versions_have_added(run_folder):
    """Reports of older and newer runs are possible."""
    path = run_folder / "outcome.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "later": 1, "test_loss": float("nan")}))
    outcome = read_outcome(path)
    assert outcome.steps == 40
    assert outcome.synchronous
    assert outcome.speed_up == pytest.approx(100.0 / content["measured_step_s"])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"steps": "x"}', "{"])
def test_a_damaged_outcome_is_refused(tmp_path, text):
    """The message names the file."""
    path = tmp_path / "outcome.json"
    path.write_text(text)
    with pytest.raises(FileError, match=r"outcome\.json"):
        read_outcome(path)
