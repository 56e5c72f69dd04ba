"""Averages of weights over training, compared with torch's own over the whole model."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import penstock as ps
from penstock.errors import SettingError
from penstock.runtime.state.weight_average import Average

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.ones(8, 4)

WAYS = {
    "ema": (lambda: {"decay": 0.9}, lambda: {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}),
    "mean": (lambda: {"decay": None}, dict),
    "buffers": (
        lambda: {"decay": 0.5, "use_buffers": True},
        lambda: {"multi_avg_fn": get_ema_multi_avg_fn(0.5), "use_buffers": True},
    ),
    "function": (
        lambda: {"avg_fn": lambda a, b, n: a + (b - a) / (n + 2)},
        lambda: {"avg_fn": lambda a, b, n: a + (b - a) / (n + 2)},
    ),
}


class Head(nn.Module):
    """A head with the weights of another layer."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        """Multiply by the shared weight."""
        return x @ self.weight.t()


def tied_model():
    """A model with batch norm whose first and last layer share a weight."""
    torch.manual_seed(0)
    first = nn.Linear(4, 4)
    return nn.Sequential(first, nn.Tanh(), nn.Linear(4, 4), nn.BatchNorm1d(4), Head(first.weight))


def pipeline(model, **words):
    """Return a pipeline whose ranks are threads."""
    words = {"balance": [2, 3], "micro_batches": 2, "executor": "threads", **words}
    return ps.Pipeline(
        model, loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **words
    )


def same(one, other):
    """Whether two states are bitwise equal, including names and order."""
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("way", WAYS)
def test_an_average_is_bitwise_that_of_torch(way):
    """Every kind of average gives torch's bits, with tied weights and with buffers."""
    words, torchs = WAYS[way]
    model = tied_model()
    pipe = pipeline(model)
    average, plain = pipe.ema(**words()), AveragedModel(model, **torchs())
    for number in range(4):
        pipe.train_batch(X + number, Y)
        average.update()
        plain.update_parameters(model)
    assert average.n_averaged == 4
    assert same(average.model_state(), plain.module.state_dict())
    assert same(average.state_dict(), plain.state_dict())
    assert not same(average.model_state(), model.state_dict())


def test_a_pipeline_evaluates_and_saves_with_averaged_weights_and_goes_on_with_its_own():
    """Evaluation and saving use the average, and training continues with the trained weights."""
    model = tied_model()
    pipe = pipeline(model)
    average = pipe.ema(0.9)
    for number in range(3):
        pipe.train_batch(X + number, Y)
        average.update()
    before = pipe.state_dict()
    plain = tied_model()
    plain.load_state_dict(average.model_state())
    with average.applied():
        loss, output = pipe.eval_batch(X, Y), pipe.forward(X)
        assert same(pipe.state_dict(), plain.state_dict())
    assert torch.allclose(output, plain.eval()(X), atol=1e-6)
    assert float(loss) == pytest.approx(
        float(nn.functional.mse_loss(plain(X), Y).detach()), rel=1e-6
    )
    assert same(pipe.state_dict(), before)


def test_an_average_continues_from_torchs_state_under_another_cut():
    """Averages saved on one device and under other plans can be restored."""
    model = tied_model()
    plain = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    plain.update_parameters(model)
    pipe = pipeline(model, balance=[1, 2, 2])
    average = pipe.ema(0.9)
    average.load_state_dict(plain.state_dict())
    pipe.train_batch(X, Y)
    average.update()
    plain.update_parameters(model)
    assert average.n_averaged == 2
    assert same(average.state_dict(), plain.state_dict())


