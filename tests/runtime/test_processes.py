"""Ranks as processes: the same numbers as ranks in threads, to the bit, whatever is done with the pipeline.

Every launch takes some seconds, most of them torch's import, so each one makes many claims.
"""

from __future__ import annotations

import pytest
import torch
from tests.conformance.models import CASES
from tests.conformance.random_programs import random_schedule
from tests.conformance.reference import differences
from tests.runtime.jobs import everything, nested, sgd

import penstock as ps
from penstock.errors import PlanError, RunError
from penstock.runtime.launch import RankFailed, launch


def check_equal(by_rank, expected):
    """What every rank found equals what one process with threads found."""
    for rank, found in enumerate(by_rank):
        for key in ("losses", "streamed", "forward", "evaluated", "loss before loading", "loss after loading"):
            if key in expected:
                ours, theirs = (torch.stack(v) if isinstance(v, list) else v for v in (found[key], expected[key]))
                assert torch.equal(ours, theirs), (rank, key)
        for key in ("timeline", "step"):
            assert found.get(key) == expected.get(key), (rank, key)
    first, *others = by_rank
    assert differences(first["state"], expected["state"]) == []
    assert list(first["state"]) == list(expected["state"])
    assert all(other["state"] == {} for other in others)
    if "compared" in expected:
        assert first["compared"] == (expected["compared"][0], pytest.approx(0, abs=1e-6))
        assert all(other["compared"] == ([], 0.0) for other in others)


def test_two_ranks_do_all_that_threads_do_and_checkpoints_pass_between_them(tmp_path):
    """Losses, outputs, weights, timelines, checkpoints: who carries the tensors makes no difference."""
    options = {"balance": [6, 9], "schedule": "1f1b", "micro_batches": 4, "recompute": "except_last", "optimizer": sgd}
    by_rank = launch(everything, 2, "vgg", options, tmp_path, "processes", threads=1)
    (tmp_path / "alone").mkdir()
    expected = everything("vgg", options, tmp_path / "alone", "threads")
    check_equal(by_rank, expected)
    assert torch.equal(expected["loss after loading"], expected["loss before loading"])
    pipe = ps.Pipeline(CASES["vgg"].make(), loss=CASES["vgg"].loss, optimizer=sgd, balance=[15], micro_batches=4, seed=4,
                       executor="threads")  # fmt: skip
    pipe.load(tmp_path / "ckpt")  # of the processes
    assert differences(pipe.state_dict(), expected["state"]) == []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        CASES["vgg"].make()
        x, y = CASES["vgg"].data(37)
    assert torch.equal(pipe.train_batch(x, y), expected["loss after loading"])


SCHEDULES = [str(random_schedule(seed, 4, 4, 3)) for seed in (5, 8)]


def four_ranks(tmp_path, executor):
    """Several pipelines one after another, and two side by side."""
    options = {"balance": [3, 2, 1, 3], "schedule": "gpipe", "micro_batches": 3}
    found = {"resnet": everything("resnet", options, tmp_path, executor)}
    found["gpt"] = everything("gpt", {"balance": [1, 2, 1, 1], "micro_batches": 4, "recompute": "always"}, None, executor)
    for number, programs in enumerate(SCHEDULES):
        found[f"nested {number}"] = nested(programs, [3, 1, 1, 2], executor)
    return found


def test_four_ranks_agree_under_any_schedule_with_nested_boundaries_and_several_pipelines(tmp_path):
    """Batch norm's buffers, integer tensors, None, frozen stages, split backwards, stages that share a rank, ranks without any."""
    by_rank = launch(four_ranks, 4, tmp_path, "processes", threads=1)
    (tmp_path / "alone").mkdir()
    expected = four_ranks(tmp_path / "alone", "threads")
    for key, value in expected.items():
        check_equal([found[key] for found in by_rank], value)


def test_another_number_of_ranks_than_the_schedule_has_is_refused_with_both_numbers():
    """Before anything runs, on every rank."""

    def job():
        everything("mlp", {"balance": [2, 2, 3]}, None, "processes")

    with pytest.raises(RankFailed, match="the schedule is for 3 ranks and there is 1: start 3 processes"):
        launch(job, 1)


def test_a_process_that_is_alone_is_told_how_to_start(monkeypatch):
    """The commonest first run: `python train.py`."""
    monkeypatch.delenv("RANK", raising=False)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    message = r"this process is alone: start it with torchrun --nproc-per-node N, or with ps\.launch\(fn, ranks=N\)"
    with pytest.raises(RunError, match=message):
        ps.Pipeline(model, loss=torch.nn.MSELoss(), balance=[1, 1])
    with pytest.raises(PlanError, match="the schedule has 3 stages, the balance"):
        ps.Pipeline(model, loss=torch.nn.MSELoss(), balance=[1, 1], schedule=ps.schedule("gpipe", 3, 1))
    ps.Pipeline(model, loss=torch.nn.MSELoss(), balance=[2])
