"""A series of checkpoints: what is not whole is skipped, and what stays is never in danger."""

from __future__ import annotations

import errno
import os
import shutil

import pytest
import torch
from safetensors.torch import save_file
from tests.checkpoint.test_checkpoint import batch, differences, pipeline, trained

import penstock as ps
from penstock.checkpoint import checkpoint_files, series
from penstock.checkpoint.series import (
    best_whole,
    newest_whole,
    prune,
    set_aside,
    step_folder,
    step_folders,
    whole_checkpoints,
)
from penstock.errors import FileError


def saved_steps(root, steps, keep=9, scores=()):
    """Train and save a checkpoint at each of some steps; return the pipeline."""
    pipe = pipeline("mlp")
    checkpoints = ps.Checkpoints(root, keep=keep)
    known = dict(zip(steps, scores, strict=False))
    while pipe.step < max(steps):
        pipe.train_batch(*batch("mlp", pipe.step))
        if pipe.step in steps:
            checkpoints.save(pipe, score=known.get(pipe.step), wait=True)
    return pipe


def steps_in(root):
    """Return the names of all that is in a folder."""
    return sorted(file.name for file in root.iterdir())


def cut_off(folder):
    """Shorten a file, as a full disk or a loss of power does."""
    file = next(folder.glob("*stage-0001*"))
    file.write_bytes(file.read_bytes()[:-8])


def turn_a_bit(folder):
    """Change a number in the middle of a file."""
    file = next(folder.glob("*stage-0001*"))
    content = bytearray(file.read_bytes())
    content[-5] ^= 16
    file.write_bytes(content)


def replace_by_pipe(folder):
    """Put a pipe, to which nothing writes, in the place of a file."""
    file = next(folder.glob("*stage-0001*"))
    file.unlink()
    os.mkfifo(file)


DAMAGES = {
    "no index": lambda folder: (folder / "checkpoint.json").unlink(),
    "half an index": lambda folder: os.truncate(folder / "checkpoint.json", 200),
    "no file": lambda folder: next(folder.glob("*stage-0001*")).unlink(),
    "cut off": cut_off,
    "a bit": turn_a_bit,
    "a pipe": replace_by_pipe,
    "empty": lambda folder: [file.unlink() for file in folder.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_with_a_message_and_the_one_before_is_taken(
    tmp_path, damage
):
    """Whatever an interrupted copy, a full disk or a bad one has left of it. It is set aside."""
    saved_steps(tmp_path, [2, 4])
    DAMAGES[damage](step_folder(tmp_path, 4))
    said: list[str] = []
    pipe = pipeline("mlp", 3)
    assert ps.Checkpoints(tmp_path, say=said.append).resume(pipe) == pipe.step == 2
    assert differences(pipe.state_dict(), trained(2, "mlp").state_dict()) == []
    (line,) = said
    assert line.startswith(f"skipping the checkpoint {step_folder(tmp_path, 4)}: ")
    assert steps_in(tmp_path) == ["damaged-step-000004", "step-000002"]


def test_without_a_whole_checkpoint_resuming_is_refused_and_without_any_it_begins(tmp_path):
    """The first is a loss that the user must know of."""
    assert ps.Checkpoints(tmp_path / "none").resume(pipeline("mlp")) is None
    saved_steps(tmp_path, [2])
    cut_off(step_folder(tmp_path, 2))
    with pytest.raises(
        FileError, match=r"has no whole checkpoint: .*has .* bytes, and was written"
    ):
        ps.Checkpoints(tmp_path, say=lambda text: None).resume(pipeline("mlp"))


def test_a_checkpoint_of_another_model_is_not_skipped(tmp_path):
    """It is no damage: an older one is of another model too."""
    saved_steps(tmp_path, [2])
    with pytest.raises(FileError, match="is a checkpoint of another model"):
        ps.Checkpoints(tmp_path).resume(pipeline("vgg"))


def test_the_newest_and_the_best_stay(tmp_path):
    """`keep` counts whole ones; names are compared as numbers, not as texts."""
    saved_steps(tmp_path, [1, 2, 3, 4, 5], keep=2, scores=[3.0, 1.0, 2.0, float("nan"), 5.0])
    assert steps_in(tmp_path) == ["step-000002", "step-000004", "step-000005"]
    folders = step_folders(tmp_path)
    assert (best_whole(folders).step, newest_whole(folders).step) == (2, 5)
    cut_off(step_folder(tmp_path, 5))
    (tmp_path / ".step-000006.partial").mkdir()
    (tmp_path / "step-notes").write_text("of the user")
    prune(tmp_path, 1)
    assert steps_in(tmp_path) == ["step-000002", "step-000004", "step-000005", "step-notes"]
    shutil.copytree(step_folder(tmp_path, 4), step_folder(tmp_path, 1_000_000))
    assert step_folders(tmp_path)[0].name == "step-1000000"
    set_aside(tmp_path, 5)
    assert [saved.step for saved in whole_checkpoints(step_folders(tmp_path))] == [4, 2]


def test_a_full_disk_leaves_the_older_checkpoints_whole_and_nothing_else(tmp_path, monkeypatch):
    """The second stage's file does not fit any more."""
    pipe = saved_steps(tmp_path, [2], keep=1)
    pipe.train_batch(*batch("mlp", 2))

    def full(tensors, path, metadata):
        if "stage-0001" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, path, metadata)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files, "save_file", full)
        with pytest.raises(FileError, match=r"cannot write the checkpoint .*: No space left"):
            ps.Checkpoints(tmp_path, keep=1).save(pipe, wait=True)
    assert steps_in(tmp_path) == ["step-000002"]
    assert ps.Checkpoints(tmp_path).resume(pipeline("mlp")) == 2
    ps.Checkpoints(tmp_path, keep=1).save(pipe, wait=True)
    assert steps_in(tmp_path) == ["step-000003"]


