"""Checkpoints of `penstock train`: a run that was ended at any step goes on to the same numbers, and
its metrics have every step once.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.training.run_metrics import lines_of

import penstock as ps
from penstock.checkpoint.checkpoint_index import read_index
from penstock.checkpoint.folder_lock import FolderLock
from penstock.checkpoint.series import step_folders
from penstock.errors import FileError, SettingError
from penstock.training import rank
from penstock.training.config import TrainConfig
from penstock.training.metrics import Metrics
from penstock.training.run_checkpoints import (
    newest_checkpoint,
    request_ranks,
    run_checkpoints,
    take_request,
)
from penstock.training.sources.user_settings import load_settings

CPU = torch.device("cpu")


class Killed(Exception):
    """Stands for the end of the process, at which nothing is written any more."""


def settings(folder, **changes):
    """Return the configuration of a small run."""
    words = {
        "model": "mlp",
        "image": 8,
        "channels": 1,
        "batch": 256,
        "epochs": 4,
        "checkpoint_every": 4,
        "self_check": False,
        "out": str(folder),
        **changes,
    }
    return TrainConfig(**words)


@cache
def profile_of_model():
    """Return a profile of the model, without a measurement."""
    model = rank.make_task(settings("x")).model
    return ps.analytic(model, torch.zeros(4, 64), device="V100", batch=256)


def plan_of(schedule, lengths, micro_batches=4):
    """Return a plan of a schedule, without a measurement."""
    return ps.plan(
        profile_of_model(),
        ps.cluster(f"local:{len(lengths)}"),
        256,
        schedules=[schedule],
        partition=lengths,
        stages=len(lengths),
        micro_batches=micro_batches,
        asynchronous=schedule == "pipedream",
        recompute="never",
    )


def at_step(monkeypatch, step, action):
    """Call `action` before the line of a step is written."""

    class Watched(Metrics):
        def write(self, number, **values):
            if number == step and "loss" in values:
                action()
            super().write(number, **values)

    monkeypatch.setattr(rank, "Metrics", Watched)


def train(config, plan):
    """Train in threads of this process."""
    folder = Path(config.out)
    folder.mkdir(exist_ok=True)
    return rank.train_on(config, plan, folder, True, CPU, "threads")


def raise_killed():
    """End the run as a kill does."""
    raise Killed


@pytest.mark.parametrize(
    ("schedule", "changes"),
    [
        ("1f1b", {"accumulate": 2, "optimizer": "adam"}),
        ("gpipe", {"autocast": "float16", "clip_grad_norm": 1.0}),
        ("pipedream", {}),
    ],
)
def test_a_killed_run_goes_on_to_the_bit_under_another_cut(
    tmp_path, monkeypatch, schedule, changes
):
    """Six steps are an epoch: it is killed in the middle of the second, and in the third. The place
    in the data, the state of optimizer, scaler and weight rule, and random numbers go on.
    """
    lengths = [7, 8]
    micro_batches = 1 if schedule == "pipedream" else 4
    plan = plan_of(schedule, lengths, micro_batches)
    whole = tmp_path / "whole"
    train(settings(whole, **changes), plan)
    for killed_at in (10, 15):
        part = tmp_path / f"killed at {killed_at}"
        with monkeypatch.context() as patch:
            at_step(patch, killed_at, raise_killed)
            with pytest.raises(Killed):
                train(settings(part, **changes), plan)
        at = newest_checkpoint(part).step
        assert 4 <= at < killed_at, "the newest may not have been complete yet"
        other = plan if schedule == "pipedream" else plan_of(schedule, [3, 5, 7], micro_batches)
        result = train(settings(part, resume=True, **changes), other)
        assert (result.steps, result.stopped) == (24, False), killed_at
        assert lines_of(part) == lines_of(whole), killed_at
        assert [step for step, _ in lines_of(part)[0]] == list(range(1, 25))
        first, second = (load_file(folder / "weights.safetensors") for folder in (whole, part))
        assert all(torch.equal(first[name], second[name]) for name in first), killed_at


def test_the_newest_and_the_best_checkpoints_stay(tmp_path):
    """The best one has the lowest loss on the test set; at a learning rate that diverges slowly it
    is not the newest.
    """
    config = settings(tmp_path, keep=2, checkpoint_every=None, epochs=5, lr=0.05)
    train(config, plan_of("1f1b", [7, 8]))
    scores = dict(lines_of(tmp_path)[1])
    steps = [read_index(folder).step for folder in step_folders(tmp_path / "checkpoints")]
    best = min(scores, key=scores.get)
    assert steps == sorted({30, 24, best}, reverse=True)
    assert read_index(tmp_path / "checkpoints" / "step-000030").score == scores[30]


def test_sigterm_ends_after_a_step_with_a_checkpoint_and_sigusr1_saves_and_goes_on(
    tmp_path, monkeypatch
):
    """A scheduler sends the one before it takes the machine away, and the other to be safe."""
    plan = plan_of("1f1b", [7, 8])
    config = settings(tmp_path, checkpoint_every=None, epochs=2000)
    monkeypatch.setattr("penstock.runtime.state.checkpoints._AGREE_EVERY_S", 1e-9)
    with monkeypatch.context() as patch:
        at_step(patch, 8, lambda: os.kill(os.getpid(), signal.SIGTERM))
        result = train(config, plan)
    assert (result.steps, result.stopped) == (8, True)
    assert newest_checkpoint(tmp_path).step == 8
    assert not (tmp_path / "weights.safetensors").exists()
    with monkeypatch.context() as patch:
        at_step(patch, 15, lambda: os.kill(os.getpid(), signal.SIGUSR1))
        config = replace(config, checkpoint="end", resume=True, limit_steps=17)
        result = train(config, plan)
    assert (result.steps, result.stopped) == (17, False)
    steps = [read_index(folder).step for folder in step_folders(tmp_path / "checkpoints")]
    assert steps == [17, 15, 8]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_request_for_another_number_of_ranks_ends_the_attempt(tmp_path, monkeypatch):
    """The launcher then plans anew; see `penstock resize`."""
    monkeypatch.setattr("penstock.runtime.state.checkpoints._AGREE_EVERY_S", 1e-9)
    (tmp_path / "config.yaml").write_text("")
    at_step(monkeypatch, 3, lambda: request_ranks(tmp_path, 3))
    with FolderLock(tmp_path):
        result = train(settings(tmp_path), plan_of("1f1b", [7, 8]))
    assert (result.steps, result.stopped) == (3, True)
    assert take_request(tmp_path) == 3
    assert take_request(tmp_path) is None
    (tmp_path / "resize.json").write_text('{"ranks": "three"}')
    with pytest.raises(FileError, match=r"resize\.json.*ranks"):
        take_request(tmp_path)
    assert not (tmp_path / "resize.json").exists()
    with pytest.raises(FileError, match=r"holds no run: its config\.yaml is not there"):
        request_ranks(tmp_path / "nowhere", 2)
    pipes = tmp_path / "pipes"
    pipes.mkdir()
    os.mkfifo(pipes / "config.yaml")
    with pytest.raises(FileError, match=r"holds no run: its config\.yaml is no regular file"):
        request_ranks(pipes, 2)
    assert not (pipes / "resize.json").exists()


def test_a_checkpoint_of_version_0_1_is_continued_from(tmp_path):
    """It is one folder, `checkpoint`, that every save replaced."""
    plan = plan_of("1f1b", [7, 8])
    train(settings(tmp_path, limit_steps=5, checkpoint_every=None), plan)
    (tmp_path / "checkpoints" / "step-000005").rename(tmp_path / "checkpoint")
    assert newest_checkpoint(tmp_path).folder == tmp_path / "checkpoint"
    result = train(settings(tmp_path, limit_steps=9, resume=True), plan)
    assert result.steps == 9
    assert newest_checkpoint(tmp_path).step == 9


def test_a_run_starts_from_given_weights(tmp_path):
    """Such as those of another run, or of a model that was trained elsewhere."""
    plan = plan_of("1f1b", [7, 8])
    train(settings(tmp_path / "first", epochs=1, checkpoint_every=None), plan)
    weights = tmp_path / "first" / "weights.safetensors"
    words = {"initial_weights": str(weights), "lr": 1e-30, "limit_steps": 1}
    train(settings(tmp_path / "second", checkpoint_every=None, **words), plan)
    first = load_file(weights)
    second = load_file(tmp_path / "second" / "weights.safetensors")
    trained = [name for name in first if name.endswith(("weight", "bias"))]
    assert len(trained) > 10
    assert all(torch.allclose(first[name], second[name], 0.0, 1e-20) for name in trained)


def test_never_writes_none_and_contradictions_are_refused(tmp_path):
    """Also at signals, which then do what they do to any process."""
    train(
        settings(tmp_path, checkpoint="never", checkpoint_every=None, epochs=1),
        plan_of("1f1b", [7, 8]),
    )
    assert not (tmp_path / "checkpoints").exists()
    with pytest.raises(FileError, match=r"holds no checkpoint to continue from: there is none in"):
        newest_checkpoint(tmp_path)
    with pytest.raises(SettingError, match="checkpoint is never, and checkpoint_every asks"):
        settings(tmp_path, checkpoint="never")
    with pytest.raises(SettingError, match="'fast' is no interval between checkpoints"):
        load_settings(None, {"checkpoint_every": "fast"})
    with pytest.raises(SettingError, match="keep is 0; it must be 1 or more"):
        load_settings(None, {"keep": 0})
    assert load_settings(None, {"checkpoint_every": 50}).checkpoint_every == 50
    assert run_checkpoints(settings(tmp_path), tmp_path).folder == tmp_path / "checkpoints"
