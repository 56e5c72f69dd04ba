"""`torch.compile` leaves a `Pipe` as it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.pipe.pipe import Pipe


def test_torch_compile_leaves_a_pipe_as_it_is():
    """With a warning; the results are those without it."""
    torch.manual_seed(0)
    pipe = Pipe(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), [2, 1], chunks=2)
    x = torch.randn(4, 3)
    pipe(x).sum().backward()
    expected = [weight.grad.clone() for weight in pipe.parameters()]
    pipe.zero_grad()
    compiled = torch.compile(pipe, backend="eager")
    with pytest.warns(UserWarning, match="torch.compile leaves a Pipe as it is"):
        compiled(x).sum().backward()
    for weight, grad in zip(pipe.parameters(), expected, strict=True):
        assert torch.equal(weight.grad, grad)
