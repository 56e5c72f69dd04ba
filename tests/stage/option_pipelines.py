"""Pipelines with options of training."""

from __future__ import annotations

import torch
from tests.conformance.models import CASES, lengths_of, made
from tests.conformance.reference import layers_of
from tests.runtime.jobs import sgd
from torch.optim import lr_scheduler

import penstock as ps


def pipeline(model=None, stages=3, name="mlp", **options):
    """In this process."""
    model = made(CASES[name])[0] if model is None else model
    options.setdefault("optimizer", sgd)
    options.setdefault("micro_batches", 4)
    return ps.Pipeline(
        model,
        loss=CASES[name].loss,
        balance=lengths_of(len(layers_of(model)), stages),
        executor="threads",
        **options,
    )


def batch(number=0, samples=10, name="mlp"):
    """One of the case's batches."""
    with torch.random.fork_rng():
        torch.manual_seed(100 + number)
        return CASES[name].data(samples)


def no_decay(name, parameter):
    """Biases do not decay, and the first layer learns slowly."""
    if name.startswith("fc1"):
        return {"lr": 0.01}
    return {"weight_decay": 0.0} if parameter.dim() == 1 else {}


def decaying(params):
    """With a decay that groups can change."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.2)


SCHEDULERS = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.3),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 6),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, [0.1, 0.2, 0.3], total_steps=8
    ),
    "by group": lambda optimizer: lr_scheduler.LambdaLR(
        optimizer, [lambda n, k=k: 1 / (1 + n * k) for k in range(3)]
    ),
    "warm up, then decay": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
            lr_scheduler.ExponentialLR(optimizer, 0.7),
        ],
        [2],
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
}
