"""A run with copies of stages loses ranks, and goes on with what the others have in memory."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from tests.training.recovery.faults import FEATURES, Fault, make_fifos
from tests.training.run_metrics import lines_of

import penstock as ps
from penstock.plan.plan import Plan
from penstock.ranks.processes.launch import launch
from penstock.schedule.op import Kind
from penstock.simulate.plan_costs import simulate_plan
from penstock.training import job, rank
from penstock.training.config import TrainConfig
from penstock.training.devices import Devices
from penstock.training.recovery.live_recovery import Selection, select
from penstock.training.recovery.messages import Offer
from penstock.training.restarts import train_with_restarts
from penstock.training.task import make_task

BATCH = 16  # three of them are an epoch
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Give every rank one thread, whatever their number: sums of several have other roundings."""
    monkeypatch.setattr(job, "launch", partial(launch, threads=1))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def prepared(folder, ranks, schedule="chimera", **changes):
    """Return a run that is ready to train. Three steps are an epoch."""
    folder.mkdir()
    config = TrainConfig(
        model="tests.training.recovery.faults:model",
        data="tests.training.recovery.faults:data",
        batch=BATCH,
        epochs=4,
        optimizer="adam",
        lr=0.01,
        micro_batches=4,
        recompute="never",
        max_restarts=9,
        self_check=False,
        out=str(folder),
        **{"checkpoint": "never", **changes},
    )
    task = make_task(config)
    inputs = torch.zeros(4, FEATURES)
    profile = ps.analytic(task.model, inputs, device="V100", batch=BATCH)
    cluster = ps.cluster(f"local:{ranks}")
    plan = ps.plan(
        profile,
        cluster,
        BATCH,
        schedules=[schedule],
        stages=2 if schedule != "chimera" else ranks,
        micro_batches=4,
        recompute="never",
    )
    (folder / "config.yaml").write_text(config.as_yaml())
    plan.save(folder / "plan.json")
    predicted = simulate_plan(plan, profile, cluster)
    return job.Prepared(config, folder, profile, cluster, plan, predicted, Devices())


def train(monkeypatch, run, *faults):
    """Train with faults. Returns what was said."""
    said: list[str] = []
    signals = run.folder / "signals"
    signals.mkdir()
    monkeypatch.setattr(job, "train_rank", make_fifos(faults, signals, run.plan.ranks))
    train_with_restarts(run, said.append, quiet=True)
    return said


def with_checkpoint(run, steps):
    """Train the first steps of a run, which has a checkpoint then. Returns what is left of it."""
    config = replace(run.config, checkpoint="end", limit_steps=steps)
    rank.train_on(config, run.plan, run.folder, True, CPU, "threads")
    return replace(run, config=replace(run.config, resume=True))


def undisturbed(run, folder):
    """Train the same run in threads of this process. Returns its folder."""
    folder.mkdir()
    config = replace(run.config, resume=False)
    rank.train_on(config, run.plan, folder, True, CPU, "threads")
    return folder


def assert_same(run, reference):
    """Compare metrics, weights and buffers of two runs, to the bit."""
    assert lines_of(run.folder) == lines_of(reference)
    weights, expected = (
        load_file(folder / "weights.safetensors") for folder in (run.folder, reference)
    )
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


def restarts_of(run):
    """Return step and source of every restart."""
    lines = (run.folder / "restarts.jsonl").read_text().splitlines()
    return [(json.loads(line)["step"], json.loads(line)["source"]) for line in lines]


def test_a_lost_rank_is_recovered_from_the_copies_without_a_checkpoint(tmp_path, monkeypatch):
    """Whatever a rank does when it is killed: the other one has its stages, with optimizer state and
    running statistics. No step is lost but the one that was in progress. The run writes no
    checkpoint, so there is none that it could have read. What cannot be recovered is said: a rank
    is killed between its two updates, and the other one has stages of two steps.
    """
    run = prepared(tmp_path / "run", 2)
    said = train(
        monkeypatch,
        run,
        Fault((1,), 3, Kind.F),
        Fault((0,), 5, Kind.B),
        Fault((1,), 8, Kind.U),
        # Rank 0 has not written the metrics of step 10, of which rank 1 has all.
        Fault((0,), 10, None),
        Fault((1,), 11, Kind.U, updates=1),
    )
    recovered = [(2, "memory"), (4, "memory"), (7, "memory"), (10, "memory")]
    assert restarts_of(run) == [*recovered, (0, "checkpoint")]
    assert "continue from step 10, which the remaining ranks had in memory" in said[3]
    assert re.search(
        r"not used: the failure came during an update, and the ranks are not at one complete step: "
        r"stage [01] of rank 0 at step 1[01], stage [01] of rank 0 at step 1[01]$",
        said[4],
    )
    assert_same(run, undisturbed(run, tmp_path / "reference"))
    assert not (run.folder / "checkpoints").exists()


