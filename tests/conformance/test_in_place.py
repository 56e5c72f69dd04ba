"""Changes in place that plain PyTorch refuses are refused in the first batch; those that it accepts
train to the same numbers.
"""

from __future__ import annotations

import pytest
import torch
from tests.conformance.reference import PlainTraining, differences, gradients
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import StageFailed


class Changing(nn.Module):
    """Saves a value for the backward and then changes it in place, in the way that it is named
    after.
    """

    def __init__(self, way):
        super().__init__()
        self.way, self.linear = way, nn.Linear(8, 8)

    def forward(self, x):
        """Change something."""
        if self.way == "view":
            h = torch.tanh(self.linear(x))
            h[:, 0] += 1
            return h
        if self.way == "weight":
            h = self.linear(x)
            with torch.no_grad():
                self.linear.weight.mul_(0.5)
            return h
        if self.way == "saved input":
            h = self.linear(x)
            y = h.square()
            h.add_(1)
            return y + h
        return torch.exp(self.linear(x)).relu_()


def refused_models():
    """Layers that plain PyTorch refuses in the backward."""
    yield (
        "after tanh",
        nn.Sequential(
            nn.Linear(4, 8), nn.Tanh(), nn.SiLU(inplace=True), nn.Linear(8, 3), nn.Linear(3, 3)
        ),
    )
    yield (
        "after sigmoid",
        nn.Sequential(
            nn.Linear(4, 8), nn.Sigmoid(), nn.ReLU(inplace=True), nn.Linear(8, 3), nn.Linear(3, 3)
        ),
    )
    for way in ("view", "weight", "saved input", "exp"):
        yield way, nn.Sequential(nn.Linear(4, 8), Changing(way), nn.Linear(8, 3), nn.Linear(3, 3))


REFUSED = [name for name, _ in refused_models()]
MESSAGE = "modified by an inplace operation"


def refused_model(name):
    """One of them, with weights that depend on its name only."""
    torch.manual_seed(0)
    return dict(refused_models())[name]


def batch_of(samples=8):
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(samples)
    return torch.randn(samples, 4, generator=generator), torch.randn(
        samples, 3, generator=generator
    )


@pytest.mark.parametrize("name", REFUSED)
def test_plain_pytorch_refuses_them(name):
    """Else the tests below test nothing."""
    x, y = batch_of()
    with pytest.raises(RuntimeError, match=MESSAGE):
        functional.mse_loss(refused_model(name)(x), y).backward()


@pytest.mark.parametrize("name", REFUSED)
def test_every_schedule_and_recompute_refuses_them_in_the_first_micro_batch(name):
    """The first micro-batch of a form was trained with gradients 33 % off: hooks had switched
    autograd's check off.
    """
    middle = len(refused_model(name)) - 2
    cases = [
        ("gpipe", "never"),
        ("1f1b", "except_last"),
        ("zb-h1", "never"),
        ("chimera", "never"),
        ("1f1b", list(range(middle + 1))),
        ("gpipe", [1]),
    ]
    for schedule, recompute in cases:
        model = refused_model(name)
        if name == "weight" and schedule == "chimera":
            continue  # copies of a stage have weights of their own
        pipe = ps.Pipeline(
            model,
            loss=functional.mse_loss,
            balance=[middle + 1, 1],
            schedule=schedule,
            recompute=recompute,
            micro_batches=2,
            executor="threads",
        )
        # A second forward with a weight that the first has changed makes other values.
        message = f"{MESSAGE}|recomputed for the backward" if name == "weight" else MESSAGE
        with pytest.raises(StageFailed, match=message):
            pipe.train_batch(*batch_of())


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("mode", ["never", "always"])
def test_a_pipe_refuses_them(name, mode):
    """In its own graph and in the one that it makes again."""
    if name == "weight" and mode == "always":
        pytest.skip("a Pipe refuses a weight that has changed before it runs anything again")
    model = refused_model(name)
    pipe = ps.Pipe(model, [len(model) - 1, 1], devices=2, chunks=2, checkpoint=mode)
    x, y = batch_of()
    with pytest.raises(RuntimeError, match=MESSAGE):
        functional.mse_loss(pipe(x), y).backward()


def test_batches_of_ever_new_lengths_are_refused_from_the_first_to_the_last():
    """Each was a new form, so that no batch was ever checked."""
    for samples in (8, 10, 12):
        pipe = ps.Pipeline(
            refused_model("after tanh"),
            loss=functional.mse_loss,
            balance=[4, 1],
            schedule="gpipe",
            micro_batches=2,
            executor="threads",
        )
        with pytest.raises(StageFailed, match=MESSAGE):
            pipe.train_batch(*batch_of(samples))


def accepted(way):
    """Layers that change in place what nothing has saved."""
    torch.manual_seed(0)
    return {
        "relu": nn.Sequential(
            nn.Linear(4, 8),
            nn.ReLU(inplace=True),
            nn.Linear(8, 8),
            nn.Dropout(0.0, inplace=True),
            nn.Linear(8, 3),
        ),
        "hardtanh": nn.Sequential(
            nn.Linear(4, 8),
            nn.Hardtanh(inplace=True),
            nn.Linear(8, 8),
            nn.ELU(inplace=True),
            nn.Linear(8, 3),
        ),
    }[way]


@pytest.mark.parametrize("way", ["relu", "hardtanh"])
@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [("gpipe", "never"), ("1f1b", "always"), ("zb-h1", [0, 1, 2]), ("zb-h1", "never")],
)
def test_what_plain_pytorch_accepts_trains_to_the_same_numbers(way, schedule, recompute):
    """Also where a stage begins with it, and in batches of several lengths."""
    plain = PlainTraining(accepted(way), functional.mse_loss)
    model = accepted(way)
    pipe = ps.Pipeline(
        model,
        loss=functional.mse_loss,
        balance=[1, 2, 2],
        schedule=schedule,
        recompute=recompute,
        micro_batches=2,
        executor="threads",
    )
    for samples in (8, 8, 10, 6):
        plain.model.zero_grad()
        model.zero_grad()
        plain.backward(*batch_of(samples), 2)
        pipe.train_batch(*batch_of(samples), update=False)
        assert differences(gradients(model), gradients(plain.model)) == []


class Late(nn.Module):
    """Changes its input in place from its third forward on."""

    def __init__(self):
        super().__init__()
        self.runs = 0

    def forward(self, x):
        """Change it, or not."""
        x, mask = x
        self.runs += 1
        return x * (mask.add_(1) if self.runs > 2 else mask + 1)


class Masked(nn.Module):
    """Hands a mask on."""

    def forward(self, x):
        """The mask wants no gradient."""
        return x * 2, torch.ones(x.shape)


def test_a_stage_that_begins_late_to_change_what_it_was_given_says_so():
    """Its recompute would begin with the changed input."""
    model = nn.Sequential(nn.Linear(4, 4), Masked(), Late(), nn.Linear(4, 3))
    pipe = ps.Pipeline(
        model,
        loss=functional.mse_loss,
        balance=[2, 2],
        schedule="gpipe",
        recompute="always",
        micro_batches=2,
        executor="threads",
    )
    pipe.train_batch(*batch_of())
    with pytest.raises(StageFailed, match="changed in place what their stage was given"):
        pipe.train_batch(*batch_of())
