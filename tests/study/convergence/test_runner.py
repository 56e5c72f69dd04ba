"""Running what has no record yet."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penstock.errors import RunError
from penstock.study.convergence import runner as room
from penstock.study.convergence.experiment import Experiment
from penstock.study.convergence.records import RecordFile
from penstock.study.convergence.runner import Failed, run_cases


@pytest.fixture
def learning(monkeypatch, run):
    """Stand in for training: the seeds that were run, and what they make; seed 7 fails, seed 9 is
    interrupted.
    """
    begun: list[int] = []

    def train_case(case):
        begun.append(case.seed)
        if case.seed == 7:
            raise RunError("rank 1 failed")
        if case.seed == 9:
            raise KeyboardInterrupt
        return run(seed=case.seed)

    monkeypatch.setattr(room, "train_case", train_case)
    return begun


def test_an_interrupt_loses_nothing_that_was_done(learning, run, tmp_path):
    """Ctrl-C, and the same command again: only what is left is run."""
    cases = [run(seed=seed).case for seed in (0, 1, 9, 3)]
    with pytest.raises(KeyboardInterrupt):
        run_cases(cases, RecordFile(tmp_path), 1, lambda ended: None)
    assert learning == [0, 1, 9]
    learning.clear()
    reported = []
    assert run_cases([cases[0], cases[1], cases[3]], RecordFile(tmp_path), 1, reported.append) == []
    assert learning == [3]
    assert [record.case.seed for record in reported] == [3]


def test_a_case_that_fails_is_named_and_the_others_run(learning, run, tmp_path):
    """One bad combination must not cost the night."""
    cases = [run(seed=seed).case for seed in (7, 1)]
    notebook = RecordFile(tmp_path)
    assert run_cases(cases, notebook, 1, lambda ended: None) == [Failed(cases[0], "rank 1 failed")]
    assert [record.case.seed for record in notebook.of(cases)] == [1]


def test_cases_compute_with_one_thread_and_give_the_others_back(
    learning, run, tmp_path, monkeypatch
):
    """Sums depend on the number of threads: a study must not depend on --jobs."""
    seen = []
    monkeypatch.setattr(
        room, "train_case", lambda case: seen.append(torch.get_num_threads()) or run(seed=case.seed)
    )
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run_cases([run(seed=0).case], RecordFile(tmp_path), 1, lambda ended: None)
        assert seen == [1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_cases_in_processes_come_out_as_they_do_here(tmp_path):
    """What a study finds must not depend on --jobs."""
    cases, _ = Experiment(
        tasks=("digits",), rules=("stash",), depths=(2,), seeds=1, most_batches=3
    ).cases()
    records = []
    for jobs in (1, 2):
        notebook = RecordFile(tmp_path / str(jobs))
        assert run_cases(cases, notebook, jobs, lambda ended: None) == []
        records.append([replace(record, seconds=0.0) for record in notebook.of(cases)])
    assert len(records[0]) == 2
    assert records[0] == records[1]
