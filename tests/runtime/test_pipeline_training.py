"""What a pipeline computes over a series of calls, against plain PyTorch."""

from __future__ import annotations

import random

import pytest
import torch
from tests.runtime.failing import Trap
from torch import nn

import penstock as ps
from penstock.errors import RunError, SettingError


def network():
    """Return a model with all that evaluation must leave alone: dropout and running statistics."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 2)
    ).double()


def plain_layers():
    """Return a model without dropout and running statistics."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def sgd(parameters):
    """Return an optimizer with state."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def threads(model, balance, **options):
    """Return a pipeline of threads with the mean squared error."""
    options = {"optimizer": sgd, "schedule": "1f1b", "micro_batches": 2, **options}
    return ps.Pipeline(
        model, loss=nn.functional.mse_loss, balance=balance, executor="threads", **options
    )


def data(number, samples=4):
    """Return a batch; other numbers give other values."""
    generator = torch.Generator().manual_seed(number)
    options = {"generator": generator, "dtype": torch.float64}
    return torch.randn(samples, 4, **options), torch.randn(samples, 2, **options)


class Plain:
    """The same training in plain PyTorch, with the rules of accumulation written out."""

    def __init__(self, model, accumulate):
        self.model, self.accumulate = model, accumulate
        self.optimizer = sgd(model.parameters())
        self.waiting = self.step = 0

    def train(self, x, y, update):
        """Train a batch; return its loss."""
        loss = nn.functional.mse_loss(self.model(x), y)
        (loss / self.accumulate).backward()
        self.waiting, self.step = self.waiting + 1, self.step + 1
        if self.waiting >= self.accumulate if update is None else update:
            self.update()
        return loss.detach()

    def update(self):
        """Step with the gradients that wait, if there are any."""
        if self.waiting:
            self.optimizer.step()
        self.zero()

    def zero(self):
        """Drop the gradients."""
        self.optimizer.zero_grad()
        self.waiting = 0


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 1e6}])
def test_any_series_of_calls_trains_as_plain_pytorch(seed, options):
    """Batches that update, wait or follow `accumulate`, updates by hand and dropped gradients; also
    where all ranks step together.
    """
    rng = random.Random(seed)
    accumulate = rng.choice([1, 2, 3])
    model, plain = plain_layers(), Plain(plain_layers(), accumulate)
    pipe = threads(model, [2, 1], accumulate=accumulate, **options)
    for number in range(12):
        call = rng.choice(["train", "train", "train", "update", "zero", "eval"])
        x, y = data(number)
        if call == "train":
            update = rng.choice([None, None, None, True, False])
            loss = pipe.train_batch(x, y, update=update)
            torch.testing.assert_close(loss, plain.train(x, y, update).float())
        elif call == "update":
            pipe.update()
            plain.update()
        elif call == "zero":
            pipe.zero_grad()
            plain.zero()
        else:
            expected = nn.functional.mse_loss(plain.model(x), y).detach().float()
            torch.testing.assert_close(pipe.eval_batch(x, y), expected)
        assert (pipe.step, pipe._accumulated) == (plain.step, plain.waiting)
        torch.testing.assert_close(pipe.state_dict(), dict(plain.model.state_dict()))
    pipe.close()


def test_a_batch_that_fails_leaves_no_gradients_that_wait():
    """Those of earlier batches are dropped with it, and it is not counted as a step."""
    trap = Trap(at=2)
    pipe = threads(nn.Sequential(*plain_layers(), trap), [2, 2], accumulate=3)
    pipe.train_batch(*data(0))
    with pytest.raises(RunError, match="a planted failure"):
        pipe.train_batch(*data(1))
    assert (pipe.step, pipe._accumulated) == (1, 0)
    before = pipe.state_dict()
    pipe.update()
    torch.testing.assert_close(pipe.state_dict(), before, rtol=0, atol=0)
    for number in range(3):
        pipe.train_batch(*data(number))
        changed = not torch.equal(pipe.state_dict()["0.weight"], before["0.weight"])
        assert changed == (number == 2)


def test_evaluation_is_that_of_the_model_and_leaves_everything_alone():
    """Weights, waiting gradients, running statistics, modes and random numbers."""
    model, plain = network(), network()
    pipe = threads(model, [2, 3], accumulate=2)
    pipe.train_batch(*data(0))
    plain.load_state_dict(pipe.state_dict())
    gradients = [parameter.grad.clone() for parameter in pipe.parameters()]
    state, random_state = pipe.state_dict(), torch.get_rng_state()
    x, y = data(1, samples=3)
    expected = plain.eval()(x).detach()
    torch.testing.assert_close(pipe.forward(x), expected)
    torch.testing.assert_close(pipe.eval_batch(x, y), nn.functional.mse_loss(expected, y).float())
    assert all(layer.training for layer in model)
    assert torch.equal(torch.get_rng_state(), random_state)
    torch.testing.assert_close(pipe.state_dict(), state, rtol=0, atol=0)
    for parameter, gradient in zip(pipe.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
    assert (pipe.step, pipe._accumulated) == (1, 1)


def test_an_evaluation_that_fails_leaves_everything_alone():
    """All layers are in training mode again, and waiting gradients and their number stay."""
    trap = Trap(at=2)
    model = nn.Sequential(*network(), trap)
    pipe = threads(model, [3, 3], accumulate=2)
    pipe.train_batch(*data(0))
    gradients = [parameter.grad.clone() for parameter in pipe.parameters()]
    state = pipe.state_dict()
    with pytest.raises(RunError, match="a planted failure"):
        pipe.eval_batch(*data(1))
    assert all(layer.training for layer in model)
    assert (pipe.step, pipe._accumulated) == (1, 1)
    torch.testing.assert_close(pipe.state_dict(), state, rtol=0, atol=0)
    for parameter, gradient in zip(pipe.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_calls_that_cannot_be_answered_are_refused():
    """With what is missing."""
    pipe = threads(plain_layers(), [2, 1], optimizer=None)
    x, y = data(0)
    for call in (pipe.train_batch, pipe.eval_batch):
        with pytest.raises(SettingError, match="a batch needs targets for its loss, not None"):
            call(x, None)
    with pytest.raises(SettingError, match="nothing to step: this pipeline has no optimizer"):
        pipe.update()
    with pytest.raises(SettingError, match="pairs"):
        list(pipe.train([x]))
    stream = threads(plain_layers(), [2, 1], schedule="pipedream", micro_batches=1)
    for update in (True, False):
        with pytest.raises(SettingError, match="update= is for synchronous schedules"):
            stream.train_batch(x, y, update=update)
    assert (pipe.step, stream.step) == (0, 0)


def test_a_loop_over_a_loader_gives_the_losses_of_its_batches_in_order():
    """One by one, so that the caller may stop in between."""
    pipe, other = threads(plain_layers(), [2, 1]), threads(plain_layers(), [2, 1])
    losses = pipe.train(map(data, range(4)))
    for number in range(3):
        assert float(next(losses)) == float(other.train_batch(*data(number)))
        assert pipe.step == number + 1


def test_a_single_batch_of_a_stream_gives_its_own_loss():
    """Also if those of an iterator that was left wait before it; these are not yielded later."""
    options = {"schedule": "pipedream", "micro_batches": 1}
    pipe, other = (threads(plain_layers(), [2, 1], **options) for _ in range(2))
    for number in range(4):
        x, y = data(number)
        pipe._feed(pipe._stream, pipe._batch(x, y, training=True, call="train_batch"))
    expected = [float(loss) for loss in other.train(map(data, range(5)))]
    assert len(set(expected)) == 5
    assert float(pipe.train_batch(*data(4))) == expected[4]
    assert pipe.step == other.step == 5
    assert [float(loss) for loss in pipe.train([data(5)])] == [
        float(loss) for loss in other.train([data(5)])
    ]


@pytest.mark.parametrize("name", ["pipedream", "2bw", "avgpipe", "hetpipe", "pipemare"])
def test_new_weights_begin_new_versions_of_a_stream(name):
    """Batches in flight belong to the weights from before, and so do the losses that wait, the
    copies of a rule and its velocities.
    """
    options = {
        "schedule": "pipedream" if name == "pipemare" else name,
        "micro_batches": 2 if name == "2bw" else 1,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    }
    if name == "pipemare":
        options["weights"] = name
    pipe, other = (threads(plain_layers(), [2, 1], **options) for _ in range(2))
    start = pipe.state_dict()
    losses = pipe.train(map(data, range(9)))
    next(losses)
    pipe.load_state_dict(start)
    assert [float(loss) for loss in pipe.train(map(data, range(5)))] == [
        float(loss) for loss in other.train(map(data, range(5)))
    ]
    torch.testing.assert_close(pipe.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_a_checkpoint_of_a_stream_has_what_its_weight_rule_keeps(tmp_path):
    """Here one copy of the weights for each of the pipelines that take turns."""
    pipe, other = (threads(plain_layers(), [2, 1], schedule="avgpipe") for _ in range(2))
    list(pipe.train(map(data, range(4))))
    pipe.save(tmp_path)
    other.load(tmp_path)
    assert [float(loss) for loss in pipe.train(map(data, range(4, 9)))] == [
        float(loss) for loss in other.train(map(data, range(4, 9)))
    ]


def test_names_that_a_state_lacks_or_has_in_excess_are_returned_or_refused():
    """As `torch.nn.Module.load_state_dict` does."""
    pipe = threads(plain_layers(), [2, 1])
    state = pipe.state_dict()
    other = {name: tensor + 1 for name, tensor in state.items()}
    bias = other.pop("2.bias")
    other["surplus"] = torch.ones(1)
    with pytest.raises(SettingError, match="surplus"):
        pipe.load_state_dict(other)
    assert torch.equal(pipe.state_dict()["0.bias"], state["0.bias"])
    missing, unexpected = pipe.load_state_dict(other, strict=False)
    assert (list(missing), list(unexpected)) == (["2.bias"], ["surplus"])
    assert torch.equal(pipe.state_dict()["0.bias"], other["0.bias"])
    assert not torch.equal(pipe.state_dict()["2.bias"], bias)


def test_a_stream_that_has_failed_goes_on_from_loaded_weights():
    """They are those of no batch; without them its stages have had different updates."""
    options = {
        "schedule": "pipedream",
        "micro_batches": 1,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    }
    pipe = threads(nn.Sequential(*plain_layers(), Trap(at=2)), [2, 2], **options)
    other = threads(plain_layers(), [2, 1], **options)
    start = pipe.state_dict()
    with pytest.raises(RunError, match="a planted failure"):
        list(pipe.train(map(data, range(4))))
    with pytest.raises(RunError, match="cannot go on after a batch that failed"):
        pipe.train_batch(*data(0))
    pipe.load_state_dict(start)
    assert [float(loss) for loss in pipe.train(map(data, range(3)))] == [
        float(loss) for loss in other.train(map(data, range(3)))
    ]


@pytest.mark.parametrize(
    ("schedule", "parts"),
    [("pipedream", 1), ("hetpipe", 1), (ps.schedule("terapipe", 2, 2, slices=3), 6)],
    ids=["stream", "waves", "slices"],
)
def test_every_kind_of_schedule_evaluates_whole_batches(schedule, parts):
    """In a stream a batch is one of many. A sequence is run in slices, which are joined again."""
    model = plain_layers()
    micro_batches = 1 if parts == 1 else None
    pipe = threads(plain_layers(), [2, 1], schedule=schedule, micro_batches=micro_batches)

    def forwards():
        return sum(event.op.stage == 0 for event in pipe.timeline().compute)

    for samples in (4, 3):
        x, y = torch.randn(samples, 6, 4).double(), torch.randn(samples, 6, 2).double()
        expected = model(x).detach()
        torch.testing.assert_close(pipe.forward(x), expected)
        assert forwards() == parts
        loss = nn.functional.mse_loss(expected, y).float()
        torch.testing.assert_close(pipe.eval_batch(x, y), loss)
        assert forwards() == parts
