"""Ranks as processes: the same numbers as ranks in threads, to the bit, whatever is done with the
pipeline.

Every launch takes some seconds, most of them torch's import, so each one makes many claims.
"""

from __future__ import annotations

import pytest
import torch
from tests.conformance.models import CASES
from tests.conformance.random_programs import random_schedule
from tests.conformance.reference import differences
from tests.conformance.slice_programs import seq1f1b
from tests.runtime.jobs import everything, nested, sgd

import penstock as ps
from penstock.errors import PlanError, RunError
from penstock.ranks.processes.launch import RankFailed, launch
from penstock.schedule.op import Schedule
from penstock.schedule.slicing import Slicing


def check_equal(by_rank, expected):
    """What every rank found equals what one process with threads found."""
    for rank, result in enumerate(by_rank):
        for key in (
            "losses",
            "streamed",
            "forward",
            "evaluated",
            "loss before loading",
            "loss after loading",
        ):
            if key in expected:
                ours, theirs = (
                    torch.stack(v) if isinstance(v, list) else v
                    for v in (result[key], expected[key])
                )
                assert torch.equal(ours, theirs), (rank, key)
        for key in ("timeline", "step"):
            assert result.get(key) == expected.get(key), (rank, key)
    first, *others = by_rank
    assert differences(first["state"], expected["state"]) == []
    assert list(first["state"]) == list(expected["state"])
    assert all(other["state"] == {} for other in others)
    if "compared" in expected:
        assert first["compared"] == (expected["compared"][0], pytest.approx(0, abs=1e-6))
        assert all(other["compared"] == ([], 0.0) for other in others)


def test_two_ranks_do_all_that_threads_do_and_checkpoints_pass_between_them(tmp_path):
    """Losses, outputs, weights, timelines, checkpoints: who carries the tensors makes no
    difference.
    """
    options = {
        "balance": [6, 9],
        "schedule": "1f1b",
        "micro_batches": 4,
        "recompute": "except_last",
        "optimizer": sgd,
    }
    by_rank = launch(everything, 2, "vgg", options, tmp_path, "processes", threads=1)
    (tmp_path / "alone").mkdir()
    expected = everything("vgg", options, tmp_path / "alone", "threads")
    check_equal(by_rank, expected)
    assert torch.equal(expected["loss after loading"], expected["loss before loading"])
    pipe = ps.Pipeline(
        CASES["vgg"].make(),
        loss=CASES["vgg"].loss,
        optimizer=sgd,
        balance=[15],
        micro_batches=4,
        seed=4,
        executor="threads",
    )
    pipe.load(tmp_path / "ckpt")  # of the processes
    assert differences(pipe.state_dict(), expected["state"]) == []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        CASES["vgg"].make()
        x, y = CASES["vgg"].data(37)
    assert torch.equal(pipe.train_batch(x, y), expected["loss after loading"])


#: Four copies of two stages: two pipelines in opposite directions, twice.
COPIES = """rank 0 | 0F0 1F1 1B1 0F2 1F3 1B3 0B0 0B2 0U1 1U1
rank 1 | 0F1 1F0 1B0 0F3 1F2 1B2 0B1 0B3 0U1 1U1
rank 2 | 0F4 1F5 1B5 0F6 1F7 1B7 0B4 0B6 0U1 1U1
rank 3 | 0F5 1F4 1B4 0F7 1F6 1B6 0B5 0B7 0U1 1U1"""
#: Stage 0 hands micro-batches 2 and 3 to the rank of stage 3, stage 1 micro-batch 1 to that of
#: stage 2.
EVICT = """rank 0 | 0F0 0F1 0F2 0E2 0F3 0E3 0B0 0B1 0L2 0B2 0L3 0B3 0U1
rank 1 | 1F0 1F1 1E1 1F2 1F3 1B0 1L1 1B1 1B2 1B3 1U1
rank 2 | 2F0 1E1 2F1 2B0 1L1 2F2 2B1 2F3 2B2 2B3 2U1
rank 3 | 3F0 3B0 0E2 0E3 3F1 3B1 0L2 3F2 0L3 3B2 3F3 3B3 3U1"""
SCHEDULES = [str(random_schedule(seed, 4, 4, 3)) for seed in (5, 8)]


def four_ranks(tmp_path, executor):
    """Several pipelines one after another, and two side by side."""
    options = {"balance": [3, 2, 1, 3], "schedule": "gpipe", "micro_batches": 3}
    results = {"resnet": everything("resnet", options, tmp_path, executor)}
    results["gpt"] = everything(
        "gpt", {"balance": [1, 2, 1, 1], "micro_batches": 4, "recompute": "always"}, None, executor
    )
    results["copies"] = everything(
        "vgg", {"balance": [7, 8], "schedule": Schedule.parse(COPIES)}, tmp_path, executor
    )
    results["evict"] = everything(
        "gpt", {"balance": [1, 2, 1, 1], "schedule": Schedule.parse(EVICT)}, None, executor
    )
    sliced = seq1f1b(4, Slicing("tokens", ((0.5, 0.5), (0.25, 0.75), (0.5, 0.5))))
    results["slices"] = everything(
        "gpt",
        {"balance": [1, 2, 1, 1], "schedule": sliced, "recompute": "except_last"},
        None,
        executor,
    )
    for number, programs in enumerate(SCHEDULES):
        results[f"nested {number}"] = nested(programs, [3, 1, 1, 2], executor)
    return results


def test_four_ranks_agree_under_any_schedule_with_nested_boundaries_and_several_pipelines(tmp_path):
    """Batch norm's buffers, integer tensors, None, frozen stages, split backwards, stages that
    share a rank, ranks without any, stages on four ranks, activations that are handed to another
    rank, slices of sequences.
    """
    by_rank = launch(four_ranks, 4, tmp_path, "processes", threads=1)
    (tmp_path / "alone").mkdir()
    expected = four_ranks(tmp_path / "alone", "threads")
    for key, value in expected.items():
        check_equal([results[key] for results in by_rank], value)


def test_another_number_of_ranks_than_the_schedule_has_is_refused_with_both_numbers():
    """Before anything runs, on every rank."""

    def job():
        everything("mlp", {"balance": [2, 2, 3]}, None, "processes")

    with pytest.raises(
        RankFailed, match="the schedule is for 3 ranks and there is 1: start 3 processes"
    ):
        launch(job, 1)


def test_a_process_that_is_alone_is_told_how_to_start(monkeypatch):
    """The commonest first run: `python train.py`."""
    monkeypatch.delenv("RANK", raising=False)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    message = r"this process is alone: start it with torchrun --nproc-per-node N, or with ps\.launch\(fn, ranks=N\)"
    with pytest.raises(RunError, match=message):
        ps.Pipeline(model, loss=torch.nn.MSELoss(), balance=[1, 1])
    with pytest.raises(PlanError, match="the schedule has 3 stages, the balance"):
        ps.Pipeline(
            model, loss=torch.nn.MSELoss(), balance=[1, 1], schedule=ps.schedule("gpipe", 3, 1)
        )
    ps.Pipeline(model, loss=torch.nn.MSELoss(), balance=[2])