def test_an_asynchronous_schedule_drains_for_its_average():
    """An average contains complete updates only, as an evaluation does."""
    model = nn.Sequential(*list(tied_model())[:4])
    pipe = pipeline(model, balance=[2, 2], schedule="pipedream")
    average, plain = pipe.ema(0.9), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for number, _ in enumerate(pipe.train([(X + i, Y) for i in range(6)])):
        if number % 3 == 2:
            average.update()
            plain.update_parameters(model)
    assert same(average.model_state(), plain.module.state_dict())
    with average.applied():
        output = pipe.forward(X)
    assert torch.allclose(output, plain.module.eval()(X), atol=1e-6)
    assert same(pipe.state_dict(), model.state_dict())
    for _ in pipe.train([(X, Y)] * 3):
        pass


def test_invalid_averages_are_refused():
    """The message says what is wrong and what to do."""
    pipe = pipeline(tied_model())
    with pytest.raises(
        SettingError, match=r"decay is from 0 to 1, or None for a plain mean, not 1.5"
    ):
        pipe.ema(1.5)
    average = pipe.ema()
    with pytest.raises(
        SettingError, match=r"there is no average yet: call update\(\) after a training step"
    ):
        average.state_dict()
    with pytest.raises(SettingError, match="the state has no 'n_averaged': load what Average"):
        average.load_state_dict(pipe.state_dict())
    average.update()
    state = average.state_dict()
    with pytest.raises(SettingError, match=r"has no module\.0\.weight"):
        average.load_state_dict(
            {key: value for key, value in state.items() if key != "module.0.weight"}
        )
    with pytest.raises(SettingError, match=r"has shape \(2,\) for module\.0\.bias"):
        average.load_state_dict({**state, "module.0.bias": torch.ones(2)})
    with pytest.raises(SettingError, match=r"has shape \(1, 4\) for module\.0\.bias"):
        average.load_state_dict({**state, "module.0.bias": torch.ones(1, 4)})


def test_the_model_is_filled_from_the_pipeline():
    """`load_into` fills another model; with threads the pipeline's own has the values anyway."""
    pipe = pipeline(tied_model())
    pipe.train_batch(X, Y)
    other = tied_model()
    pipe.load_into(other)
    assert same(dict(other.state_dict()), pipe.model_state())
    with torch.device("meta"):
        nowhere = tied_model()
    with pytest.raises(SettingError, match="the model is on the meta device"):
        pipe.load_into(nowhere)
    with pytest.raises(SettingError, match=r"8 tensors are in only one of the two, .*'2.weight'"):
        pipe.load_into(nn.Sequential(nn.Linear(4, 4)))


def test_buffers_of_a_state_are_loaded_and_those_that_it_lacks_stay():
    """`state_dict` of a model has no buffers that are not persistent."""
    average = pipeline(tied_model()).ema(0.9, use_buffers=True)
    average.update()
    state = {name: tensor.clone() for name, tensor in average.state_dict().items()}
    state["module.3.running_mean"].fill_(7.0)
    mean, variance = state["module.3.running_mean"], state.pop("module.3.running_var")
    average.load_state_dict(state)
    assert torch.equal(average.state_dict()["module.3.running_mean"], mean)
    assert torch.equal(average.state_dict()["module.3.running_var"], variance)
    state["module.3.running_mean"] = torch.ones(2)
    with pytest.raises(SettingError, match=r"has shape \(2,\) for module\.3\.running_mean"):
        average.load_state_dict(state)


@pytest.mark.parametrize("count", [0, 5])
def test_the_average_of_a_checkpoint_goes_on_from_its_number_of_updates(count):
    """Of all stages; at 0 the next update takes the weights as they are."""
    model = tied_model()
    pipe = pipeline(model)
    average = pipe.ema(None)
    average.update()
    before = {name: tensor.clone() for name, tensor in average.model_state().items()}
    pipe.train_batch(X, Y)
    average.restart(count)
    assert average.n_averaged == count
    average.update()
    assert average.n_averaged == count + 1
    current, state = pipe.state_dict(), average.model_state()
    for name in ("0.weight", "2.bias", "3.weight"):
        mean = before[name] + (current[name] - before[name]) / (count + 1)
        torch.testing.assert_close(state[name], mean)


