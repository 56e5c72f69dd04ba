"""Layers whose forwards read state that forwards change are refused in copies of a stage."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.stage.replicated_layers import Centred, data, model_of, pipeline
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import RunError


class Replaced(Centred):
    """The same, with a new buffer every time."""

    def forward(self, x):
        output = self.inner(x)
        self.centre = 0.9 * self.centre + 0.1 * output.detach().mean(0)
        return output - self.centre


class Counted(Centred):
    """Changes its behaviour after a number of forwards, counted in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.count += 1
        return self.inner(x) * (2 if self.count > 3 else 1)


class Called(Centred):
    """The same with a Python attribute."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x) * (2 if self.calls > 3 else 1)


class Queued(Centred):
    """Uses the outputs of earlier forwards."""

    def __init__(self):
        super().__init__()
        self.queue = []

    def forward(self, x):
        output = self.inner(x)
        self.queue.append(output.detach().mean(0))
        return output - torch.stack(self.queue[-3:]).mean(0)


class Clamped(Centred):
    """Changes its weight in the forward, unseen by autograd."""

    def forward(self, x):
        self.inner.weight.data.clamp_(-0.1, 0.1)
        return self.inner(x)


class Penalised(torch.autograd.Function):
    """Reads a buffer in its backward only."""

    @staticmethod
    def forward(ctx, value, centre):
        ctx.centre = centre
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad + ctx.centre, None


class ReadBackwards(Centred):
    """Has a buffer that only the backward reads."""

    def forward(self, x):
        output = self.inner(x)
        with torch.no_grad():
            self.centre.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        return Penalised.apply(output, self.centre)


class Own(Centred):
    """Hand-written batch norm, whose training writes running statistics and does not read them."""

    def forward(self, x):
        output = self.inner(x)
        with torch.no_grad():
            self.centre.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        return output - output.mean(0)


class Recording(Centred):
    """Stores its outputs, a log and a cache, and reads only the cache."""

    def __init__(self):
        super().__init__()
        self.last, self.log, self.scale = None, [], None

    def forward(self, x):
        if self.scale is None:
            self.scale = torch.full((4,), 2.0)
        self.last = self.inner(x) * self.scale
        self.log.append(float(self.last.detach().sum()))
        return self.last


def hooked(make_hook):
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(make_hook())
    return layer


def counting_hook():
    state = {"calls": 0}

    def hook(module, inputs, output):
        state["calls"] += 1
        return output * state["calls"]

    return hook


def doubling_hook():
    return lambda module, inputs, output: output * 2


def recording_hook():
    outputs = []
    return lambda module, inputs, output: outputs.append(output.detach())


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize(
    ("middle", "reason"),
    [
        (Centred, "buffer 1.centre is changed by a forward and read by the next"),
        (Replaced, "buffer 1.centre is changed by a forward and read by the next"),
        (Counted, "buffer 1.count is changed by a forward and read by the next"),
        (Called, "1.calls is changed by every forward"),
        (Queued, "1.queue is changed by every forward"),
        (Clamped, "weight 1.inner.weight is changed by the forward itself"),
        (ReadBackwards, "buffer 1.centre is changed by a forward and read by the next"),
        (
            lambda: hooked(counting_hook),
            "the hook counting_hook.<locals>.hook of 1: state is changed by every forward",
        ),
    ],
)
def test_state_that_forwards_move_and_read_is_refused_before_the_update(middle, reason, recompute):
    """Each replica would read the state of its own micro-batches alone, and train otherwise."""
    model = model_of(middle())
    before = {name: value.clone() for name, value in model[0].state_dict().items()}
    pipe = pipeline(model, recompute=recompute)
    with pytest.raises(RunError, match="chimera holds copies of stage 0") as caught:
        pipe.train_batch(*data())
    assert reason in str(caught.value)
    assert "schedule='1f1b'" in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in model[0].state_dict().items())


@pytest.mark.parametrize(
    "middle",
    [
        Own,
        Recording,
        lambda: nn.BatchNorm1d(4),
        lambda: nn.utils.weight_norm(nn.Linear(4, 4)),
        lambda: hooked(recording_hook),
        lambda: hooked(doubling_hook),
    ],
)
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
def test_state_that_is_only_written_may_have_copies(middle, recompute):
    """Running statistics, logs, caches and stateless hooks do not affect training: two steps equal
    plain training.
    """
    model = model_of(middle())
    start = [parameter.detach().clone() for parameter in model.parameters()]
    x, y = data()
    pipe = pipeline(model, recompute=recompute)
    for _ in range(2):
        pipe.train_batch(x, y)
    trained = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), start, strict=True):
            parameter.copy_(value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
            (functional.mse_loss(model(part), target) / 4).backward()
        optimizer.step()
    for parameter, value in zip(model.parameters(), trained, strict=True):
        assert torch.allclose(parameter, value, atol=1e-6)


class Overwriting(Recording):
    """Changes its input in place, and has a log."""

    def forward(self, x):
        return super().forward(x.add_(1))


def test_a_first_layer_that_changes_its_input_is_observed_on_copies():
    """Its second run, which shows whether a log is read, has the input of the first."""
    model = nn.Sequential(Overwriting(), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    plain = copy.deepcopy(model)
    x, y = data()
    loss = pipeline(model).train_batch(x.clone(), y)
    torch.testing.assert_close(loss, functional.mse_loss(plain(x.clone()), y).detach())


def replace_centre(layer):
    """Put a tensor of the same version in the place of the buffer."""
    other = layer.centre + 1.0
    while other._version < layer.centre._version:
        other.add_(0.0)
    layer.centre = other


@pytest.mark.parametrize("move", [lambda layer: layer.centre.add_(1.0), replace_centre])
def test_a_buffer_that_begins_to_move_later_is_refused(move):
    """Buffers that change only after the first micro-batch are detected by their identity and their
    version.
    """

    class Late(Centred):
        moves = False

        def __init__(self):
            super().__init__()
            self.register_buffer("fixed", torch.ones(4))

        def forward(self, x):
            if self.moves:
                move(self)
            return self.inner(x)

    late = Late()
    pipe = pipeline(model_of(late))
    pipe.train_batch(*data())
    Late.moves = True
    text = r"buffer 1\.centre is changed by the forward, which it was"
    with pytest.raises(RunError, match=text) as caught:
        pipe.train_batch(*data())
    assert "1.fixed" not in str(caught.value)


class CountingLoss(nn.Module):
    """A loss that counts samples in a buffer, in place or in a new tensor."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place
        self.register_buffer("samples", torch.zeros(()))

    def forward(self, output, target):
        if self.in_place:
            self.samples += len(output)
        else:
            self.samples = self.samples + len(output)
        return ((output - target) ** 2).mean()


