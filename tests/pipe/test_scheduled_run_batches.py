"""Batches of a `Pipe` under a schedule: their division, and what is kept between them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.pipe.scheduled import batch, grads_of, make_pipe
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import SettingError


class Counting(nn.Module):
    """Notes the samples of every micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[int] = []

    def forward(self, x):
        """Note them."""
        self.samples.append(len(x))
        return x * 1


@pytest.mark.parametrize(
    ("samples", "expected"), [(16, [4] * 4), (6, [2, 2, 2]), (5, [2, 2, 1]), (1, [1])]
)
def test_a_batch_is_divided_as_by_torch_chunk(samples, expected):
    """For batch norm, 6 samples in 4 chunks are better 2, 2 and 2 than 2, 2, 1 and 1."""
    layers = nn.Sequential(nn.Linear(6, 6).double(), Counting())
    pipe = make_pipe(False, layers, balance=[1, 1], checkpoint="never")
    pipe(*batch(samples))
    assert layers[1].samples == expected
    assert expected == [len(part) for part in torch.ones(samples).chunk(4)]


@pytest.mark.parametrize("threads", [False, True])
def test_marks_of_earlier_batches_are_dropped(threads):
    """A long training would fill the memory with them."""
    pipe = make_pipe(threads)
    run = pipe._scheduled_run(pipe.loss)
    counts = []
    for _ in range(3):
        pipe(*batch(8))
        counts.append([len(interpreter.marks) for interpreter in run._interpreters])
    assert counts[0] == counts[1] == counts[2]


def test_layers_of_nested_containers_stay_in_the_partition_of_their_container():
    """A container counts as one layer in the balance, however many layers it has."""
    torch.manual_seed(2)
    first = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    layers = nn.Sequential(first, nn.Linear(6, 6), nn.Sequential(nn.Tanh())).double()
    pipe = make_pipe(False, layers, balance=[1, 2])
    x, y = batch(8)
    pipe(x, y).backward()
    grads = grads_of(pipe)
    stages = [
        stage
        for interpreter in pipe._scheduled_run(pipe.loss)._interpreters
        for stage in interpreter.stages.values()
    ]
    assert [len(stage.layers) for stage in stages] == [3, 2]
    expected = torch.autograd.grad(functional.mse_loss(layers(x), y), list(layers.parameters()))
    torch.testing.assert_close(grads, list(expected))


def test_layers_that_see_other_tokens_are_refused_slices():
    """They would see those of their slice alone."""
    schedule = ps.schedule("terapipe", 2, 2, slices=3)
    layers = nn.Sequential(nn.Linear(6, 6), nn.Softmax(dim=1)).double()
    with pytest.raises(SettingError, match="Softmax"):
        make_pipe(False, layers, balance=[1, 1], schedule=schedule, chunks=2)


@pytest.mark.parametrize(
    "loss",
    [nn.MSELoss(reduction="none"), partial(functional.mse_loss, reduction="none"), "mse"],
)
def test_a_loss_that_is_no_number_is_refused_before_anything_is_run(loss):
    """It would fail in the last partition, after all others have computed."""
    with pytest.raises(SettingError, match=r"reduction|a function"):
        make_pipe(None, loss=loss)
