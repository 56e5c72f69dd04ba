"""Plain data to JSON and back: everything foreign is refused with the place that is wrong."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.errors import FileError
from penstock.files.read import read_json
from penstock.store import check_writable, to_json, write_file, write_json


@dataclass(frozen=True)
class Part:
    """A value inside a value."""

    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Thing:
    """What the tests write and read."""

    name: str
    count: int
    parts: tuple[Part, ...] = ()
    schema: int = 3


THING = Thing("pump µ", 2, (Part((1.5, 2.0)), Part(())))


def read(tmp_path, text):
    path = tmp_path / "thing.json"
    path.write_text(text, encoding="utf-8")
    return read_json(path, Thing, 3)


def test_what_is_written_reads_back_equal(tmp_path):
    """Values are frozen dataclasses; JSON is their only form on disk."""
    path = tmp_path / "thing.json"
    write_json(path, THING)
    assert read_json(path, Thing, 3) == THING
    assert read_json(str(path), Thing, 3) == THING
    assert [file.name for file in tmp_path.iterdir()] == ["thing.json"]


def test_writing_replaces_the_old_file(tmp_path):
    """Whole or not at all: a reader sees the old file or the new one."""
    path = tmp_path / "thing.json"
    write_json(path, THING)
    write_json(path, Thing("other", 1))
    assert read_json(path, Thing, 3).name == "other"


def test_a_link_stays_a_link_and_its_target_is_replaced(tmp_path):
    """A plan that is linked from another folder is the same plan there."""
    (tmp_path / "link.json").symlink_to("real.json")
    write_json(tmp_path / "link.json", THING)
    assert (tmp_path / "link.json").is_symlink()
    assert read_json(tmp_path / "real.json", Thing, 3) == THING


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    """`penstock plan --out /dev/stdout` as root replaced the device by a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        check_writable(pipe)
        write_json(pipe, THING)
        assert os.read(reader, 10_000).decode() == to_json(THING) + "\n"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    """The disk is full, or text cannot be encoded: half a file would be read as a plan."""
    path = tmp_path / "thing.json"
    write_json(path, THING)

    def fail(partial, content):
        Path(str(partial)).touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(FileError, match=r"cannot write the plan .*thing\.json: No space left"):
        write_file(path, "new", kind="plan")
    with pytest.raises(FileError, match=r"cannot write .*surrogates not allowed"):
        write_file(path, "\ud800")
    assert list(tmp_path.iterdir()) == [path]
    assert read_json(path, Thing, 3) == THING


def test_a_folder_that_is_not_there_is_refused_with_the_path(tmp_path):
    """The user chose the path; the message repeats it."""
    with pytest.raises(
        FileError,
        match=r"cannot write .*nowhere/thing\.json: the folder .*nowhere does not exist; create it first",
    ):
        write_json(tmp_path / "nowhere" / "thing.json", THING)


def test_a_path_without_a_name_is_refused():
    """As of `penstock plan --out ""`: one line, not the error of pathlib."""
    with pytest.raises(FileError, match=r"cannot write \.: Is a directory"):
        write_json("", THING)


