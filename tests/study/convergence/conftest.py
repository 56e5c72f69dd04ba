"""Records made up, so that what is said of them is known beforehand."""

from __future__ import annotations

import pytest

from penstock.study.convergence.experiment import Case, Experiment
from penstock.study.convergence.records import Record
from penstock.study.convergence.results import Results
from penstock.study.convergence.throughput import Throughput

BATCHES = 40


@pytest.fixture
def run():
    """Make one run: its test accuracy, or why it was given up, or the losses themselves."""

    def make(
        rule="stash",
        *,
        stages=2,
        seed=0,
        accuracy=0.9,
        given_up=None,
        losses=None,
        optimizer="sgd",
        task="digits",
    ):
        case = Case(
            task,
            rule,
            "1f1b" if rule == "flush" else "pipedream",
            stages,
            1,
            optimizer,
            0.01,
            BATCHES,
            seed,
        )
        falling = tuple(2.3 * 0.95**i for i in range(BATCHES))
        tested = (None, None) if given_up else (1 - accuracy, accuracy)
        return Record(
            case,
            losses if losses is not None else falling[: 10 if given_up else None],
            *tested,
            given_up,
            1.0,
        )

    return make


@pytest.fixture
def runs(run):
    """One run for each accuracy, with seeds from 0."""

    def make(rule, accuracies, **more):
        return [
            run(rule, seed=seed, accuracy=accuracy, **more)
            for seed, accuracy in enumerate(accuracies)
        ]

    return make


@pytest.fixture
def results(runs, run):
    """A small study of digits: stash loses at 4 stages, none does not train there, all else holds."""
    records = [
        *runs("flush", (0.96, 0.97, 0.98)),
        *runs("flush", (0.96, 0.97, 0.98), stages=4),
        *runs("stash", (0.97, 0.96, 0.97)),
        *runs("stash", (0.90, 0.91, 0.92), stages=4),
        *runs("none", (0.95, 0.97, 0.98)),
        run("none", stages=4, given_up="loss no number at batch 10"),
        *(run("none", stages=4, seed=seed, accuracy=0.95) for seed in (1, 2)),
    ]
    throughputs = {}
    fastest = {
        record.case.group: record.case.group._replace(rule="flush", micro_batches=2)
        for record in records
    }
    for group in [*fastest, *fastest.values()]:
        flush = group.rule == "flush"
        throughputs[group] = Throughput(
            "1f1b" if flush else "pipedream", group.stages, (1, 0), (2, 1), 0.2 if flush else 0.1
        )
    question = Experiment(tasks=("digits",), rules=("stash", "none"), depths=(2, 4))
    return Results(question, tuple(records), throughputs, fastest, (), (), {"device": "made up"})
