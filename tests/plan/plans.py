"""Whole plans for tests."""

from dataclasses import replace

from penstock.plan.plan import Plan
from penstock.plan.prediction import Candidate, Objective, Prediction, Remedy, Traffic
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Schedule


def plan(
    plan_schedule: Schedule = schedule("1f1b", 2, 4), lengths: tuple[int, ...] = (2, 1)
) -> Plan:
    """A plan that is whole."""
    peaks = tuple(1000 * (rank + 1) for rank in range(plan_schedule.ranks))
    candidates = (
        Candidate("1f1b", 2, 4, "never", lengths, 0.5, 2000, "compute of stage 1"),
        Candidate("gpipe", 2, 4, "never", lengths, 0.5001, 4000, "bubble"),
        Candidate(
            "gpipe", 2, 8, "never", lengths, 0.4, 4 * 2**30, "needs 4.0 GiB, has 2.0 GiB on rank 1"
        ),
    )
    return Plan(
        "abc",
        ("stem", "body", "head"),
        lengths,
        plan_schedule.name,
        plan_schedule.lines,
        plan_schedule.micro_batches,
        16,
        "local:2",
        4,
        Prediction(0.5, 0.2, peaks, 32.0, 0.9),
        plan_schedule.options,
        candidates=candidates,
    )


def stream_plan(plan_schedule: Schedule = schedule("pipedream", 2, 1), **changes) -> Plan:
    """An asynchronous one."""
    defaults = {
        "synchronous": False,
        "stream": plan_schedule.stream,
        "weights": plan_schedule.stream.weights,
        "candidates": (),
    }
    return replace(plan(plan_schedule), **{**defaults, **changes})


def full_plan() -> Plan:
    """A plan with all results that a planner may store."""
    predicted = Prediction(0.5, 0.2, (1000, 2000), 32.0, 0.9, 0.6, 0.4, ((("weights", 900), ("activations", 100)), (("weights", 2000),)),
                           (Traffic(0, 1, 2048), Traffic(1, 0, 1024)))  # fmt: skip
    return replace(
        plan(),
        predicted=predicted,
        devices=(3, 1),
        torch_version="2.13.0+cpu",
        planner="dapple",
        objective=Objective("pipeline latency", 0.45, "s"),
        remedies=(Remedy("twice the bandwidth", 0.4),),
    )
