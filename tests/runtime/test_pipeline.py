"""What a Pipeline takes, and what it refuses before anything starts."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from tests.conformance.models import CASES, made
from tests.runtime.jobs import sgd
from torch import nn

import penstock as ps
from penstock.errors import ChainError, PlanError, ScheduleError, SettingError, UnknownName
from penstock.runtime import pipeline as module
from penstock.schedule.op import Schedule

CASE = CASES["mlp"]


def pipeline(model=None, plan=None, **options):
    """A pipeline of the MLP in this process."""
    options.setdefault("executor", "threads")
    return ps.Pipeline(made(CASE)[0] if model is None else model, plan, loss=CASE.loss, **options)


@pytest.fixture(scope="module")
def plan():
    """A plan for two ranks, from a quick measurement."""
    model, x, _ = made(CASE, 16)
    profile = ps.profile(model, x, batch=16, sizes=[4, 16], repeats=1)
    return ps.plan(
        profile, ps.cluster("local:2"), batch=16, schedules=["1f1b"], stages=2, micro_batches=4
    )


def test_a_plan_runs_as_it_says(plan):
    """Profile, plan, train: the front door's own five lines."""
    model, x, y = made(CASE, 16)
    by_hand = pipeline(
        copy.deepcopy(model),
        balance=plan.lengths,
        micro_batches=plan.micro_batches,
        recompute=plan.recompute,
    )
    pipe = pipeline(model, plan)
    assert torch.equal(pipe.train_batch(x, y), by_hand.train_batch(x, y))
    assert pipe.timeline().ranks == plan.ranks == 2
    assert pipe.setting.schedule == plan.schedule


def test_the_optimizer_states_are_divided_as_the_plan_says(plan):
    """Unless the caller says otherwise: a plan counts their memory."""
    divided = dataclasses.replace(plan, zero=1)
    assert pipeline(plan=divided, optimizer=sgd)._assembly.zero == 1
    assert pipeline(plan=divided, optimizer=sgd, zero=0)._assembly.zero == 0
    assert pipeline(plan=plan, optimizer=sgd)._assembly.zero == 0


@pytest.mark.parametrize("optimizer", [None, torch.optim.AdamW])
def test_the_memory_of_a_plan_is_checked_for_the_optimizer_of_the_run(plan, optimizer, monkeypatch):
    """A plan is for one with a number of states; without an optimizer there is none."""
    calls = []
    monkeypatch.setattr(module, "check_optimizer_memory", lambda *args: calls.append(args))
    pipe = pipeline(plan=plan, optimizer=optimizer)
    if optimizer is None:
        assert calls == []
        return
    ((checked_plan, chain, stage_optimizer),) = calls
    assert checked_plan is plan
    assert chain is pipe.chain.description
    assert isinstance(stage_optimizer, torch.optim.AdamW)


def test_a_plan_for_another_model_and_a_plan_beside_ones_own_words_are_refused(plan):
    """Whichever of the two would win, somebody would be surprised."""
    with pytest.raises(PlanError, match="it was made for a chain of 7 layers with fingerprint"):
        pipeline(nn.Sequential(nn.Linear(16, 5), nn.Linear(5, 5)), plan)
    with pytest.raises(
        SettingError,
        match="the plan already says balance, recompute: give a plan, or these, not both",
    ):
        pipeline(None, plan, balance=[3, 4], recompute="always")
    with pytest.raises(
        SettingError,
        match=r"a Pipeline needs a plan \(ps\.plan\), or balance=\[layers of each stage, …\]",
    ):
        pipeline()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"balance": [3, 3]},
            ChainError,
            r"stage lengths \[3, 3\] sum to 6 and must be positive and sum to 7",
        ),
        ({"balance": [7, 0]}, ChainError, r"stage lengths \[7, 0\] sum to 7 and must be positive"),
        (
            {"balance": [3, 4], "schedule": "1f1c"},
            UnknownName,
            "no schedule called '1f1c'. Did you mean '1f1b'",
        ),
        (
            {"balance": [3, 4], "micro_batches": 0, "schedule": "gpipe"},
            ScheduleError,
            "gpipe needs at least 1 of micro-batches and got 0",
        ),
        (
            {"balance": [3, 4], "recompute": "sometimes"},
            SettingError,
            "recompute is one of never, except_last, always, selective, not 'sometimes'",
        ),
        ({"balance": [3, 4], "weights": "stush"}, UnknownName, "no weight rule called 'stush'"),
        (
            {"balance": [3, 4], "schedule": ps.schedule("1f1b", 2, 4), "micro_batches": 8},
            SettingError,
            "the schedule has 4 micro-batches, which differs from micro_batches=8",
        ),
        (
            {"balance": [3, 4], "schedule": ps.schedule("1f1b", 3, 4)},
            PlanError,
            r"the schedule has 3 stages, the balance \[3, 4\] has 2",
        ),
        (
            {
                "balance": [7],
                "schedule": Schedule.parse("0F0 0U1 0F1 0B0 0B1 0U2", "mine", synchronous=False),
            },
            ScheduleError,
            "mine is asynchronous and does not say how it continues from batch to batch: give it a stream",
        ),
        (
            {"balance": [7], "schedule": Schedule.parse("0F0 0U1", "mine")},
            ScheduleError,
            r"mine is not sound\n  \[one backward\] 0B0",
        ),
        (
            {"balance": [7], "optimizer": lambda params: "adam"},
            SettingError,
            r"this one returned str",
        ),
    ],
    ids=lambda value: None if not isinstance(value, dict) else ", ".join(value),
)
def test_what_cannot_run_is_refused_with_the_numbers(options, error, message):
    """Before a thread is started or a process waits for another."""
    with pytest.raises(error, match=message):
        pipeline(**options)


@pytest.mark.parametrize(
    "inputs",
    [
        torch.zeros(0, 16),
        torch.zeros(()),
        {"a": torch.zeros(3, 16), "b": torch.zeros(4, 16)},
        "text",
    ],
)
def test_a_batch_without_a_number_of_samples_is_refused(inputs):
    """Nothing could be cut into micro-batches."""
    pipe = pipeline(balance=[3, 4])
    with pytest.raises(
        SettingError,
        match="the inputs of a batch must be tensors with the same number of samples, at least 1",
    ):
        pipe.train_batch(inputs, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(SettingError, match="a batch has 3 inputs and 4 targets"):
        pipe.train_batch(torch.zeros(3, 16), torch.zeros(4, dtype=torch.int64))


def test_an_alias_and_a_schedule_of_ones_own_are_taken_where_a_name_is():
    """Names are for people; the runtime sees programs."""
    model, x, y = made(CASE)
    losses = [
        pipeline(
            copy.deepcopy(model), balance=[3, 4], schedule=schedule, micro_batches=2
        ).train_batch(x, y)
        for schedule in ("1f1b", "dapple", ps.schedule("gpipe", 2, 2), None)
    ]
    assert len(set(map(float, losses))) == 1
