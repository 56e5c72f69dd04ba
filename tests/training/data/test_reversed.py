"""Reversed: the source as it stands, the target backwards, and of it only what comes before each
token.
"""

from __future__ import annotations

import pytest
import torch

from penstock.errors import FileError, SettingError
from penstock.training.data.reversed import reversed_text


def test_targets_are_the_source_backwards_and_inputs_know_what_came_before(tmp_path):
    """The drawing in the docstring, in full: a=1, b=2, …"""
    path = tmp_path / "story.txt"
    path.write_text("abcdefghijklmnopqrst" * 2)
    data = reversed_text(path, tokens=3)
    assert data.train_inputs[0].tolist() == [[1, 2, 3], [0, 3, 2]]
    assert data.train_targets[0].tolist() == [3, 2, 1]
    assert data.train_inputs.shape == (12, 2, 3)
    assert torch.equal(data.test_inputs[:, 0].flip(1), data.test_targets)
    assert torch.equal(data.test_inputs[:, 1, 1:], data.test_targets[:, :-1])
    assert (data.train_inputs.dtype, data.task, data.classes) == (torch.int64, "translate", 21)


def test_without_a_file_it_is_pythons_own_documentation():
    """It needs no file, and nothing is downloaded."""
    data = reversed_text(tokens=32)
    assert len(data.train_inputs) > 10_000
    assert "and backwards" in data.description


def test_a_text_that_is_too_short_and_no_tokens_are_refused(tmp_path):
    """As for plain text."""
    (tmp_path / "short").write_text("abc")
    with pytest.raises(FileError, match="needs 4"):
        reversed_text(tmp_path / "short", tokens=2)
    with pytest.raises(SettingError, match="tokens"):
        reversed_text(tokens=0)
