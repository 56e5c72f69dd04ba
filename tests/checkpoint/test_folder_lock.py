"""One run at a time writes into a folder, and a run that was killed can be resumed at once."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
from pathlib import Path

import pytest

from penstock.checkpoint.folder_lock import FolderLock, check_files, has_lock
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
    assert ("another run (" in str(caught.value)) is ("process" in content)
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


def test_a_lock_is_seen_while_it_is_held_and_after_its_process_was_killed(tmp_path):
    """Also by hosts that share the disk, which may not see the lock itself."""
    assert not has_lock(tmp_path)
    with FolderLock(tmp_path) as lock:
        assert isinstance(lock, FolderLock)
        assert has_lock(tmp_path)
    assert not has_lock(tmp_path)
    (tmp_path / ".lock").write_text("of a run that was killed")
    assert has_lock(tmp_path)
    assert not has_lock(tmp_path / "nowhere")


@pytest.mark.parametrize("content", ["x" * 1000, '"process 1 on a host with a very long name"', ""])
def test_the_text_of_an_earlier_run_is_replaced(tmp_path, content):
    """What a killed run has left may be longer than the new text."""
    (tmp_path / ".lock").write_text(content)
    owner = f"process {os.getpid()} on {socket.gethostname()}"
    with FolderLock(tmp_path):
        assert (tmp_path / ".lock").read_text() == f'"{owner}"'
        with pytest.raises(FileError) as refusal:
            FolderLock(tmp_path)
    assert str(refusal.value) == (
        f"another run ({owner}) writes into {tmp_path}: wait for its end or stop it, or choose "
        "another folder"
    )


def test_a_lock_that_was_released_releases_nothing_more(tmp_path):
    """Another run may have it by then."""
    first = FolderLock(tmp_path)
    first.release()
    with FolderLock(tmp_path):
        first.release()
        del first
        assert has_lock(tmp_path)
        with pytest.raises(FileError, match="another run"):
            FolderLock(tmp_path)


def open_descriptors():
    """Return the number of open descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (errno.EWOULDBLOCK, True),
        (errno.EACCES, True),
        (errno.ENOLCK, False),
        (errno.EOPNOTSUPP, False),
    ],
)
def test_a_file_system_without_locks_refuses_nothing(tmp_path, monkeypatch, error, refused):
    """And no attempt leaves an open file."""

    def flock(descriptor, operation):
        raise OSError(error, os.strerror(error))

    before = open_descriptors()
    monkeypatch.setattr(fcntl, "flock", flock)
    if refused:
        with pytest.raises(FileError, match=rf"^another run writes into {tmp_path}: "):
            FolderLock(tmp_path)
    else:
        FolderLock(tmp_path).release()
    assert open_descriptors() == before


def test_a_full_disk_keeps_the_lock(tmp_path, monkeypatch):
    """Its text alone is missing."""

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "ftruncate", full)
    with (
        FolderLock(tmp_path),
        pytest.raises(FileError, match=rf"^another run writes into {tmp_path}"),
    ):
        FolderLock(tmp_path)


def test_a_folder_of_a_run_has_files_and_folders_alone(tmp_path):
    """A link that leads nowhere is left to its reader; the first thing that is no file is named."""
    (tmp_path / "a.json").write_text("")
    (tmp_path / "b").mkdir()
    (tmp_path / "c").symlink_to(tmp_path / "nowhere")
    (tmp_path / "d").symlink_to(tmp_path / "b")
    check_files(tmp_path)
    check_files(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "b" / "inside")
    check_files(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        # Paths of sockets are short.
        folder = os.open(tmp_path, os.O_RDONLY)
        server.bind(f"/proc/self/fd/{folder}/e")
        os.close(folder)
    os.mkfifo(tmp_path / "f")
    with pytest.raises(FileError) as refusal:
        check_files(tmp_path)
    assert str(refusal.value).endswith(
        "e is a socket, and the folder of a run has files alone: remove it, or choose another folder"
    )
