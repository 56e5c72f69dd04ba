"""One run at a time writes into a folder, and a run that was killed can be resumed at once."""

from __future__ import annotations

import fcntl
import os
import signal

import pytest

from penstock.checkpoint.folder_lock import FolderLock
from penstock.errors import FileError


def test_a_second_run_is_refused_until_the_first_ends(tmp_path):
    """The message names the process that has the lock."""
    with (
        FolderLock(tmp_path),
        pytest.raises(
            FileError, match=rf"another run \(process {os.getpid()} on .*\) writes into {tmp_path}"
        ),
    ):
        FolderLock(tmp_path)
    FolderLock(tmp_path).release()


def test_a_pipe_in_the_place_of_a_file_is_refused(tmp_path):
    """A run would wait at metrics.jsonl for a process that reads it. Links to devices as well."""
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(
        FileError, match=r"metrics\.jsonl is a pipe, and the folder of a run has files"
    ):
        FolderLock(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "plan.json").symlink_to(os.devnull)
    with pytest.raises(FileError, match=r"plan\.json is a device"):
        FolderLock(tmp_path)


def test_a_lock_ends_with_its_process(tmp_path):
    """The kernel releases it, whatever has ended the process."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            lock = FolderLock(tmp_path)
            os.write(writer, b"locked")
            signal.pause()
            lock.release()
        finally:
            os._exit(1)  # whatever happens, this copy of pytest ends here
    os.close(writer)
    try:
        assert os.read(reader, 6) == b"locked"
        with pytest.raises(FileError, match=f"process {pid} on"):
            FolderLock(tmp_path)
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    FolderLock(tmp_path).release()


def test_a_released_lock_leaves_no_file(tmp_path):
    """A folder has only what its run has written."""
    FolderLock(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_of_a_file_that_was_just_removed_does_not_count(tmp_path, monkeypatch):
    """The run that removes it may end between the opening and the locking."""
    first = FolderLock(tmp_path)
    flock = fcntl.flock

    def end_of_the_first(descriptor, operation):
        monkeypatch.setattr(fcntl, "flock", flock)
        first.release()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", end_of_the_first)
    with FolderLock(tmp_path):
        assert (tmp_path / ".lock").exists()
        with pytest.raises(FileError, match="another run"):
            FolderLock(tmp_path)


def test_a_dropped_lock_is_released(tmp_path):
    """A run whose error is shown somewhere does not block its folder."""
    FolderLock(tmp_path)
    FolderLock(tmp_path).release()


@pytest.mark.parametrize("content", ["", "{", "[1]", '"\\u001b[31mprocess"', "x" * 5000])
def test_a_foreign_lock_file_is_shown_without_control_characters(tmp_path, content):
    """Anybody may have written the file."""
    (tmp_path / ".lock").write_text(content)
    descriptor = os.open(tmp_path / ".lock", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(FileError, match="another run") as caught:
        FolderLock(tmp_path)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 600
    os.close(descriptor)


def test_a_lock_file_that_is_a_pipe_is_not_waited_for(tmp_path):
    """Nothing may ever be written to it."""
    os.mkfifo(tmp_path / ".lock")
    descriptor = os.open(tmp_path / ".lock", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(FileError, match=r"\.lock is a pipe"):
        FolderLock(tmp_path)
    os.close(descriptor)


def test_a_folder_that_does_not_exist_is_left_to_the_first_file(tmp_path):
    """Its message says what cannot be written."""
    FolderLock(tmp_path / "missing").release()
