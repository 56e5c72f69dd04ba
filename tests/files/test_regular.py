"""Pipes and devices are refused before anything waits for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.files.regular import check_regular, open_file


def open_descriptors():
    """Return the number of open files of this process."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_regular_file_is_opened(tmp_path):
    """It is read as binary."""
    (tmp_path / "file").write_bytes(b"a\r\n")
    check_regular(tmp_path / "file")
    with open_file(tmp_path / "file") as file:
        assert file.read() == b"a\r\n"


@pytest.mark.parametrize("place", ["pipe", "link to pipe", "device", "folder", "missing"])
def test_what_is_no_file_is_refused_at_once(tmp_path, place):
    """Opening a pipe would wait for its writer; no descriptor stays open."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link to pipe").symlink_to(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    messages = {"folder": "Is a directory", "missing": "No such file"}
    message = messages.get(place, "it is not a regular file")
    before = open_descriptors()
    for refuse in (open_file, check_regular):
        with pytest.raises(OSError, match=message):
            refuse(tmp_path / place)
    assert open_descriptors() == before
