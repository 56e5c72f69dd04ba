"""Evaluation: the plain model's results, and nothing in the pipeline or the process moves by it."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.conformance.catalogue import EVERY
from tests.conformance.models import CASES, lengths_of, made
from tests.conformance.reference import layers_of
from torch import nn
from torch.nn import functional

import penstock as ps

IN_THREE = {key: schedule for key, schedule in EVERY.items() if schedule.micro_batches == 3}


def snapshot(model, optimizers):
    """All that training depends on, by name."""
    held = {f"weight {name}": value.clone() for name, value in model.state_dict().items()}
    held |= {
        f"gradient {name}": p.grad.clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    held |= {
        f"mode {name}": torch.tensor(module.training) for name, module in model.named_modules()
    }
    held |= {f"random {i}": torch.get_rng_state() for i in range(1)}
    for number, optimizer in enumerate(optimizers):
        for place, state in optimizer.state_dict()["state"].items():
            held |= {
                f"optimizer {number} {place} {key}": value.clone()
                for key, value in state.items()
                if value is not None
            }
    return held


@pytest.mark.parametrize("schedule", IN_THREE)
@pytest.mark.parametrize("name", CASES)
def test_forward_and_eval_batch_equal_the_plain_model_in_evaluation_mode(name, schedule):
    """Layers in evaluation mode, on the batch's micro-batches; outputs joined in the batch's order."""
    case = CASES[name]
    model, x, y = made(case)
    lengths = lengths_of(len(layers_of(model)), IN_THREE[schedule].stages)
    pipe = ps.Pipeline(
        model, loss=case.loss, balance=lengths, schedule=IN_THREE[schedule], executor="threads"
    )
    plain = copy.deepcopy(model).eval()
    with torch.no_grad():
        parts = list(x.tensor_split(3))
        output = torch.cat([plain(part) for part in parts])
        loss = sum(
            case.loss(plain(part), target) * len(part) / len(x)
            for part, target in zip(parts, y.tensor_split(3), strict=True)
        )
    pipe_output = pipe.forward(x)
    assert torch.equal(pipe_output, output)
    assert not pipe_output.requires_grad
    assert torch.allclose(pipe.eval_batch(x, y), loss, rtol=1e-6)
    assert torch.allclose(pipe_output, plain(x), atol=1e-5)


@pytest.mark.parametrize("stages", [1, 3])
def test_evaluation_leaves_weights_gradients_buffers_modes_and_random_state_alone(stages):
    """An evaluation that trains a little, or forgets to switch modes back, spoils every run that
    looks at itself.
    """
    case = CASES["resnet"]
    model, x, y = made(case)
    model.append(nn.Dropout(0.5))
    model[
        4
    ].eval()  # a frozen batch norm, as in fine-tuning: it must not come back in training mode
    model[1].train()
    optimizers = []

    def adam(params):
        optimizers.append(torch.optim.Adam(params))
        return optimizers[-1]

    pipe = ps.Pipeline(
        model,
        loss=case.loss,
        balance=lengths_of(10, stages),
        micro_batches=3,
        optimizer=adam,
        recompute="always",
        executor="threads",
    )
    pipe.train_batch(x, y)
    before = snapshot(model, optimizers)
    pipe.forward(x)
    pipe.eval_batch(x, y)
    pipe.forward(x[:1])
    after = snapshot(model, optimizers)
    assert before.keys() == after.keys()
    assert [name for name, value in before.items() if not torch.equal(value, after[name])] == []
    assert pipe.step == 1


@pytest.mark.parametrize("stages", [1, 3])
def test_modes_come_back_after_an_evaluation_that_failed(stages):
    """A user who catches the error and trains on would do so in evaluation mode, unknowingly."""
    case = CASES["vgg"]
    model, x, y = made(case)
    pipe = ps.Pipeline(
        model, loss=case.loss, balance=lengths_of(15, stages), micro_batches=2, executor="threads"
    )
    with pytest.raises(
        ps.PenstockError, match=r"rank \d \(stage \d\) failed in \dF0 of step 0: RuntimeError"
    ):
        pipe.forward(x[:, :2])
    assert all(module.training for module in model.modules())
    pipe.train_batch(x, y)


def test_one_dropout_that_stands_in_every_stage_is_switched_off_for_all_of_them():
    """`act, drop = nn.ReLU(), nn.Dropout()`, used throughout, is one module: the stage that is done
    first must not switch it on.
    """
    drop = nn.Dropout(0.5)
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), drop)))
    pipe = ps.Pipeline(
        model, loss=lambda out, _: out.mean(), balance=[2] * 4, micro_batches=6, executor="threads"
    )
    x = torch.randn(12, 16)
    expected = copy.deepcopy(model).eval()(x)
    for _ in range(20):
        assert torch.allclose(pipe.forward(x), expected, atol=1e-6)
        assert drop.training


def test_nested_outputs_are_joined_in_the_order_of_the_batch():
    """What one micro-batch gave as a dict of tensors, the batch gives as one dict."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 2), nn.Linear(16, 3)

        def forward(self, x):
            return {"a": self.a(x), "rest": (self.b(x), None), "count": 2}

    model = nn.Sequential(nn.Linear(16, 16), Heads())
    pipe = ps.Pipeline(
        model,
        loss=lambda out, _: out["a"].mean(),
        balance=[1, 1],
        micro_batches=4,
        executor="threads",
    )
    x = torch.randn(10, 16)
    output, expected = pipe.forward(x), model(x)
    assert output.keys() == expected.keys()
    assert output["count"] == 2
    assert output["rest"][1] is None
    assert torch.allclose(output["a"], expected["a"], atol=1e-6)
    assert torch.allclose(output["rest"][0], expected["rest"][0], atol=1e-6)


def test_an_output_without_samples_is_refused_in_words():
    """A mean over a micro-batch cannot be joined: of what shares would the whole consist?"""

    class Mean(nn.Module):
        def forward(self, x):
            return x.mean()

    pipe = ps.Pipeline(
        nn.Sequential(nn.Linear(16, 16), Mean()),
        loss=lambda out, _: out,
        balance=[1, 1],
        micro_batches=2,
        executor="threads",
    )
    x = torch.randn(4, 16)
    with pytest.raises(
        ps.PenstockError, match="the model's output has a tensor without a dimension"
    ):
        pipe.forward(x)
    pipe.train_batch(x, x)


def test_evaluation_mode_is_functional_dropouts_too():
    """Attention drops by a function that asks `self.training`."""
    case = CASES["gpt"]
    model, x, _ = made(case)
    pipe = ps.Pipeline(model, loss=case.loss, balance=[2, 3], micro_batches=2, executor="threads")
    assert torch.equal(pipe.forward(x), pipe.forward(x))
    assert functional.dropout(torch.ones(100), 0.5).min() == 0
