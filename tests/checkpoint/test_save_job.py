"""Saving while training goes on: the checkpoint has the state of the step at which it began."""

from __future__ import annotations

import threading

import pytest
from tests.checkpoint.test_checkpoint import batch, differences, pipeline, trained
from tests.time_limits import HANG_S

import penstock as ps
from penstock.checkpoint import checkpoint_files
from penstock.checkpoint.series import step_folders
from penstock.errors import SettingError
from penstock.runtime.state.checkpoints import SeriesContext


@pytest.fixture
def gate(monkeypatch):
    """An event before which no file of a checkpoint is written."""
    event = threading.Event()
    save_file = checkpoint_files.save_file

    def wait_and_save(*args, **options):
        assert event.wait(HANG_S)
        save_file(*args, **options)

    monkeypatch.setattr(checkpoint_files, "save_file", wait_and_save)
    return event


def test_training_goes_on_while_a_checkpoint_of_an_earlier_step_is_written(tmp_path, gate):
    """No step waits for the disk, and no later step is in the files."""
    pipe = trained(2, "mlp")
    checkpoints = ps.Checkpoints(tmp_path)
    checkpoints.save(pipe)
    for number in (2, 3):
        pipe.train_batch(*batch("mlp", number))
        checkpoints.step(pipe)
    assert checkpoints.saved_step is None
    assert step_folders(tmp_path) == []
    gate.set()
    checkpoints.finish(pipe)
    assert checkpoints.saved_step == 4
    other = pipeline("mlp", 3)
    other.load(checkpoints.path(2))
    assert differences(other.state_dict(), trained(2, "mlp").state_dict()) == []
    for number in (2, 3):
        other.train_batch(*batch("mlp", number))
    assert differences(other.state_dict(), pipe.state_dict()) == []


def test_a_checkpoint_that_is_completed_between_two_saves_is_told_once(tmp_path):
    """Mostly it is complete long before the next one begins; `on_checkpoint` hung on that before."""
    saved = []
    context = SeriesContext(on_saved=lambda step, folder: saved.append((step, folder.exists())))
    pipe = trained(2, "mlp")
    checkpoints = ps.Checkpoints(tmp_path, every=2, context=context)
    checkpoints.save(pipe)
    number = 2
    while checkpoints.saved_step is None:  # the ranks agree twice a second
        pipe.train_batch(*batch("mlp", number % 2))
        checkpoints.poll(pipe)
        number += 1
    assert saved == [(2, True)]
    checkpoints.finish(pipe)
    assert saved == [(2, True), (number, True)]


def test_what_cannot_be_saved_is_told_by_a_later_step(tmp_path):
    """The thread has found it, and the run must not go on as if it were saved."""
    pipe = trained(1, "mlp")
    pipe._assembly.stages[0].update.parameters[0].data.fill_(float("nan"))
    checkpoints = ps.Checkpoints(tmp_path)
    checkpoints.save(pipe)
    with pytest.raises(SettingError, match="there are NaN values in"):
        checkpoints.finish(pipe)
    assert list(tmp_path.iterdir()) == []


def test_wrong_settings_are_refused(tmp_path):
    """At the door."""
    for keep in (0, True, 1.5):
        with pytest.raises(SettingError, match="keep is a number of checkpoints, 1 or more"):
            ps.Checkpoints(tmp_path, keep=keep)
    with pytest.raises(SettingError, match="is no interval between checkpoints"):
        ps.Checkpoints(tmp_path, every="often")
