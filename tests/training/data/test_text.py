"""Text: windows that do not overlap, targets moved by one, a vocabulary from the training part
alone.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import FileError, SettingError
from penstock.training.data.text import text


@pytest.fixture
def written(tmp_path):
    """A function that writes a text file and returns its path."""

    def write(content: str | bytes):
        path = tmp_path / "story.txt"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def test_windows_follow_each_other_and_targets_are_the_inputs_moved_by_one(written):
    """The drawing in the docstring, in full: a=1, b=2, …"""
    data = text(written("abcdefghijklmnopqrst" * 2), tokens=3)
    assert data.train_inputs[:2].tolist() == [[1, 2, 3], [5, 6, 7]]
    assert data.train_targets[:2].tolist() == [[2, 3, 4], [6, 7, 8]]
    assert data.train_inputs.shape == (9, 3)
    assert data.test_inputs.tolist() == [[17, 18, 19]]
    assert data.test_targets.tolist() == [[18, 19, 20]]
    assert (data.train_inputs.dtype, data.name, data.task) == (torch.int64, "text", "next_token")


@settings(deadline=None, max_examples=60)
@given(
    content=st.text(
        st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=8, max_size=300
    ),
    tokens=st.integers(1, 3),
)
def test_the_windows_decode_to_the_text_with_the_last_tenth_to_test(
    content, tokens, tmp_path_factory
):
    """Nothing but the characters that fill no window is lost, and what the training part lacks is
    0.
    """
    path = tmp_path_factory.mktemp("text") / "any.txt"
    path.write_bytes(content.encode())
    data = text(path, tokens=tokens)
    window = tokens + 1
    cut = len(content) - max(len(content) // 10, window)
    vocabulary = sorted(set(content[:cut]))
    assert data.classes == len(vocabulary) + 1
    for inputs, targets, part in (
        (data.train_inputs, data.train_targets, content[:cut]),
        (data.test_inputs, data.test_targets, content[cut:]),
    ):
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        indices = torch.cat([inputs, targets[:, -1:]], dim=1).flatten().tolist()
        full_windows = part[: len(part) // window * window]
        assert indices == [
            vocabulary.index(letter) + 1 if letter in vocabulary else 0 for letter in full_windows
        ]


def test_characters_that_only_the_test_part_has_become_index_0(written):
    """The vocabulary must not know what is to be predicted; 0 is kept for it, below and above all
    known characters.
    """
    data = text(written("mnop" * 18 + "m~a\u00e9nopm"), tokens=3)
    assert data.classes == 5
    assert data.test_inputs.tolist() == [[1, 0, 0], [2, 3, 4]]
    assert not (data.train_inputs == 0).any()


def test_the_default_text_is_the_documentation_of_python_and_always_the_same():
    """It must be at hand without a network, and large enough to learn from."""
    data = text()
    again = text()
    assert torch.equal(data.train_inputs, again.train_inputs)
    assert torch.equal(data.test_targets, again.test_targets)
    assert data.train_inputs.shape[1] == 128
    assert len(data.train_inputs) * 129 > 300_000
    assert data.description == again.description
    assert "pydoc_data.topics" in data.description
    assert re.search(r"sha256 [0-9a-f]{64}: ", data.description)
    assert "\n" not in data.description


def test_every_index_is_below_the_number_of_classes():
    """An embedding of that many rows must have a row for each."""
    data = text(tokens=64)
    for part in (data.train_inputs, data.train_targets, data.test_inputs, data.test_targets):
        assert 0 <= int(part.min()) <= int(part.max()) < data.classes


def test_the_description_has_the_file_its_sha256_and_its_numbers(written):
    """A result can be traced to its data."""
    path = written("abcd" * 10)
    description = text(path, tokens=3).description
    assert (
        f"text of {path}, 40 characters, sha256 {hashlib.sha256(b'abcd' * 10).hexdigest()}"
        in description
    )
    assert "9 windows of 3 to train, 1 to test, vocabulary of 5" in description


def test_line_ends_are_kept_as_they_are(written):
    """Every byte counts, or the sha256 would not be the file's."""
    data = text(written("a\r\nb" * 10), tokens=3)
    assert data.classes == 5


def test_two_windows_are_enough_and_one_character_less_is_not(written):
    """One window to train and one to test: below that there is nothing to learn or nothing to
    check.
    """
    data = text(written("abcdefgh"), tokens=3)
    assert (len(data.train_inputs), len(data.test_inputs)) == (1, 1)
    with pytest.raises(
        FileError,
        match=r"story\.txt has 7 characters, but needs 8: a window of 4 .* longer text or fewer tokens",
    ):
        text(written("abcdefg"), tokens=3)


def test_an_empty_text_is_refused(written):
    """There is no vocabulary to take from it."""
    with pytest.raises(FileError, match="has 0 characters, but needs 4"):
        text(written(""), tokens=1)


def test_a_missing_file_says_so(tmp_path):
    """The path is the user's, so it is quoted."""
    with pytest.raises(FileError, match=r"cannot read the text .*nowhere\.txt: No such file"):
        text(tmp_path / "nowhere.txt")


def test_a_folder_is_refused_as_a_text(tmp_path):
    """A folder can be opened on some systems and read on none."""
    with pytest.raises(FileError, match="cannot read the text"):
        text(tmp_path)


def test_a_pipe_is_refused_as_a_text(tmp_path):
    """Every rank reads the file, and a pipe can be read once."""
    os.mkfifo(tmp_path / "text")
    with pytest.raises(FileError, match=r"cannot read the text .*: it is not a regular file"):
        text(tmp_path / "text")


def test_bytes_that_are_not_utf_8_give_the_offset(written):
    """Where to look is all that a reader needs; the offset is in bytes, after a character of two of
    them.
    """
    with pytest.raises(FileError, match=r"story\.txt is not text in UTF-8: byte 4 is 0xff"):
        text(written("ab\u00e9".encode() + b"\xffcd" * 30))


def test_a_binary_file_of_good_utf_8_is_refused_by_its_zero_byte(written):
    """Zeros decode as UTF-8, and a model would learn them."""
    with pytest.raises(FileError, match=r"story\.txt is not text: byte 3 is 0x00"):
        text(written(b"abc" + bytes(1000)))


@pytest.mark.parametrize("tokens", [0, -3, 1.5])
def test_tokens_that_are_no_positive_whole_number_are_refused(tokens):
    """A window without input teaches nothing."""
    with pytest.raises(SettingError, match=f"tokens is a whole number of 1 or more, not {tokens}"):
        text(tokens=tokens)


def test_a_python_without_its_documentation_says_to_give_a_path(monkeypatch):
    """Some distributions leave pydoc_data out."""
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(FileError, match=r"came without pydoc_data.*write text:PATH"):
        text()