@pytest.mark.parametrize("in_place", [True, False])
def test_a_loss_that_moves_a_buffer_is_refused_in_copies(in_place):
    """A buffer of the loss is state that forwards change, too. An evaluation trains nothing."""
    model = model_of(nn.Tanh())
    pipe = ps.Pipeline(
        model,
        loss=CountingLoss(in_place),
        balance=[2, 2],
        schedule="chimera",
        micro_batches=4,
        executor="threads",
    )
    assert pipe.eval_batch(*data()).isfinite()
    with pytest.raises(RunError, match=r"a buffer of the loss \(CountingLoss\) is changed"):
        pipe.train_batch(*data())


def test_layers_that_move_state_may_be_evaluated_in_copies():
    """Nothing is trained by it; a batch of training is refused afterwards."""
    pipe = pipeline(model_of(Centred()))
    assert pipe.eval_batch(*data()).isfinite()
    with pytest.raises(RunError, match=r"buffer 1\.centre is changed by a forward and read"):
        pipe.train_batch(*data())


def _refused_in_processes():
    torch.manual_seed(0)  # every rank makes its own model
    try:
        pipe = ps.Pipeline(
            model_of(Centred()),
            loss=functional.mse_loss,
            balance=[2, 2],
            schedule="chimera",
            micro_batches=4,
            deadline_s=60,
        )
        pipe.train_batch(*data())
    except RunError as error:
        return str(error)
    return ""


def test_all_processes_stop_with_the_reason():
    """The rank that detects it first stops the others, which report its reason."""
    messages = ps.launch(_refused_in_processes, ranks=2)
    assert all(
        "buffer 1.centre is changed by a forward and read by the next" in text for text in messages
    )
