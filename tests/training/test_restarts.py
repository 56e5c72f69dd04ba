"""What follows a failure: another attempt, with fewer ranks if need be, or the end."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace

import pytest
import torch

import penstock as ps
from penstock.checkpoint.folder_lock import FolderLock
from penstock.errors import FileError, RankDied, RunError, RunStopped
from penstock.simulate.plan_costs import simulate_plan
from penstock.training import restarts
from penstock.training.config import TrainConfig
from penstock.training.devices import Devices
from penstock.training.job import Prepared
from penstock.training.loop.rank_result import RankResult
from penstock.training.run_checkpoints import request_ranks
from penstock.training.task import make_task


@pytest.fixture
def prepared(tmp_path):
    """A run of three ranks that is ready to train, and has no checkpoint."""
    config = TrainConfig(
        model="mlp", image=8, channels=1, ranks=3, stages=3, schedule="1f1b", micro_batches=4
    )
    profile = ps.analytic(make_task(config).model, torch.zeros(4, 64), device="V100", batch=64)
    cluster = ps.cluster("local:3")
    plan = ps.plan(profile, cluster, 64, schedules=["1f1b"], stages=3, micro_batches=4)
    (tmp_path / "config.yaml").write_text(config.as_yaml())
    plan.save(tmp_path / "plan.json")
    predicted = simulate_plan(plan, profile, cluster)
    return Prepared(config, tmp_path, profile, cluster, plan, predicted, Devices())


def attempts(monkeypatch, prepared, outcomes, **settings):
    """Train with attempts that have these outcomes. Returns ranks and resume of each, and what was
    said.
    """
    seen: list[tuple[int, bool]] = []
    messages: list[str] = []

    def train_once(attempt, quiet, on_start):
        del quiet, on_start
        seen.append((attempt.plan.ranks, attempt.config.resume))
        outcome = outcomes[len(seen) - 1]
        if isinstance(outcome, Exception):
            raise outcome
        return [outcome() if callable(outcome) else outcome]

    monkeypatch.setattr(restarts, "train_once", train_once)
    run = replace(prepared, config=replace(prepared.config, **settings))
    try:
        restarts.train_with_restarts(run, messages.append)
    except RunError as error:
        return seen, messages, error
    return seen, messages, None


def died(pid=4242):
    """Return the error for a rank that was killed."""
    return RankDied(2, pid, "was killed by SIGKILL", "; ranks 0, 1 stopped")


def test_a_failure_is_an_error_where_no_restart_was_asked_for(monkeypatch, prepared):
    """As it was before there were restarts."""
    seen, messages, error = attempts(monkeypatch, prepared, [died()])
    assert (seen, messages) == ([(3, False)], [])
    assert "was killed by SIGKILL" in str(error)


def test_a_killed_rank_is_replaced_and_with_min_ranks_left_out(monkeypatch, prepared):
    """A host may be able to start another process, or not; only the user knows."""
    results = [died(1), died(2), RankResult(9)]
    seen, messages, error = attempts(monkeypatch, prepared, results, max_restarts=2)
    assert seen == [(3, False)] * 3
    assert error is None
    assert "restart 2 of 2: 3 ranks continue from step 0" in messages[1]
    seen, messages, _ = attempts(monkeypatch, prepared, results, max_restarts=2, min_ranks=1)
    assert [ranks for ranks, _ in seen] == [3, 2, 1]
    log = (prepared.folder / "restarts.jsonl").read_text().splitlines()
    assert [json.loads(line)["ranks"] for line in log] == [3, 3, 2, 1]
    seen, *_ = attempts(monkeypatch, prepared, results, max_restarts=2, min_ranks=2)
    assert [ranks for ranks, _ in seen] == [3, 2, 2], "not below the least"


def test_a_lost_rank_counts_among_all_ranks_also_those_that_the_plan_leaves_idle(
    monkeypatch, prepared
):
    """Three of four ranks are used: after one loss three are left, not two."""
    with_idle = replace(prepared, cluster=ps.cluster("local:4"))
    results = [died(1), died(2), died(3), RankResult(9)]
    seen, *_ = attempts(monkeypatch, with_idle, results, max_restarts=3, min_ranks=2)
    assert [ranks for ranks, _ in seen] == [3, 3, 2, 2]


def test_a_restart_does_not_need_its_line_in_the_log(monkeypatch, prepared):
    """The disk may be full when the ranks are started again."""
    (prepared.folder / restarts.LOG).symlink_to("/dev/full")
    seen, messages, error = attempts(monkeypatch, prepared, [died(), RankResult(9)], max_restarts=1)
    assert (len(seen), error) == (2, None)
    assert "restarts.jsonl: No space left on device" in messages[-1]


def test_an_error_of_a_rank_that_lives_does_not_count_as_a_lost_rank(monkeypatch, prepared):
    """Its process can do its work again."""
    results = [RunError("no file"), RankResult(9)]
    seen, *_ = attempts(monkeypatch, prepared, results, max_restarts=1, min_ranks=1)
    assert [ranks for ranks, _ in seen] == [3, 3]


def test_a_run_that_fails_twice_in_the_same_way_ends(monkeypatch, prepared):
    """A run that diverges does so again."""
    results = [RunError("the loss is nan at step 7")] * 3
    seen, _, error = attempts(monkeypatch, prepared, results, max_restarts=5)
    assert len(seen) == 2
    assert error.__notes__ == ["the run failed in the same way twice, and was not restarted again"]
    seen, *_ = attempts(
        monkeypatch, prepared, [RunError("a"), RunError("b"), RankResult(1)], max_restarts=5
    )
    assert len(seen) == 3


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(monkeypatch, prepared):
    """Days of training would be written over."""
    (prepared.folder / "checkpoints" / "step-000100").mkdir(parents=True)
    with pytest.raises(
        FileError, match=r"holds no whole checkpoint to continue from: .*step-000100"
    ):
        attempts(monkeypatch, prepared, [died(), RankResult(9)], max_restarts=1)


def test_a_request_plans_for_that_number_and_back(monkeypatch, prepared):
    """With the settings of the run, apart from the numbers of ranks and stages. What cannot be is
    said, and the run goes on as it is.
    """

    def ask(ranks):
        def stopped():
            with FolderLock(prepared.folder):
                request_ranks(prepared.folder, ranks)
            return RankResult(5, stopped=True)

        return stopped

    results = [ask(2), ask(99), ask(0), ask(3), RankResult(9)]
    seen, messages, _ = attempts(monkeypatch, prepared, results)
    assert [ranks for ranks, _ in seen] == [3, 2, 2, 2, 3]
    assert "99 ranks cannot run this model: the number stays as it is" in messages
    assert not (prepared.folder / "resize.json").exists()


def test_sigterm_is_passed_on_and_ends_the_run(monkeypatch, prepared):
    """The ranks save and end; the run is not restarted."""
    passed = []

    class Process:
        def send_signal(self, sig):
            passed.append(sig)

    def train_once(attempt, quiet, on_start):
        on_start([Process()])
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        return [RankResult(5, stopped=True)]

    monkeypatch.setattr(restarts, "train_once", train_once)
    with pytest.raises(
        RunStopped, match=r"SIGTERM has ended the run after step 5, whose checkpoint"
    ):
        restarts.train_with_restarts(prepared, print)
    assert passed == [signal.SIGUSR1, signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
