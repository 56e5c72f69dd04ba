"""A program of a user, checked by mypy in strict mode and never run: public names are types.

It is among the files of mypy in pyproject.toml, so that `make lint` checks it.
"""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import torch
from torch import Tensor, nn

import penstock as ps


def make_plan(model: nn.Module, example: Tensor, cluster: ps.Cluster) -> ps.Plan:
    """Profile a model and plan it."""
    profile = ps.profile(model, example, batch=128)
    assert_type(profile, ps.Profile)
    plan = ps.plan(profile, cluster, batch=128)
    assert_type(plan, ps.Plan)
    return plan


def largest_stage(plan: ps.Plan) -> int:
    """Read attributes of a plan."""
    assert_type(plan.predicted.step_s, float)
    return max(plan.lengths)


def draw(schedule: ps.Schedule, costs: ps.Costs, path: Path) -> ps.Timeline:
    """Verify, simulate and draw a schedule."""
    ps.verify(schedule)
    timeline = ps.simulate(schedule, costs)
    assert_type(timeline, ps.Timeline)
    ps.draw(timeline, path)
    return timeline


def train(model: nn.Module, plan: ps.Plan, x: Tensor, y: Tensor) -> float:
    """Train a batch."""
    pipe = ps.Pipeline(
        model,
        plan,
        loss=nn.functional.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        example=x,
    )
    loss = pipe.train_batch(x, y)
    assert_type(loss, Tensor)
    assert_type(pipe.rank, int)
    assert_type(pipe.is_main, bool)
    return float(loss)


def make_pipe(model: nn.Module, example: Tensor) -> nn.Module:
    """Make a module of a traced model."""
    pipe = ps.Pipe(ps.chain(model, example), balance=[1, 1], chunks=2)
    assert_type(pipe.hf_device_map, dict[str, str])
    return pipe


def load(path: Path) -> ps.Plan | None:
    """Catch an error."""
    try:
        return ps.Plan.load(path)
    except ps.FileError as error:
        assert_type(error, ps.FileError)
        return None
