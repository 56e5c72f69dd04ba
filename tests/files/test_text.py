"""A file is read within limits, whatever stands in it or in its place."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from penstock.errors import FileError
from penstock.files import text as module
from penstock.files.text import check_characters, join_names, quote_path, read_text, shorten


def open_descriptors():
    """Return the number of open files of this process."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_text_is_read_as_utf_8_with_or_without_a_mark(tmp_path):
    """Editors on Windows write a byte order mark."""
    path = tmp_path / "lab.yaml"
    path.write_bytes("µ".encode("utf-8-sig"))
    assert read_text(path, "cluster") == "µ"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"name: \xff", "byte 6 is not UTF-8 text: save it as UTF-8"),
        (b"a\0b", "it is not text, it contains NUL bytes"),
        (b"a" * 101, "it is longer than 100 bytes"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, content, message):
    """A checkpoint or an archive is passed by mistake sooner or later."""
    path = tmp_path / "lab.yaml"
    path.write_bytes(content)
    with pytest.raises(FileError, match=f"^cannot read the cluster .*lab.yaml: {message}"):
        read_text(path, "cluster", max_bytes=100)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/dev/zero", "it is not text, it contains NUL bytes"),
        ("/dev", "Is a directory"),
        ("nowhere.yaml", "No such file or directory"),
        ("a\0b", "embedded null byte"),
        ("x" * 5000, "File name too long"),
    ],
)
def test_what_is_no_file_is_refused_at_once(path, reason):
    """A device without an end must not be read to its end."""
    with pytest.raises(FileError, match=rf"^cannot read the plan .*: {reason}$") as caught:
        read_text(path, "plan", max_bytes=100)
    assert str(caught.value).isprintable()


def test_quoted_text_is_short_and_on_one_line():
    """A foreign value cannot forge a second line, or fill the screen."""
    assert shorten("a\nERROR \x1b[31m b") == "a ERROR ?[31m b"
    assert shorten("  one \n two ", 7) == "one two"
    assert shorten("one two", 6) == "one t…"
    assert len(shorten("y" * 100)) == 80
    assert shorten("x" * 10_000, 10) == "x" * 9 + "…"
    assert quote_path("runs/a.json") == "runs/a.json"
    assert quote_path("a\nb") == r"'a\nb'"


def test_a_file_of_the_largest_size_is_read_and_its_descriptor_closed(tmp_path, monkeypatch):
    """Whatever the size of one read is; one byte more is too much."""
    path = tmp_path / "plan.json"
    before = open_descriptors()
    for chunk in (3, 10, 2**20):
        monkeypatch.setattr(module, "_CHUNK_BYTES", chunk)
        path.write_text("0123456789")
        assert read_text(path, "plan", max_bytes=10) == "0123456789"
        with pytest.raises(FileError, match=r"it is longer than 9 bytes, which no plan is$"):
            read_text(path, "plan", max_bytes=9)
    assert open_descriptors() == before


def test_a_long_list_of_names_is_cut():
    """Five names fit on a line."""
    assert join_names([]) == ""
    assert join_names(list("abcde")) == "a, b, c, d, e"
    assert join_names(list("abcdef")) == "a, b, c, d, e and 1 more"


def test_characters_of_a_name_are_checked():
    """A path with NUL cannot be opened, and half a pair cannot be printed."""
    check_characters("µ \U0001f600\n")
    with pytest.raises(ValueError, match="the character NUL"):
        check_characters("a\0")
    with pytest.raises(ValueError, match="character 2 is half of a surrogate pair"):
        check_characters("ab\ud800c")


def test_a_device_of_zeros_is_refused_at_its_first_bytes(monkeypatch):
    """A limit of a gigabyte would be read whole before it is refused."""
    monkeypatch.setattr(module, "_CHUNK_BYTES", 16)
    assert len(module._read_bytes("/dev/zero", 2**30)) == 16
    with pytest.raises(FileError, match="it contains NUL bytes"):
        read_text("/dev/zero", "metrics", 2**30)


def test_a_pipe_is_read_until_it_is_closed(tmp_path):
    """A file may be the output of another command, which takes its time between two lines."""
    path = tmp_path / "pipe"
    os.mkfifo(path)

    def write() -> None:
        """Write two parts as another process would; opening waits for the reader."""
        with path.open("w") as pipe:
            for part in ("name: x\n", "nodes: []\n"):
                pipe.write(part)
                pipe.flush()

    writer = threading.Thread(target=write)
    writer.start()
    assert read_text(path, "cluster") == "name: x\nnodes: []\n"
    writer.join()


def test_a_pipe_to_which_nothing_is_written_is_refused(tmp_path, monkeypatch):
    """Waiting for ever would look like a slow planner."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(FileError, match="it is a pipe, and no process writes to it"):
        read_text(path, "cluster")
    monkeypatch.setattr(module, "_SILENT_S", 0.01)
    writer = os.open(path, os.O_RDWR)
    try:
        with pytest.raises(FileError, match="it is a pipe without data for 0 s"):
            read_text(path, "cluster")
    finally:
        os.close(writer)
