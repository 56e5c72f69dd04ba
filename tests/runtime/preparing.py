"""A small traced model, and the jobs of ranks that use it in the tests."""

from __future__ import annotations

import copy
import sys

import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.tracing import variants


class Small(nn.Module):
    """Two layers and a temperature."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.temperature = nn.Linear(4, 8), nn.Linear(8, 3), 1.0

    def forward(self, x):
        return self.second(torch.relu(self.first(x))) / self.temperature


def traced_pipeline(model, example, **options):
    """Return a pipeline of a traced model."""
    return pipeline(ps.chain(model, example), executor="threads", **options)


def pipeline(chain, **options):
    return ps.Pipeline(
        chain,
        loss=functional.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        balance=[1, 1],
        schedule="1f1b",
        micro_batches=2,
        **options,
    )


def chain_of(model):
    """Return the chain of a model of four features."""
    return ps.chain(model, torch.zeros(4, 4))


def batches():
    """Return three batches, of which the last two have micro-batches of one sample."""
    generator = torch.Generator().manual_seed(1)
    for samples in (4, 2, 2):
        yield torch.randn(samples, 4, generator=generator), torch.arange(samples) % 3


def anneal(model, chain):
    """In a rank, train while the user's model changes."""
    inside = []
    original = variants.capture

    def capture(*args, **options):
        frame, names = sys._getframe(), []
        while frame is not None:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        inside.append("play" in names)
        return original(*args, **options)

    variants.capture = capture
    pipe = pipeline(chain, deadline_s=60.0)
    traced_before = chain.variants.is_known
    losses = []
    for step, (x, y) in enumerate(batches()):
        model.temperature = 2.0 if step == 2 else 1.0
        losses.append(pipe.train_batch(x, y))
    return {"losses": torch.stack(losses), "known": traced_before, "inside": inside}


def plain_losses(model):
    """Return the losses of the same training in plain PyTorch."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step, (x, y) in enumerate(batches()):
        model.temperature = 2.0 if step == 2 else 1.0
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)