def test_an_older_checkpoint_goes_only_when_the_newer_one_is_on_the_disk(tmp_path, monkeypatch):
    """Files, index and names are synchronised before the folder gets its name, and the folder that
    has it before anything is removed.
    """
    happened = []
    pipe = saved_steps(tmp_path, [2], keep=1)
    pipe.train_batch(*batch("mlp", 2))
    sync = series.sync_folder
    remove = series._remove

    def sync_folder(path):
        happened.append(("sync", steps_in(path)))
        sync(path)

    def remove_folder(folder):
        happened.append(("remove", folder.name))
        remove(folder)

    monkeypatch.setattr(series, "sync_folder", sync_folder)
    monkeypatch.setattr(series, "_remove", remove_folder)
    ps.Checkpoints(tmp_path, keep=1).save(pipe, wait=True)
    assert happened == [
        ("remove", "step-000003"),  # a folder of the same step, if there is one
        ("sync", ["step-000002", "step-000003"]),
        ("remove", "step-000002"),
    ]


def test_every_interruption_of_a_save_leaves_a_whole_checkpoint(tmp_path, monkeypatch):
    """The process ends at any call that changes the disk: the run goes on from step 2 or step 3."""

    class Interrupted(BaseException):
        """Stands for a kill: nothing catches it."""

    pipe = saved_steps(tmp_path / "first", [2], keep=1)
    pipe.train_batch(*batch("mlp", 2))
    expected = {2: trained(2, "mlp").state_dict(), 3: pipe.state_dict()}
    resumed = []
    for moment in range(40):
        root = tmp_path / f"moment-{moment}"
        shutil.copytree(tmp_path / "first", root)
        calls = iter(range(1000))

        def interrupt(real, calls=calls, moment=moment):
            def call(*args, **options):
                if next(calls) >= moment:
                    raise Interrupted
                return real(*args, **options)

            return call

        with monkeypatch.context() as patch:
            for name in ("rename", "replace", "fsync", "unlink", "rmdir"):
                patch.setattr(os, name, interrupt(getattr(os, name)))
            try:
                ps.Checkpoints(root, keep=1).save(pipe, wait=True)
                done = True
            except Interrupted:
                done = False
        other = pipeline("mlp", 1)
        step = ps.Checkpoints(root, say=lambda text: None).resume(other)
        assert differences(other.state_dict(), expected[step]) == []
        resumed.append(step)
        if done:
            break
    assert done, "more moments than expected"
    assert resumed == sorted(resumed)
    assert {2, 3} == set(resumed)


def test_an_average_of_the_weights_goes_on(tmp_path):
    """Under another cut; and one that was not loaded is not begun anew in silence."""

    def with_average(lengths):
        pipe = pipeline("mlp", lengths)
        return pipe, pipe.ema(decay=0.5)

    pipe, average = with_average(2)
    for number in range(3):
        pipe.train_batch(*batch("mlp", number))
        average.update()
    pipe.save(tmp_path)
    other, other_average = with_average(3)
    other.train_batch(*batch("mlp", 7))
    other_average.update()
    other.load(tmp_path)
    for run, run_average in ((pipe, average), (other, other_average)):
        run.train_batch(*batch("mlp", 3))
        run_average.update()
    assert other_average.n_averaged == 4
    expected, state = average.state_dict(), other_average.state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    without = pipeline("mlp")
    without.load(tmp_path)
    with pytest.raises(
        ps.PenstockError, match=r"has 1 running averages .* call ema\(\) before load"
    ):
        without.ema()
    without.load(tmp_path, skip="averages")
    assert without.ema().n_averaged == 0
    two, _ = with_average(2)
    two.ema()
    with pytest.raises(FileError, match="it has 1 running averages of the weights, and this pipe"):
        two.load(tmp_path)


def test_a_second_run_in_the_folder_of_a_series_is_refused(tmp_path):
    """Until the block of the first ends."""
    pipe = pipeline("mlp")
    with ps.Checkpoints(tmp_path / "series") as first, ps.Checkpoints(tmp_path / "series") as other:
        assert first.resume(pipe) is None
        with pytest.raises(FileError, match=r"another run .* writes into"):
            other.resume(pipe)
    with ps.Checkpoints(tmp_path / "series") as later:
        assert later.resume(pipe) is None
