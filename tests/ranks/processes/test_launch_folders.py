"""Folders of launchers that were killed are removed by the next launch."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from penstock.ranks.processes.launch_folders import (
    locked_folder,
    make_locked_folder,
    remove_abandoned,
)


def test_only_folders_that_no_process_has_locked_are_removed(tmp_path, monkeypatch):
    """The kernel releases the lock of a launcher that was killed, as closing its descriptor does."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    running, lock = make_locked_folder("penstock-test-")
    abandoned, closed = make_locked_folder("penstock-test-")
    os.close(closed)
    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / "penstock-test-link").symlink_to(other)
    remove_abandoned("penstock-test-")
    assert abandoned.exists()  # it is new: its launcher may be about to lock it
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    remove_abandoned("penstock-test-", new_s=0.0)
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    assert running.exists()
    assert not abandoned.exists()
    assert other.exists()
    os.close(lock)


def test_a_folder_is_for_its_user_alone_and_goes_with_its_block(tmp_path, monkeypatch):
    """It has pickled functions and the store's socket."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with locked_folder("penstock-test-") as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


def test_a_new_folder_is_made_after_old_ones_of_its_prefix_are_removed(tmp_path, monkeypatch):
    """Launchers that are killed again and again would fill the disk."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    abandoned, other = tmp_path / "penstock-test-1", tmp_path / "other-1"
    for folder in (abandoned, other):
        folder.mkdir()
        (folder / "file").write_text("x")
        os.utime(folder, (0, 0))
    with locked_folder("penstock-test-") as folder:
        assert not abandoned.exists()
        assert (other / "file").exists()
        os.utime(folder, (0, 0))
        with locked_folder("penstock-test-") as second:
            assert folder.exists()
            assert second != folder


def test_folders_of_other_users_are_left_to_them(tmp_path, monkeypatch):
    """The folder of temporary files is common to all."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / "penstock-test-1"
    folder.mkdir()
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    remove_abandoned("penstock-test-", new_s=0.0)
    assert folder.exists()
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    remove_abandoned("penstock-test-", new_s=0.0)
    assert not folder.exists()
