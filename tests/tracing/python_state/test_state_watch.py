"""Models whose Python state changes after tracing: traced again, or rejected.

Compared with a plain loop that makes the same changes.
"""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.errors import ChainError
from penstock.runtime.pipeline import Pipeline
from penstock.tracing.traced_chain import chain

GAIN = {"value": 1.0}


def activation(x):
    return torch.relu(x) * GAIN["value"]


class Changing(nn.Module):
    """Reads attributes of all kinds."""

    scale = 1.0

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.0)
        self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.temperature, self.options, self.mask = 1.0, {"powers": [1, 2]}, torch.ones(8)

    def forward(self, x):
        x = activation(self.norm(self.first(x))) * self.mask
        x = self.drop(self.middle(x)) * self.options["powers"][0]
        return self.last(x) / self.temperature * self.scale


def pipeline_of(model, schedule="1f1b", **options):
    return Pipeline(
        chain(model, torch.randn(4, 4)),
        loss=functional.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        balance=[2, 2],
        schedule=schedule,
        micro_batches=2,
        executor="threads",
        **options,
    )


def plain_step(model, optimizer, x, y):
    optimizer.zero_grad()
    for rows in (slice(0, 4), slice(4, 8)):
        (functional.cross_entropy(model(x[rows]), y[rows]) / 2).backward()
    optimizer.step()


def steps(change, counts=3):
    """Return the largest difference from plain training in the state, after steps with a change in
    between.
    """
    torch.manual_seed(0)
    model = Changing()
    plain = copy.deepcopy(model)
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    pipe, optimizer = pipeline_of(model), torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(counts):
        for net in (model, plain) if step else ():
            change(net, step)
        pipe.train_batch(x, y)
        plain_step(plain, optimizer, x, y)
    pairs = zip(model.state_dict().values(), plain.state_dict().values(), strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


@pytest.mark.parametrize(
    "change",
    [
        lambda model, step: setattr(model, "temperature", 1.0 / (1 + step)),
        lambda model, _: model.norm.eval(),
        lambda model, step: model.eval() if step == 1 else model.train(),
        lambda model, step: model.options["powers"].insert(0, 1 + step),
        lambda model, step: model.mask[:step].zero_(),
        lambda model, step: setattr(model, "mask", torch.full((8,), float(step))),
        lambda model, _: model.middle.register_forward_hook(lambda *call: call[2] * 2),
        lambda model, _: setattr(model.norm, "forward", torch.tanh),
        lambda model, step: setattr(model, "scale", 1.0 + step),
        lambda model, _: model.first.requires_grad_(False),
        lambda model, step: setattr(model, "epoch", step),
    ],
    ids=[
        "number",
        "mode of a part",
        "mode",
        "list",
        "tensor in place",
        "tensor",
        "hook",
        "forward",
        "class attribute",
        "frozen",
        "not read",
    ],
)
def test_a_change_between_batches_takes_effect_in_the_next_one(change):
    """An annealed temperature, a frozen batch norm, a hook: plain PyTorch uses them immediately."""
    assert steps(change) < 1e-6


def test_globals_and_class_attributes_that_forward_reads_are_watched(monkeypatch):
    """Like attributes of modules, they are constants of the graph."""

    def change(_, step):
        GAIN["value"] = 1.0 + step
        Changing.scale = 2.0 * step

    monkeypatch.setitem(GAIN, "value", 1.0)
    monkeypatch.setattr(Changing, "scale", 1.0)
    assert steps(change) < 1e-6


def test_dropout_switched_on_later_draws_as_if_it_had_been_on_from_the_start():
    """Which layers draw is determined when a pipeline is created, and must be determined again."""
    losses = []
    for probabilities in ((0.5, 0.5), (0.0, 0.5)):
        torch.manual_seed(0)
        model = Changing()
        model.drop.p = probabilities[0]
        pipe = pipeline_of(model)
        x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
        pipe.eval_batch(x, y)
        model.drop.p = probabilities[1]
        losses.append(float(pipe.train_batch(x, y)))
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda model: setattr(model, "last", nn.Linear(8, 3)),
            r"submodules of the model are others \(`last`\)",
        ),
        (
            lambda model: setattr(model.last, "bias", nn.Parameter(torch.zeros(3))),
            r"parameters of last are others \(`bias`\)",
        ),
        (
            lambda model: setattr(model.norm, "running_mean", torch.ones(8)),
            r"buffers of norm are others \(`running_mean`\)",
        ),
        (
            lambda model: model.middle.register_full_backward_hook(lambda *_: None),
            r"backward hooks of middle are others",
        ),
        (
            lambda model: setattr(
                model,
                "forward",
                lambda x: (
                    model.last(model.middle(model.first(x)))
                    if model.drop.register_buffer("late", torch.ones(1)) is None
                    else x
                ),
            ),
            r"buffers of drop",
        ),
    ],
    ids=["submodule", "parameter", "buffer", "backward hook", "buffer of its own"],
)
def test_tensors_and_modules_that_the_layers_do_not_hold_are_refused(change, message):
    """The optimizer has the old ones: a new head would never be trained."""
    torch.manual_seed(0)
    model = Changing()
    pipe = pipeline_of(model)
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    pipe.train_batch(x, y)
    change(model)
    if "forward" in vars(model):
        model(x)
    with pytest.raises(ChainError, match=rf"not the model that was traced: .*{message}.*ps\.chain"):
        pipe.train_batch(x, y)