def test_a_missing_file_is_refused_with_kind_and_path(tmp_path):
    """What was looked for, and where."""
    with pytest.raises(FileError, match=r"cannot read the thing .*gone\.json: .*No such file"):
        read_json(tmp_path / "gone.json", Thing, 3)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    """Somebody passed the checkpoint."""
    (tmp_path / "thing.json").write_bytes(b"\x80\x04\x95\xff")
    with pytest.raises(FileError, match=r"cannot read the thing .*thing\.json"):
        read_json(tmp_path / "thing.json", Thing, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        (to_json(THING)[:40], "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        (
            '{"schema": 3, "count": ' + "9" * 5000 + "}",
            "is not JSON: 9+… is beyond the integers of 64 bits",
        ),
        ('{"schema": 3, "name": "a", "count": NaN}', "is not JSON: NaN is not a finite number"),
        (
            '{"schema": 3, "parts": [{"seconds": [-Infinity]}]}',
            "is not JSON: -Infinity is not a finite number",
        ),
        (
            '{"schema": 3, "parts": [{"seconds": [1e999]}]}',
            "is not JSON: 1e999 is not a finite number",
        ),
        (
            "[]",
            r"is no thing of schema 3: its schema is missing, so it is another kind of file\. Create",
        ),
        ("3", r"is no thing of schema 3: its schema is missing"),
        ('{"name": "a", "count": 1}', r"its schema is missing"),
        ('{"name": "a", "count": 1, "schema": 2}', r"is no thing of schema 3: its schema is 2"),
        ('{"name": "a", "count": 1, "schema": "3"}', r"its schema is '3'"),
        ('{"name": "a", "schema": 3}', r"is no thing: at count: the key is missing"),
        ('{"name": "a", "count": 1, "schema": 3, "color": 1}', r"is no thing: at color: "),
        (
            '{"name": "a", "count": 1, "schema": 3, "parts": [{"seconds": [], "speed": 1}]}',
            r"is no thing: at parts\.0\.speed: ",
        ),
        (
            '{"name": "a", "count": 1, "schema": 3, "parts": [{"seconds": [1, "x"]}]}',
            r"at parts\.0\.seconds\.1: ",
        ),
        (
            '{"name": "a", "count": 1, "schema": 3, "parts": [{"seconds": [1, "2"]}]}',
            r"at parts\.0\.seconds\.1: ",
        ),
        ('{"name": "a", "count": 1.5, "schema": 3}', r"is no thing: at count: "),
        ('{"name": "a", "count": "1", "schema": 3}', r"is no thing: at count: "),
        ('{"name": "a", "count": true, "schema": 3}', r"is no thing: at count: "),
        ('{"name": 1, "count": 1, "schema": 3}', r"is no thing: at name: "),
        ('{"name": "a", "count": 1, "schema": 3, "parts": null}', r"is no thing: at parts: "),
    ],
)
def test_what_is_not_exactly_of_the_form_is_refused_with_its_place(tmp_path, text, message):
    """Trust nothing from outside: Python's reader takes NaN, 1e999 and endless nesting, and
    pydantic a text for a number.
    """
    with pytest.raises(FileError, match=message) as caught:
        read(tmp_path, text)
    assert str(tmp_path / "thing.json") in str(caught.value)


def test_a_whole_number_is_taken_where_a_float_is_meant(tmp_path):
    """JSON has one kind of number, and people write 2 for 2.0."""
    assert read(
        tmp_path, '{"name": "a", "count": 1, "schema": 3, "parts": [{"seconds": [2]}]}'
    ).parts[0].seconds == (2.0,)


def test_a_path_is_checked_before_the_work_whose_result_it_holds(tmp_path):
    """A measurement of minutes is lost if its file cannot be written. The check leaves no file, and
    keeps the old one.
    """
    path = tmp_path / "thing.json"
    check_writable(path)
    assert list(tmp_path.iterdir()) == []
    write_json(path, THING)
    check_writable(path)
    assert read_json(path, Thing, 3) == THING
    for wrong, reason in (
        (tmp_path, "Is a directory"),
        (path / "inner.json", "Not a directory"),
        (tmp_path / "nowhere" / "a.json", "the folder .* does not exist; create it first"),
        ("a\0b", "null"),
    ):
        with pytest.raises(FileError, match=f"cannot write .*{reason}"):
            check_writable(wrong)


def test_a_pipe_is_written_to_by_its_descriptor():
    """A link such as /dev/stdout leads to a pipe that no path names."""
    reader, writer = os.pipe()
    try:
        path = Path(f"/dev/fd/{writer}")
        check_writable(path)
        write_file(path, "content")
        assert os.read(reader, 100) == b"content"
    finally:
        os.close(reader)
        os.close(writer)
