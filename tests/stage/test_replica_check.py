"""Replicas of a stage train to the numbers of a single copy, or are refused before any update."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import RunError, SettingError


class Centred(nn.Module):
    """Subtracts a running mean, which every forward changes."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x):
        output = self.inner(x)
        with torch.no_grad():
            self.centre.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        return output - self.centre


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


def model_of(middle, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), middle, nn.Tanh(), nn.Linear(4, 2))


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


def pipeline(model, schedule="chimera", **options):
    options = {"balance": [2, 2], "micro_batches": 4, "executor": "threads", **options}
    return ps.Pipeline(
        model,
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        schedule=schedule,
        **options,
    )


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)


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


def test_a_buffer_that_begins_to_move_later_is_refused():
    """Buffers that change only after the first micro-batch are detected by their versions."""

    class Late(Centred):
        moves = False

        def forward(self, x):
            if self.moves:
                self.centre.add_(1.0)
            return self.inner(x)

    late = Late()
    pipe = pipeline(model_of(late))
    pipe.train_batch(*data())
    Late.moves = True
    with pytest.raises(RunError, match=r"buffer 1\.centre is changed by the forward, which it was"):
        pipe.train_batch(*data())


def clipped():
    layer = nn.Linear(4, 4)
    layer.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    return layer


def clipped_afterwards():
    layer = nn.Linear(4, 4)

    def clip(weight):
        weight.grad.clamp_(-1e-3, 1e-3)

    layer.weight.register_post_accumulate_grad_hook(clip)
    return layer


def with_backward_hook():
    layer, calls = nn.Linear(4, 4), [0]

    def hook(module, grad_inputs, grad_outputs):
        calls[0] += 1
        return (grad_inputs[0] * calls[0],)

    layer.register_full_backward_hook(hook)
    return layer


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*")
@pytest.mark.parametrize(
    ("middle", "reason"),
    [
        (clipped, r"weight has a gradient hook \(register_hook\)"),
        (clipped_afterwards, r"weight has a gradient hook \(register_post_accumulate_grad_hook\)"),
        (with_backward_hook, r"hook \(register_full_backward_hook\) changes variables of its own"),
        (
            lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
            "spectral_norm of weight moves its power iteration",
        ),
        (
            lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
            "spectral_norm of weight moves",
        ),
    ],
)
def test_hooks_and_spectral_norms_are_refused_at_construction(middle, reason):
    """Without running a batch; the message names the stage and the layer."""
    with pytest.raises(SettingError, match=reason) as caught:
        pipeline(model_of(middle()))
    assert "stage 0 (ranks 0, 1): layer 1 " in str(caught.value)


def test_embeddings_with_max_norm_are_refused_at_construction():
    """The forward of one replica would renormalise only the rows that it has looked up."""
    model = nn.Sequential(
        nn.Embedding(9, 4, max_norm=1.0), nn.EmbeddingBag(9, 4, max_norm=2.0), nn.Linear(4, 2)
    )
    with pytest.raises(
        SettingError, match=r"layer 0 \(Embedding\): max_norm=1\.0 changes"
    ) as caught:
        pipeline(model, balance=[2, 1])
    assert "layer 1 (EmbeddingBag): max_norm=2.0" in str(caught.value)


@pytest.mark.parametrize("middle", [Centred, clipped, clipped_afterwards])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_one_copy_of_each_stage_trains_to_the_same_numbers_as_plain_accumulation(middle, schedule):
    """With changing state, and with hooks that run once per micro-batch as in one process."""
    x, y = data()
    plain = model_of(middle())
    weights = {name: value.clone() for name, value in plain.state_dict().items()}
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
            (functional.mse_loss(plain(part), target) / 4).backward()
        optimizer.step()
    model = model_of(middle())
    model.load_state_dict(weights)
    pipe = pipeline(model, schedule=schedule)
    for _ in range(2):
        pipe.train_batch(x, y)
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name


