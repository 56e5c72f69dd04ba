"""A forward that runs again for its backward comes to the same, or is refused."""

from __future__ import annotations

import random

import pytest
import torch
from tests.conformance.reference import PlainTraining, gradients
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import RunError, StageFailed

STATE = {"calls": 0}


class Other(nn.Module):
    """Another forward each time, by state that cannot be restored."""

    def __init__(self, way):
        super().__init__()
        self.linear, self.way = nn.Linear(6, 6), way
        self.counts, self.numbers = [0], random.Random(0)

    def forward(self, x):
        """Take another way."""
        h = self.linear(x)
        if self.way == "global":
            STATE["calls"] += 1
            return x + h * STATE["calls"]
        if self.way == "list":
            self.counts[0] += 1
            return functional.layer_norm(h if self.counts[0] in (3, 4) else h * h, (6,))
        if self.way == "generator":
            return (
                torch.where(torch.tensor(self.numbers.random()) < 0.5, h, x) * self.numbers.random()
            )
        self.counts[0] += 1
        return x if self.counts[0] > 4 else h


WAYS = ["global", "list", "generator", "layer dropped"]
#: `list` makes rows that all have the sum 0.
RECOMPUTE = ["always", "except_last", [0, 1], [1, 2]]


def model_of(make):
    """Two stages of two."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), make(), nn.Tanh(), nn.Linear(6, 6))


def batch_of(number=0):
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)


@pytest.mark.parametrize("recompute", ["always", "except_last"])
@pytest.mark.parametrize("way", WAYS)
def test_a_stage_whose_second_forward_goes_another_way_is_refused_by_its_layers(way, recompute):
    """The gradients were those of another network, without a word."""
    for schedule in ("gpipe", "1f1b", "zb-h1"):
        pipe = ps.Pipeline(
            model_of(lambda: Other(way)),
            loss=functional.mse_loss,
            balance=[2, 2],
            schedule=schedule,
            recompute=recompute,
            micro_batches=4,
            executor="threads",
        )
        with pytest.raises(
            StageFailed, match=r"(layers? [0-9]( to [0-9])?).*recomputed for the backward"
        ):
            pipe.train_batch(*batch_of())


@pytest.mark.parametrize("recompute", [[1], [0, 1], [1, 2], [0, 1, 2, 3]])
@pytest.mark.parametrize("way", WAYS)
def test_recomputed_layers_that_go_another_way_are_refused_or_right(way, recompute):
    """Constants of the first forward stay in its graph: only what it has saved comes from the
    second.
    """
    results = []
    for again in ("never", recompute):
        STATE["calls"] = 0
        model = model_of(lambda: Other(way))
        pipe = ps.Pipeline(
            model,
            loss=functional.mse_loss,
            balance=[2, 2],
            schedule="gpipe",
            recompute=again,
            micro_batches=4,
            executor="threads",
        )
        try:
            pipe.train_batch(*batch_of(), update=False)
        except StageFailed as error:
            assert "recomputed for the backward" in str(error)  # noqa: PT017 - refused
            return
        results.append(gradients(model))
    for name, grad in results[0].items():
        torch.testing.assert_close(results[1][name], grad)


def test_the_message_names_stage_layers_micro_batch_and_what_to_do():
    """It is read by people who have not written the layer."""
    pipe = ps.Pipeline(
        model_of(lambda: Other("global")),
        loss=functional.mse_loss,
        balance=[2, 2],
        schedule="gpipe",
        recompute="always",
        micro_batches=4,
        executor="threads",
    )
    with pytest.raises(
        StageFailed,
        match=r"stage 0, layers 0 to 1, micro-batch \d: recomputed.*other values.*recompute='never'",
    ):
        pipe.train_batch(*batch_of())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["always", "except_last"])
def test_a_pipe_whose_second_forward_goes_another_way_is_refused(way, mode):
    """As `torch.utils.checkpoint` refuses it, and where only values differ, too."""
    pipe = ps.Pipe(model_of(lambda: Other(way)), [2, 2], devices=2, chunks=4, checkpoint=mode)
    loss = functional.mse_loss(pipe(batch_of()[0]), batch_of()[1])
    with pytest.raises(
        RunError, match=r"layers 0 to 1 of a Pipe .*micro-batch \d: recomputed for the backward"
    ):
        loss.backward()


class Counting(nn.Module):
    """Anneals by a counter, and drops a gradient by it."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls, self.rate = nn.Linear(6, 6), 0, 1.0

    def forward(self, x):
        """Count."""
        self.calls += 1
        self.rate *= 0.9
        h = self.linear(x) * self.rate
        return x + (h.detach() if self.calls % 3 == 0 else h)


@pytest.mark.parametrize("recompute", ["never", *RECOMPUTE])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_counters_go_up_once_per_micro_batch_with_and_without_recompute(schedule, recompute):
    """The second forward sees the counter of the first: the same branch, the same gradient, and no
    second count.
    """
    plain = PlainTraining(model_of(Counting), functional.mse_loss)
    model = model_of(Counting)
    pipe = ps.Pipeline(
        model,
        loss=functional.mse_loss,
        balance=[2, 2],
        schedule=schedule,
        recompute=recompute,
        micro_batches=4,
        executor="threads",
    )
    for number in range(2):
        plain.backward(*batch_of(number), 4)
        pipe.train_batch(*batch_of(number), update=False)
    assert (model[1].calls, model[1].rate) == (plain.model[1].calls, plain.model[1].rate)
    for name, grad in gradients(plain.model).items():
        torch.testing.assert_close(gradients(model)[name], grad)


@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
def test_in_a_pipe_counters_go_up_once_and_attributes_may_change_before_the_backward(mode):
    """Plain PyTorch's backward does not ask for what a rate is by then."""
    plain, pipe = (
        model_of(Counting),
        ps.Pipe(model_of(Counting), [2, 2], devices=2, chunks=4, checkpoint=mode),
    )
    x, y = batch_of()
    functional.mse_loss(torch.cat([plain(part) for part in x.chunk(4)]), y).backward()
    loss = functional.mse_loss(pipe(x), y)
    calls, rate = pipe[1].calls, pipe[1].rate
    pipe[1].rate = 7.0
    loss.backward()
    assert (calls, rate) == (4, plain[1].rate)
    assert (pipe[1].calls, pipe[1].rate) == (4, 7.0)
    for one, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


class Normalised(nn.Module):
    """Kernels that differ with and without a graph differ in the last bits only."""

    def __init__(self):
        super().__init__()
        self.attention = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True).eval()

    def train(self, mode=True):
        """Stay in evaluation, as a frozen part does."""
        del mode
        return super().train(False)

    def forward(self, x):
        """Encode."""
        return self.attention(x[:, None])[:, 0]


def test_rounding_of_other_kernels_is_no_other_way():
    """Without a graph torch takes a fused path for such a layer: refusing that would refuse a right
    run.
    """
    model = model_of(Normalised)
    for parameter in model[1].parameters():
        parameter.requires_grad_(False)
    pipe = ps.Pipeline(
        model,
        loss=functional.mse_loss,
        balance=[2, 2],
        schedule="1f1b",
        recompute="always",
        micro_batches=4,
        executor="threads",
    )
    for number in range(3):
        pipe.train_batch(*batch_of(number))
