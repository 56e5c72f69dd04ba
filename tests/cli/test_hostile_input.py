"""The command line refuses hostile files with one line and status 2, in little memory."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

#: Commands that read a file of the user's.
COMMANDS = {
    "profile": ("plan", "{file}", "--cluster", "2xV100-NVLink"),
    "plan": ("report", "{file}"),
    "cluster": ("show", "{file}.yaml"),
    "schedule": ("simulate", "--csv", "{file}"),
    "configuration": ("train", "{file}"),
    "study": ("study", "{file}"),
}

CONTENTS = {
    "nothing": b"",
    "a byte order mark": b"\xef\xbb\xbf",
    "NUL bytes": b"a: \0",
    "other bytes": b"a: \xff\xfe",
    "nesting": b"[" * 100_000,
    "aliases": b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n",
    "a key twice": b'{"a": 1, "a": 2}',
    "a huge number": b'{"batch": ' + b"9" * 5000 + b"}",
    "an unknown key": b'{"colour": "red"}',
}

#: A process that runs a command, and prints its status and its peak memory in MiB.
MEASURE = """
import resource, subprocess, sys
ran = subprocess.run(sys.argv[1:], capture_output=True, text=True)
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
print(ran.returncode, peak, len(ran.stderr.splitlines()), ran.stderr)
"""


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("kind", COMMANDS)
def test_a_hostile_file_is_refused_with_one_line(penstock, tmp_path, kind, content):
    """The line says what is wrong with the file; a traceback would not."""
    words = [word.format(file=tmp_path / "file") for word in COMMANDS[kind]]
    for name in ("file", "file.yaml"):
        (tmp_path / name).write_bytes(CONTENTS[content])
    result = penstock(*words)
    assert result.status == 2, result
    assert len(result.err.splitlines()) == 1
    assert result.err.startswith("error: ")
    assert result.out == ""


SMALL = ("--schedule", "gpipe", "--stages", 2, "--micro-batches", 2)


@pytest.mark.parametrize("place", ["file/x", "missing/x", "folder"])
@pytest.mark.parametrize(
    "words",
    [
        ("draw", *SMALL, "--out", "{path}.svg"),
        ("export", *SMALL, "--to", "{path}.svg"),
        ("plan", "no-profile.json", "--out", "{path}.svg"),
        ("profile", "--model", "no_module:factory", "--out", "{path}.svg"),
        ("profile", "--cluster", "local:1", "--out", "{path}.svg"),
    ],
    ids=lambda words: words[0],
)
def test_a_path_that_cannot_be_written_is_refused_with_one_line(penstock, tmp_path, words, place):
    """The path is one of the words: status 2, before anything is measured."""
    (tmp_path / "file").touch()
    (tmp_path / "folder.svg").mkdir()
    ran = penstock(*(str(word).format(path=tmp_path / place) for word in words))
    assert ran.status == 2, ran
    assert len(ran.err.splitlines()) == 1
    assert ran.err.startswith("error: cannot write ")
    assert ran.out == ""


@pytest.mark.parametrize("place", ["pipe", "folder", "sparse", "/dev/zero", "missing"])
def test_what_stands_in_the_place_of_a_file_is_refused(penstock, tmp_path, place):
    """None of these ends, or has anything to read."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**30)
    for words in COMMANDS.values():
        result = penstock(
            *(word.removesuffix(".yaml").format(file=tmp_path / place) for word in words)
        )
        assert result.status == 2, result
        assert len(result.err.splitlines()) == 1
        assert result.err.startswith("error: ")


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("pipe", "it is a pipe, and no process writes to it"),
        ("empty", "empty"),
        ("folder", "holds no run to continue: there is no config.yaml"),
        ("run", "holds no whole checkpoint to continue from"),
        ("sparse", "NUL bytes"),
        ("/dev/zero", "NUL bytes"),
        ("missing", "missing"),
        ("long" * 100, "File name too long"),
    ],
)
def test_what_stands_in_the_place_of_a_run_is_not_resumed(penstock, tmp_path, place, message):
    """The argument of --resume is a folder, or a file of settings."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "run" / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").touch()
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**40)
    result = penstock("train", "--resume", tmp_path / place)
    assert result.status == 2, result
    assert len(result.err.splitlines()) == 1
    assert result.err.startswith("error: ")
    assert message in result.err
    assert result.out == ""


@pytest.mark.parametrize(
    "words",
    [("train",), ("plan",), ("report",), ("show",), ("resize", "2"), ("export-weights", "x")],
)
def test_a_name_that_is_too_long_is_no_traceback(penstock, words):
    """Such as a text that was passed in place of a file."""
    command, *rest = words
    result = penstock(command, "long" * 100, *rest)
    assert result.status == 2, result
    assert len(result.err.splitlines()) == 1
    assert "File name too long" in result.err


@pytest.mark.parametrize("kind", ["profile", "configuration", "schedule"])
def test_a_file_of_a_gigabyte_takes_little_memory(tmp_path, kind):
    """It is refused before it is read, and before torch is loaded: 200 MiB are enough."""
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(2**30)
    command = [
        sys.executable,
        "-m",
        "penstock",
        *(word.format(file=path) for word in COMMANDS[kind]),
    ]
    process = subprocess.run(
        [sys.executable, "-c", MEASURE, *command], capture_output=True, text=True, check=True
    )
    status, peak_mib, lines, message = process.stdout.split(maxsplit=3)
    assert (status, lines) == ("2", "1"), message
    assert int(peak_mib) < 200
    assert message.startswith("error: cannot read the ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("simulate", "--schedule", "1f1b", "--stages", 10**9, "--micro-batches", 10**9),
            "2e+18 ops, which take 2e+11 GB",
        ),
        (
            ("draw", "--schedule", "gpipe", "--stages", 4, "--micro-batches", 10**9),
            "may be 5,000,000 at most",
        ),
        (("simulate", "--schedule", "1f1b", "--stages", 2, "--forward", "1e308"), "1e308"),
    ],
)
def test_sizes_of_a_typing_error_are_refused_with_what_they_take(penstock, words, message):
    """A typing error must not fill the memory."""
    result = penstock(*words)
    assert result.status == 2
    assert message in result.err
    assert len(result.err.splitlines()) == 1