class Head(nn.Module):
    """A projection by the table of an embedding."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return functional.linear(x, self.weight)


def test_a_hook_on_a_weight_of_two_stages_is_refused():
    """It would see the gradient of each use; in one process it sees their sum."""
    table = nn.Embedding(9, 4)
    table.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    model = nn.Sequential(table, nn.Tanh(), Head(table.weight))
    with pytest.raises(SettingError, match=r"0\.weight has a gradient hook .* used by stages 0, 1"):
        pipeline(model, "1f1b", balance=[2, 1])


def test_a_table_with_max_norm_that_another_stage_uses_is_refused():
    """The other stage would use rows that the embedding has renormalised meanwhile."""
    table = nn.Embedding(9, 4, max_norm=1.0)
    model = nn.Sequential(table, nn.Tanh(), Head(table.weight))
    with pytest.raises(SettingError, match=r"0\.weight has max_norm and is used by stages 0, 1"):
        pipeline(model, "1f1b", balance=[2, 1])


def test_a_hook_on_a_weight_without_memory_is_refused():
    """The parameter that replaces it would not have the hook."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    with pytest.raises(SettingError, match=r"0\.weight has a gradient hook .* on the meta device"):
        pipeline(model, "1f1b", balance=[1, 1])


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_a_hook_that_steps_its_weight_needs_one_micro_batch(schedule):
    """Forwards of later micro-batches have used the old weight; in one process they use the new."""

    def model():
        layer = nn.Linear(4, 4)

        def step(weight):
            with torch.no_grad():
                weight -= 0.1 * weight.grad
            weight.grad = None

        layer.weight.register_post_accumulate_grad_hook(step)
        return model_of(layer)

    with pytest.raises(RunError, match=r"changes the weight during the backward of a micro-batch"):
        pipeline(model(), schedule, micro_batches=2).train_batch(*data())
    pipeline(model(), schedule, micro_batches=1).train_batch(*data())


def test_a_loss_that_moves_a_buffer_is_refused_in_copies():
    """A buffer of the loss is state that forwards change, too."""

    class CountingLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("samples", torch.zeros(()))

        def forward(self, output, target):
            self.samples += len(output)
            return ((output - target) ** 2).mean()

    model = model_of(nn.Tanh())
    pipe = ps.Pipeline(
        model,
        loss=CountingLoss(),
        balance=[2, 2],
        schedule="chimera",
        micro_batches=4,
        executor="threads",
    )
    with pytest.raises(RunError, match=r"a buffer of the loss \(CountingLoss\) is changed"):
        pipe.train_batch(*data())


class Mean(nn.Module):
    """Returns the mean of the rows that a bag has looked up."""

    def forward(self, x):
        return x.mean(1)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
        lambda parameters: torch.optim.SparseAdam(parameters, lr=0.01),
    ],
)
def test_sparse_gradients_of_copies_add_up_to_those_of_plain_training(optimizer):
    """They have the rows that any replica has used, and no others: SparseAdam steps only these."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 4, sparse=True), Mean(), nn.Tanh())
    plain = copy.deepcopy(model)
    stepping = optimizer(list(plain.parameters()))
    pipe = ps.Pipeline(
        model,
        loss=nn.MSELoss(),
        optimizer=optimizer,
        balance=[2, 1],
        schedule="chimera",
        micro_batches=4,
        executor="threads",
    )
    for _ in range(3):
        x, y = torch.randint(0, 50, (8, 3)), torch.randn(8, 4)
        pipe.train_batch(x, y)
        stepping.zero_grad()
        functional.mse_loss(plain(x), y).backward()
        stepping.step()
    assert torch.allclose(model[0].weight, plain[0].weight, atol=1e-6)


def test_sparse_gradients_of_a_traced_model_are_refused_in_copies():
    """A traced layer does not declare its sparse gradients; the first forward shows them."""

    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.table(x).mean(1))

    x = torch.randint(0, 9, (8, 3))
    pipe = pipeline(ps.chain(Bag(), x), balance=[1, 1])
    with pytest.raises(RunError, match=r"weight table\.weight has sparse gradients"):
        pipe.train_batch(x, torch.randn(8, 2))


def test_traced_batch_norm_may_have_copies_and_traced_spectral_norm_not():
    """A traced layer has no torch module in it: its reads and writes are followed op by op."""

    class Normed(nn.Module):
        def __init__(self, spectral):
            super().__init__()
            self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
            last = nn.Linear(4, 2)
            self.last = nn.utils.parametrizations.spectral_norm(last) if spectral else last

        def forward(self, x):
            return self.last(torch.relu(self.norm(self.first(x))))

    x, y = data()
    chain = ps.chain(Normed(False), x)
    pipeline(chain, balance=[2, len(chain) - 2]).train_batch(x, y)
    chain = ps.chain(Normed(True), x)
    pipe = pipeline(chain, balance=[2, len(chain) - 2])
    with pytest.raises(RunError, match="is changed by a forward and read by the next"):
        pipe.train_batch(x, y)


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
