"""Small pipelines whose whole state is compared, for tests of checkpoints."""

from __future__ import annotations

import pytest
import torch
from tests.conformance.reference import differences
from torch import nn
from torch.optim import SGD, Adam

import penstock as ps
from penstock.errors import FileError


def sgd(params):
    """SGD with momentum, so that there is state."""
    return SGD(params, lr=0.1, momentum=0.9)


def adam(params):
    """Adam."""
    return Adam(params, lr=0.01)


def pipeline(optimizer=sgd, *, balance=(2, 1), schedule="1f1b", model=None, **options):
    """Return a pipeline of two stages with 23 weights."""
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    return ps.Pipeline(
        model,
        loss=nn.functional.mse_loss,
        balance=list(balance),
        schedule=schedule,
        micro_batches=2,
        optimizer=optimizer,
        executor="threads",
        **options,
    )


def batch(number=0):
    """Return four samples."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 3, generator=generator), torch.randn(4, 1, generator=generator)


def trained(steps=2, optimizer=sgd, **options):
    """Return a pipeline that has been trained for some steps."""
    pipe = pipeline(optimizer, **options)
    for number in range(steps):
        pipe.train_batch(*batch(number))
    return pipe


def everything(pipe):
    """Return all state that a checkpoint restores."""
    stages = pipe._assembly.stages
    moments = {
        f"{stage.index} {place} {key}": torch.as_tensor(value)
        for stage in stages
        if stage.update.optimizer is not None
        for place, parameter in enumerate(stage.update.parameters)
        for key, value in stage.update.optimizer.state.get(parameter, {}).items()
    }
    rates = [
        torch.tensor(float(group["lr"]))
        for stage in stages
        if stage.update.optimizer is not None
        for group in stage.update.optimizer.param_groups
    ]
    step = {"step": torch.tensor(pipe.step)}
    return pipe.state_dict() | moments | {f"rate {n}": rate for n, rate in enumerate(rates)} | step


def assert_refused(folder, message, *, by=None, **options):
    """Check that `load` raises, and that the pipeline is unchanged."""
    pipe = by or trained(3)
    before = {key: value.clone() for key, value in everything(pipe).items()}
    with pytest.raises(FileError, match=message) as refusal:
        pipe.load(folder, **options)
    assert differences(everything(pipe), before) == []
    return str(refusal.value)


def refused_by(pipe, folder):
    """Return the message of `load`; None if it accepts the checkpoint."""
    try:
        pipe.load(folder)
    except FileError as error:
        return str(error)
    return None
