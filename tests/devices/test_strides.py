"""Memory order survives a boundary: channels last stays so, and so do transposed tensors.

A kernel chooses its way by strides. A boundary that made tensors contiguous would cost a copy on
either side, and other kernels would give other bits than one device has.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.transport.same_host import SameHostTransport

pytestmark = pytest.mark.usefixtures("functions_by_value")

BALANCES = {"one stage": (8,), "boundaries": (2, 3, 3)}


class Recorder(nn.Module):
    """Passes its input on, and notes the strides of it and of its gradient."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.strides = set()

    def forward(self, x):
        """Return `x`."""
        self.strides.add((self.name, "value", x.stride()))
        if x.requires_grad:
            x.register_hook(lambda grad: self.strides.add((self.name, "gradient", grad.stride())))
        return x.view_as(x)


class Swap(nn.Module):
    """Exchanges two dimensions without a copy."""

    def forward(self, x):
        """Return a view of `x`."""
        return x.transpose(1, 3)


class Mean(nn.Module):
    """Averages over the image."""

    def forward(self, x):
        """Return a tensor of shape (samples, channels)."""
        return x.mean(dim=(1, 2))


def images():
    """Images in channels-last order, and classes."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 4, 6, 6, generator=generator).to(memory_format=torch.channels_last)
    return x, torch.arange(8) % 8


def strides(balance, far=(), **options):
    """The strides at both boundaries, and the losses, of three batches."""
    rank = int(os.environ.get("RANK", "0"))
    connect = SameHostTransport.connect
    SameHostTransport.connect = lambda self, store, size, *, willing: connect(
        self, store, size, willing=rank not in far
    )
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1),
        nn.ReLU(),
        Recorder("channels last"),
        nn.Conv2d(8, 8, 3, padding=1),
        Swap(),
        Recorder("transposed"),
        Mean(),
        nn.Linear(8, 8),
    )
    try:
        pipe = ps.Pipeline(
            model,
            balance=balance,
            schedule="1f1b",
            micro_batches=4,
            loss=functional.cross_entropy,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            memory_format=torch.channels_last,
            **options,
        )
    finally:
        SameHostTransport.connect = connect
    losses = [float(pipe.train_batch(*images())) for _ in range(3)]
    pipe.close()
    recorders = [part for part in model if isinstance(part, Recorder)]
    return sorted(set().union(*[recorder.strides for recorder in recorders])), losses


@pytest.fixture(scope="module")
def expected():
    """What there is without boundaries."""
    rows, losses = strides(BALANCES["one stage"], executor="threads")
    values = {name: stride for name, what, stride in rows if what == "value"}
    # Neither is contiguous: else nothing would be shown.
    assert values == {"channels last": (288, 1, 48, 8), "transposed": (288, 8, 48, 1)}
    assert len(rows) == 4
    return rows, losses


def test_n12_over_the_memory_of_one_process(expected):
    """Tensors are handed over as they are."""
    assert strides(BALANCES["boundaries"], executor="threads") == expected


@pytest.mark.parametrize("boundary", ["bfloat16", "int8"])
def test_n12_in_fewer_bits(expected, boundary):
    """Numbers are others there, their order is not."""
    rows, _ = strides(BALANCES["boundaries"], executor="threads", boundary=boundary)
    assert rows == expected[0]


@pytest.mark.parametrize("far", [(), (0, 1, 2)], ids=["same host", "torch.distributed"])
def test_n12_between_processes(expected, far):
    """Through shared memory, and over the network."""
    results = ps.launch(strides, 3, BALANCES["boundaries"], far, threads=1)
    rows = sorted(row for rank_rows, _ in results for row in rank_rows)
    assert rows == expected[0]
    assert all(losses == expected[1] for _, losses in results)
