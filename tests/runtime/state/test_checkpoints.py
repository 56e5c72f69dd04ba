"""Which checkpoint counts as saved after a run has continued."""

from __future__ import annotations

import shutil

from tests.checkpoint.test_checkpoint import differences, pipeline, trained
from tests.checkpoint.test_series import saved_steps, turn_a_bit

import penstock as ps
from penstock.checkpoint.series import step_folder
from penstock.runtime.state.checkpoints import SeriesContext


def resume_from_memory(root, memory):
    """Continue from the newest checkpoint of the series or of memory; return both objects."""
    checkpoints = ps.Checkpoints(root, context=SeriesContext(memory=memory), say=lambda text: None)
    pipe = pipeline("mlp")
    assert checkpoints.resume(pipe) == 4
    return checkpoints, pipe


def test_a_damaged_checkpoint_of_the_step_in_memory_is_written_again(tmp_path):
    """It counted as saved, so that the next save of that step was left out without a word."""
    root, memory = tmp_path / "run", tmp_path / "with a later name"
    saved_steps(root, [2, 4])
    shutil.copytree(step_folder(root, 4), memory)
    turn_a_bit(step_folder(root, 4))
    checkpoints, pipe = resume_from_memory(root, memory)
    checkpoints.save(pipe, wait=True)
    other = pipeline("mlp", 3)
    assert ps.Checkpoints(root).resume(other) == 4
    assert differences(other.state_dict(), trained(4, "mlp").state_dict()) == []


def test_a_whole_checkpoint_of_the_step_in_memory_is_not_written_twice(tmp_path):
    """What is in memory alone does not count as saved."""
    root, memory = tmp_path / "run", tmp_path / "memory"
    saved_steps(root, [2, 4])
    shutil.copytree(step_folder(root, 4), memory)
    checkpoints, pipe = resume_from_memory(root, memory)
    file = next(step_folder(root, 4).glob("*stage-0001*"))
    before = file.stat().st_ino
    checkpoints.save(pipe, wait=True)
    assert file.stat().st_ino == before
    shutil.rmtree(step_folder(root, 4))
    checkpoints, pipe = resume_from_memory(root, memory)
    checkpoints.save(pipe, wait=True)
    assert step_folder(root, 4).exists()
