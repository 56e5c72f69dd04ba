"""Where a series of checkpoints resumes: with stand-ins for the pipeline, the ranks and the files."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tests.runtime.state.test_checkpoint_decisions import Pipe, run, save_steps

from penstock.errors import CheckpointDamaged, FileError
from penstock.runtime.state import checkpoints as module
from penstock.runtime.state.checkpoints import Checkpoints, SeriesContext


@pytest.fixture
def series(monkeypatch, tmp_path):
    """Let checkpoints be there by name: `folders` of the series, whole if they are in `whole`."""
    files = SimpleNamespace(folders=[], lines=[], queries=[], aside=[])

    def whole_checkpoints(candidates, say):
        files.queries.append([folder.name for folder in candidates])
        for line in files.lines:
            say(line)
        return [SimpleNamespace(step=int(folder.name[-1]), folder=folder) for folder in candidates]

    monkeypatch.setattr(module, "whole_checkpoints", whole_checkpoints)
    monkeypatch.setattr(
        module, "step_folders", lambda root: [root / name for name in files.folders]
    )
    monkeypatch.setattr(module, "set_aside", lambda root, step: files.aside.append((root, step)))
    return files


@pytest.mark.parametrize(("first", "resumed"), [(4, False), (8, False), (8, True)])
def test_a_multiple_between_two_calls_is_due_at_the_second(series, tmp_path, first, resumed):
    """A program may call `step` after several batches; at its first call only the last one is new."""
    pipe = Pipe()
    checkpoints = Checkpoints(tmp_path, every=5)
    pipe.step = first
    if resumed:
        series.folders = [f"step-{first}"]
        checkpoints.resume(pipe)
        pipe.step += 2
        checkpoints.step(pipe)
    else:
        run(checkpoints, pipe, 1)
    for _ in range(3):
        pipe.step += 3
        checkpoints.step(pipe)
    assert save_steps(pipe) == {4: [5, 11], 8: [10, 16] if resumed else [12, 15]}[first]


def test_the_newest_whole_checkpoint_is_loaded(series, tmp_path, monkeypatch):
    """Steps that follow it count from there, and later ones are set aside. The message on a lost
    rank has its step.
    """
    watch = SimpleNamespace(checkpoint_step=None)
    monkeypatch.setattr(module, "heartbeats", lambda: watch)
    series.folders = ["step-2", "step-8", "step-5"]
    messages = []
    checkpoints = Checkpoints(tmp_path, every=4, say=messages.append)
    pipe = Pipe()
    assert checkpoints.resume(pipe) == 8
    assert pipe.attempts == ["step-8"]
    assert (checkpoints.saved_step, watch.checkpoint_step, messages) == (8, 8, [])
    assert series.aside == [(tmp_path, 8)]
    assert run(checkpoints, pipe, 4) == []
    assert save_steps(pipe) == [12]
    checkpoints.finish(pipe)
    assert save_steps(pipe) == [12]


def test_damaged_checkpoints_are_skipped_with_a_message_of_rank_0(series, tmp_path):
    """The next older one is taken."""
    series.folders = ["step-2", "step-8", "step-5"]
    for ranks in ((0, 1), (1, 2)):
        series.aside.clear()
        messages = []
        checkpoints = Checkpoints(tmp_path, say=messages.append)
        pipe = Pipe(ranks=ranks)
        pipe.damaged = {"step-8", "step-5"}
        assert checkpoints.resume(pipe) == 2
        assert pipe.attempts == ["step-8", "step-5", "step-2"]
        is_first = 0 in ranks
        assert messages == [
            f"skipping the checkpoint {tmp_path / name}: {name} is damaged"
            for name in ("step-8", "step-5")
            if is_first
        ]
        assert series.aside == [(tmp_path, 2)] * is_first


def test_a_series_without_any_whole_checkpoint_is_no_new_run(series, tmp_path):
    """It would overwrite what may be repaired; an empty folder begins one."""
    pipe = Pipe()
    assert Checkpoints(tmp_path).resume(pipe) is None
    series.folders = ["step-2"]
    pipe.damaged = {"step-2"}
    with pytest.raises(CheckpointDamaged, match=r"has no whole checkpoint: step-2 is damaged"):
        Checkpoints(tmp_path, say=lambda line: None).resume(pipe)
    series.folders, series.lines = [], ["step-9 has no index"]
    messages = []
    with pytest.raises(CheckpointDamaged, match=r"has no whole checkpoint: step-9 has no index"):
        Checkpoints(tmp_path, say=messages.append).resume(pipe)
    assert messages == ["step-9 has no index"]
    assert series.aside == []


def test_single_checkpoints_and_memory_are_candidates_if_they_are_there(series, tmp_path):
    """Of one step the first by name is tried, so that all ranks try one order."""
    for name in ("earlier-3", "memory-6"):
        (tmp_path / name).mkdir()
    series.folders = ["step-3", "step-1"]
    context = SeriesContext(
        earlier=[tmp_path / "earlier-3", tmp_path / "gone-9"], memory=tmp_path / "memory-6"
    )
    checkpoints = Checkpoints(tmp_path, context=context)
    pipe = Pipe()
    assert checkpoints.memory == tmp_path / "memory-6"
    assert checkpoints.resume(pipe) == 6
    assert series.queries == [["step-3", "step-1", "earlier-3", "memory-6"]]
    # What is in memory does not count as saved.
    assert checkpoints.saved_step == 3
    checkpoints.finish(pipe)
    assert save_steps(pipe) == [6]
    pipe.damaged = {"memory-6", "earlier-3"}
    pipe.attempts.clear()
    checkpoints = Checkpoints(tmp_path, context=context, say=lambda line: None)
    assert checkpoints.resume(pipe) == 3
    assert pipe.attempts == ["memory-6", "earlier-3", "step-3"]
    alone = Checkpoints(tmp_path, context=SeriesContext(memory=tmp_path / "memory-6"))
    series.folders, pipe.damaged = [], set()
    assert alone.resume(pipe) == 6
    assert alone.saved_step is None
    alone.finish(pipe)
    assert save_steps(pipe) == [6, 6]


def test_ranks_try_the_checkpoints_that_any_of_them_sees(series, tmp_path, monkeypatch):
    """Hosts have disks of their own; an error of one rank stops all."""
    series.folders = ["step-2"]
    rows = [SimpleNamespace(value=[[7, str(tmp_path / "step-7")], [2, str(tmp_path / "step-2")]])]
    checked = []
    monkeypatch.setattr(module, "exchange", lambda world, local: [*local.values(), *rows])
    monkeypatch.setattr(
        module, "check_reports", lambda rows, text: checked.append((len(rows), text))
    )
    messages = []
    pipe = Pipe([(0, 0, 1)], ranks=(1,))
    series.lines = ["a line"]
    assert Checkpoints(tmp_path, say=messages.append).resume(pipe) == 7
    assert checked == [(2, "nothing was loaded on any rank")]
    assert messages == [], "only rank 0 speaks"
    pipe.damaged = {"step-7"}
    pipe.attempts.clear()
    assert Checkpoints(tmp_path).resume(pipe) == 2
    assert pipe.attempts == ["step-7", "step-2"]


def test_the_folder_is_locked_from_resuming_to_the_end_of_the_block(tmp_path):
    """By rank 0, also if the run fails; a series without a block locks nothing."""
    folder = tmp_path / "runs" / "a"
    Checkpoints(folder).resume(Pipe())
    assert not folder.exists()
    with Checkpoints(folder) as first:
        first.resume(Pipe())
        first.resume(Pipe())
        with Checkpoints(folder) as second, pytest.raises(FileError, match="another run"):
            second.resume(Pipe())
        with Checkpoints(folder) as other_rank:
            other_rank.resume(Pipe(ranks=(1,)))
    third = Checkpoints(folder).__enter__()
    third.resume(Pipe())
    third.__exit__(ValueError, ValueError("planted"), None)
    with Checkpoints(folder) as fourth:
        fourth.resume(Pipe())
    fourth.resume(Pipe())
    with Checkpoints(folder) as fifth:
        fifth.resume(Pipe())
    with fifth:
        fifth.resume(Pipe())
        with Checkpoints(folder) as sixth, pytest.raises(FileError, match="another run"):
            sixth.resume(Pipe())
