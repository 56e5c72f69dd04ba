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
from penstock.checkpoint.checkpoint_files import write_file
from penstock.checkpoint.checkpoint_index import Checkpoint, write_index
from penstock.checkpoint.series import (
    best_whole,
    newest_whole,
    partial_folder,
    prune,
    publication,
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


# -- folders without a pipeline ------------------------------------------------------------------


def write_step(root, step, score=None, *, folder=None, hosts=()):
    """Write a checkpoint of two files; return its folder."""
    folder = step_folder(root, step) if folder is None else folder
    names = [f"step-{step:08d}-stage-{stage:04d}-{'ab' * 8}.safetensors" for stage in (0, 1)]
    identity = {"identity": "ab" * 16}
    sums = {name: write_file(folder / name, {"a": torch.zeros(1)}, identity) for name in names}
    index = Checkpoint(
        step,
        "f",
        tuple(names),
        identity="ab" * 16,
        sums=sums,
        score=score,
        hosts={name: "a" for name in names if hosts},
    )
    write_index(folder, index)
    return folder


def test_folders_of_steps_are_found_newest_first(tmp_path):
    """By number; other names, files and short numbers are none. A missing root has none."""
    for name in ("step-000002", "step-1000000", "step-999999", "step-00003", "step-000004x"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000009").write_text("")
    folders = [step_folder(tmp_path, step) for step in (1_000_000, 999_999, 2)]
    assert step_folders(tmp_path) == folders
    assert [folder.name for folder in folders] == ["step-1000000", "step-999999", "step-000002"]
    assert step_folders(tmp_path / "nowhere") == []
    assert partial_folder(tmp_path, 7) == tmp_path / ".step-000007.partial"
    assert partial_folder(tmp_path, 7) not in step_folders(tmp_path)


def test_whole_ones_are_in_the_order_of_their_steps_and_others_are_told(tmp_path):
    """Whatever the names and the order of the folders."""
    folders = [
        write_step(tmp_path, step, folder=tmp_path / name)
        for step, name in ((3, "c"), (9, "a"), (5, "b"))
    ]
    said = []
    whole = whole_checkpoints([*folders, tmp_path / "none"], said.append)
    assert [(saved.step, saved.folder.name) for saved in whole] == [(9, "a"), (5, "b"), (3, "c")]
    assert len(said) == 1
    assert said[0].startswith(f"skipping the checkpoint {tmp_path / 'none'}: ")
    assert newest_whole(folders).step == 9
    assert newest_whole([]) is None
    assert newest_whole([tmp_path / "none"]) is None


def test_files_on_the_disks_of_other_hosts_may_be_missing_here(tmp_path):
    """They are fetched when they are loaded; those that are here must be whole."""
    folder = write_step(tmp_path, 3, hosts="a")
    assert [saved.step for saved in whole_checkpoints([folder])] == [3]
    next(folder.glob("*stage-0001*")).unlink()
    assert [saved.step for saved in whole_checkpoints([folder])] == [3]
    file = next(folder.glob("*stage-0000*"))
    file.write_bytes(file.read_bytes()[:-1])
    assert whole_checkpoints([folder]) == []
    shared = write_step(tmp_path, 4)
    next(shared.glob("*stage-0001*")).unlink()
    assert whole_checkpoints([shared]) == []


def test_the_best_score_is_the_lowest_and_of_equal_ones_the_newest(tmp_path):
    """Unknown scores do not count."""
    scores = {1: None, 2: 0.5, 3: -1.0, 4: 7.0, 5: -1.0, 6: None}
    folders = [write_step(tmp_path, step, score) for step, score in scores.items()]
    assert best_whole(folders).step == 5
    assert best_whole(folders[:4]).step == 3
    assert best_whole([folders[0], folders[5]]) is None
    assert best_whole([]) is None
    assert [saved.score for saved in whole_checkpoints(folders[:2])] == [0.5, float("inf")]


def test_a_complete_checkpoint_gets_its_name_after_the_logs_are_on_the_disk(tmp_path, monkeypatch):
    """One of the same step, which was not whole, gives way. A log need not exist."""
    root = tmp_path / "series"
    write_step(root, 3, folder=partial_folder(root, 3))
    (step_folder(root, 3) / "old").mkdir(parents=True)
    log = tmp_path / "metrics.jsonl"
    log.write_text("")
    happened = []
    for name in ("sync_file", "sync_folder"):
        monkeypatch.setattr(
            series, name, lambda path: happened.append((path, steps_in(root) == ["step-000003"]))
        )
    result = publication(root, 3, 1, [tmp_path / "none", log])
    assert result.folder == root
    result.publish()
    assert happened == [(log, False), (root, True)]
    assert newest_whole(step_folders(root)).step == 3
    with pytest.raises(FileError, match=r"cannot write the checkpoint .*step-000003: No such file"):
        result.publish()


def test_after_a_failure_the_folder_of_the_save_is_removed_and_after_a_success_older_ones(tmp_path):
    """As many whole ones stay as were asked for."""
    for step in (1, 2, 3):
        write_step(tmp_path, step)
    write_step(tmp_path, 4, folder=partial_folder(tmp_path, 4))
    publication(tmp_path, 4, 2).discard()
    assert steps_in(tmp_path) == ["step-000001", "step-000002", "step-000003"]
    publication(tmp_path, 4, 2).discard()
    publication(tmp_path, 3, 2).clean(None)
    assert steps_in(tmp_path) == ["step-000002", "step-000003"]


@pytest.mark.parametrize(
    ("keep", "steps"), [(1, [2, 5, 6, 7]), (2, [2, 3, 4, 5, 6, 7]), (9, [1, 2, 3, 4, 5, 6, 7])]
)
def test_damaged_ones_do_not_count_and_stay_while_they_are_newer(tmp_path, keep, steps):
    """Steps 4, 6 and 7 are not whole; step 2 is the best one."""
    for step in range(1, 8):
        write_step(tmp_path, step, {1: 4.0, 2: 1.0, 5: 2.0}.get(step))
    for step in (4, 6, 7):
        cut_off(step_folder(tmp_path, step))
    partial_folder(tmp_path, 8).mkdir()
    prune(tmp_path, keep)
    assert [int(name.removeprefix("step-")) for name in steps_in(tmp_path)] == steps
    prune(tmp_path / "nowhere", keep)


def test_where_no_checkpoint_is_whole_none_is_removed(tmp_path):
    """The user may still restore a file of one."""
    for step in (1, 2):
        cut_off(write_step(tmp_path, step))
    prune(tmp_path, 1)
    assert steps_in(tmp_path) == ["step-000001", "step-000002"]


def test_later_steps_are_set_aside_and_the_one_that_is_continued_from_is_not(tmp_path):
    """Those that an earlier run has set aside give way."""
    for step in (2, 4, 6):
        write_step(tmp_path, step)
    (tmp_path / "damaged-step-000006" / "old").mkdir(parents=True)
    set_aside(tmp_path, 4)
    assert steps_in(tmp_path) == ["damaged-step-000006", "step-000002", "step-000004"]
    assert (tmp_path / "damaged-step-000006" / "checkpoint.json").exists()
    set_aside(tmp_path, 1)
    assert len(list(tmp_path.glob("damaged-*"))) == 3


def test_of_a_checkpoint_that_is_removed_the_index_goes_first(tmp_path, monkeypatch):
    """A removal that is interrupted leaves nothing that could be taken for a whole checkpoint."""
    for step in (1, 2, 3):
        write_step(tmp_path, step)

    def interrupted(folder, **_):
        assert not (folder / "checkpoint.json").exists()

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    prune(tmp_path, 1)
    left = [folder for folder in step_folders(tmp_path) if any(folder.glob("step-*"))]
    assert len(left) == 3
    assert [saved.step for saved in whole_checkpoints(left)] == [3]