def test_a_data_parallel_copy_of_a_stage_recovers_another(tmp_path, monkeypatch):
    """The planner has given a stage to several ranks; the others have all micro-batches but theirs."""
    run = prepared(tmp_path / "run", 3, "1f1b")
    copies = next(ranks for ranks in run.plan.schedule.ranks_of_stage if len(ranks) > 1)
    # Before its first forward: the last stage updates when it has had all forwards.
    train(monkeypatch, run, Fault((copies[0],), 5, Kind.F))
    assert restarts_of(run) == [(4, "memory")]
    assert_same(run, undisturbed(run, tmp_path / "reference"))


def test_a_run_that_loses_all_copies_of_a_stage_continues_from_its_checkpoint(
    tmp_path, monkeypatch
):
    """Stage 0 is on ranks 0 and 3. When rank 3 is lost alone, rank 0 has it."""
    run = with_checkpoint(prepared(tmp_path / "run", 4), 3)
    said = train(monkeypatch, run, Fault((3,), 5, Kind.F), Fault((0, 3), 8, Kind.F))
    assert restarts_of(run) == [(4, "memory"), (3, "checkpoint")]
    assert said[1].endswith("not used: no rank is left that has the whole state of stage 0")
    assert_same(run, undisturbed(run, tmp_path / "reference"))


def test_the_state_in_memory_is_loaded_under_another_plan(tmp_path, monkeypatch):
    """With one rank fewer the run is planned anew, as by hand from a checkpoint of that step."""
    run = prepared(tmp_path / "run", 2, min_ranks=1)
    train(monkeypatch, run, Fault((1,), 5, Kind.F))
    assert restarts_of(run) == [(4, "memory")]
    second_plan = Plan.load(run.folder / "plan.json")
    assert second_plan.ranks == 1
    reference = tmp_path / "reference"
    reference.mkdir()
    with_checkpoint(replace(run, folder=reference), 4)
    second = replace(run.config, resume=True, out=str(reference))
    rank.train_on(second, second_plan, reference, True, CPU, "threads")
    assert lines_of(run.folder)[0] == lines_of(reference)[0]
    weights, expected = (
        load_file(folder / "weights.safetensors") for folder in (run.folder, reference)
    )
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("offers", "selected"),
    [
        # Both stages are there at step 4; rank 1 has updated stage 1 once more.
        ({0: (4, {0: 4, 1: 4}), 1: (4, {0: 4, 1: 5})}, (4, {0: 0, 1: 0})),
        # Rank 1 has heard the loss of step 5, for which rank 0 was waiting.
        ({0: (4, {0: 5}), 1: (5, {1: 5})}, (5, {0: 0, 1: 1})),
        # No rank knows the loss of step 5.
        ({0: (4, {0: 5}), 1: (4, {1: 5})}, "stage 0 of rank 0 at step 5, stage 1 of rank 1 at"),
        ({0: (4, {0: 4}), 1: (4, {1: 5})}, "stage 0 of rank 0 at step 4, stage 1 of rank 1 at"),
        ({0: (4, {0: 4}), 2: (4, {0: 4})}, "no rank is left that has the whole state of stage 1"),
        # The optimizer of rank 1 was interrupted: its stage is of no step.
        ({0: (4, {0: 4}), 1: (4, {})}, "no rank is left that has the whole state of stage 1"),
        ({}, "no rank is left that could hand over its state"),
    ],
)
def test_the_newest_step_is_selected_of_which_every_stage_is_left(offers, selected):
    """All stages at one step, which one rank at least has completed; else the reason."""
    messages = {
        rank: Offer(step, (f"line of step {step}",), tuple(stages.items()))
        for rank, (step, stages) in offers.items()
    }
    selection = select(messages, 2)
    if isinstance(selected, str):
        assert selected in selection
        return
    step, sources = selected
    assert selection == Selection(step, sources, (f"line of step {step}",))