def test_an_earlier_state_is_not_traced_again(caplog):
    """Freezing batch norm in every second epoch would otherwise cost seconds in each."""
    torch.manual_seed(0)
    model = Changing()
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    with caplog.at_level(logging.INFO, logger="penstock"):
        pipe = pipeline_of(model)
        for temperature in (1.0, 2.0, 1.0, 2.0, float("2")):
            model.temperature = temperature
            pipe.train_batch(x, y)
    traced = [message for message in caplog.messages if message.endswith(" s")]
    assert (
        len(traced) == 3
    )  # for training and for evaluation with the chain, and for the other temperature
    assert "`temperature` of the model was 1.0 and is 2.0" in caplog.text


def test_modes_of_the_users_model_do_not_matter_in_evaluation():
    """Training loops call `model.eval()` before and `model.train()` after an evaluation."""
    model = Changing()
    pipe = pipeline_of(model)
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    first = pipe.eval_batch(x, y)
    model.eval()
    assert torch.equal(pipe.eval_batch(x, y), first)
    assert pipe.chain.variants.state(training=False) == 0


def test_a_stream_drains_before_it_uses_other_graphs():
    """Values of micro-batches in flight have the names of the previous graphs."""
    torch.manual_seed(0)
    model = Changing()
    pipe = pipeline_of(model, schedule="pipedream")
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))

    def batches():
        for step in range(4):
            if step == 2:
                model.temperature, model.middle.forward = 2.0, lambda x: x * 2
            yield x, y

    assert len(list(pipe.train(batches()))) == 4


def test_layers_that_run_in_another_order_after_a_change_are_refused_with_the_change():
    """The division into layers is fixed; another one needs another chain."""

    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other, self.swapped = nn.Linear(4, 4), nn.Linear(4, 4), False

        def forward(self, x):
            return self.one(self.other(x)) if self.swapped else self.other(self.one(x))

    model = Either()
    pipe = Pipeline(
        chain(model, torch.randn(4, 4)),
        loss=functional.mse_loss,
        balance=[1, 1],
        schedule="1f1b",
        micro_batches=2,
        executor="threads",
    )
    x = torch.randn(4, 4)
    pipe.train_batch(x, x)
    model.swapped = True
    with pytest.raises(
        ChainError, match=r"`swapped` of the model was False and is True.*ps\.chain"
    ):
        pipe.train_batch(x, x)