def test_averaged_tensors_of_a_stage_are_live_and_have_the_names_of_the_model():
    """Checkpoints write and read them stage by stage."""
    pipe = pipeline(tied_model())
    average = pipe.ema(0.5)
    average.update()
    first, second = pipe._assembly.stages
    assert {"0.weight", "0.bias"} <= average.averaged(first).keys()
    assert {"2.weight", "2.bias", "3.running_mean"} <= average.averaged(second).keys()
    with torch.no_grad():
        for tensor in average.averaged(second).values():
            tensor.fill_(3)
    state = average.model_state()
    assert (state["2.bias"] == 3).all()
    assert not (state["0.bias"] == 3).any()


def test_a_state_that_is_refused_changes_nothing():
    """Of no stage, and not the number of updates."""
    pipe = pipeline(tied_model())
    average = pipe.ema(0.5)
    average.update()
    before = {name: tensor.clone() for name, tensor in average.state_dict().items()}
    state = {name: tensor + 1 for name, tensor in before.items()}
    del state["module.3.weight"]
    with pytest.raises(SettingError, match=r"has no module\.3\.weight, which has shape \(4,\)"):
        average.load_state_dict(state)
    assert same(average.state_dict(), before)


def test_weights_come_back_after_an_error_in_the_block():
    """And are the pipeline's own tensors again, with their gradients."""
    pipe = pipeline(tied_model())
    average = pipe.ema(0.5)
    average.update()
    pipe.train_batch(X, Y)
    before, tensors = pipe.state_dict(), list(pipe.parameters())
    with pytest.raises(ValueError, match="planted"), average.applied():
        raise ValueError("planted")
    assert same(pipe.state_dict(), before)
    assert all(one is other for one, other in zip(pipe.parameters(), tensors, strict=True))


@pytest.mark.parametrize("decay", [0.0, 1.0])
def test_decays_at_the_ends_of_the_range_are_allowed(decay):
    """The last weights, or the first ones."""
    pipe = pipeline(tied_model())
    average = pipe.ema(decay)
    average.update()
    first = pipe.state_dict()
    pipe.train_batch(X, Y)
    average.update()
    expected = first if decay else pipe.state_dict()
    assert torch.equal(average.model_state()["0.weight"], expected["0.weight"])
    for wrong in (-0.1, 1.1):
        with pytest.raises(SettingError, match=f"not {wrong}"):
            pipe.ema(wrong)


def test_a_rank_without_a_stage_takes_part_in_an_average():
    """A plan may leave ranks idle, which make the same calls and count the same updates."""
    calls = []
    pipe = SimpleNamespace(_enter=calls.append, model_state=lambda: {"weight": X}, state_dict=dict)
    average = Average(pipe, [], [])
    with pytest.raises(SettingError, match="there is no average yet"):
        average.model_state()
    average.update()
    assert average.n_averaged == 1
    assert average.model_state() == {"weight": X}
    assert average.state_dict() == {}
    average.load_state_dict({"n_averaged": torch.tensor(7)})
    assert average.n_averaged == 7
    average.restart(3)
    assert average.n_averaged == 3
    assert calls == [
        f"ema.{call}" for call in ("applied", "update", "applied", "applied", "load_state_dict")
    ]


def test_a_pipeline_with_an_idle_rank_is_averaged_and_saved(tmp_path):
    """The checkpoint has the number of updates."""
    schedule = ps.schedule("gpipe", 2, 2)
    schedule = dataclasses.replace(schedule, programs=(*schedule.programs, ()))
    pipe = pipeline(tied_model(), schedule=schedule, micro_batches=None)
    average = pipe.ema()
    pipe.train_batch(X, Y)
    average.update()
    pipe.save(tmp_path)
    average.restart(0)
    pipe.load(tmp_path)
    assert average.n_averaged == 1
