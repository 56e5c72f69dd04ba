"""What crosses between stages, partitions and recomputed layers, against plain PyTorch: any
nesting, to the bit, or refused.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections import OrderedDict, UserDict
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import RunError, SettingError
from penstock.values.structure import tensors_of

WIDTH = 6


@dataclasses.dataclass
class State:
    """A dataclass."""

    h: object
    rest: object = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A frozen one."""

    h: object
    rest: object = None


@dataclasses.dataclass(slots=True)
class Slotted:
    """One with slots."""

    h: object
    rest: object = None


class Named(NamedTuple):
    """A named tuple."""

    h: object
    rest: object = None


class Plain:
    """No dataclass."""

    def __init__(self, h, rest=None):
        self.h, self.rest = h, rest


def user_dict(h, rest=None):
    """A mapping that is no dict."""
    return UserDict(h=h, rest=rest)


def ordered(h, rest=None):
    """An ordered dict, as outputs of models often are."""
    return OrderedDict(rest=rest, h=h)


def encoding(h, rest=None):
    """What tokenizers of transformers return."""
    return pytest.importorskip("transformers").BatchEncoding({"h": h, "rest": rest})


def model_output(h, rest=None):
    """What models of transformers return."""
    outputs = pytest.importorskip("transformers.modeling_outputs")
    return outputs.BaseModelOutput(last_hidden_state=h, hidden_states=rest)


WRAPS = [
    State,
    Frozen,
    Slotted,
    Named,
    Plain,
    user_dict,
    ordered,
    encoding,
    model_output,
    lambda h, rest=None: (h, rest),
    lambda h, rest=None: [rest, {"h": h}],
]


class Wrap(nn.Module):
    """A layer that returns a nested value drawn by its number; it takes any that another one has
    made.
    """

    def __init__(self, number, *, inplace=False):
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)
        self.number, self.inplace = number, inplace

    def forward(self, value):
        """Sum the floats that come in, and nest what is made of them."""
        draw = random.Random(self.number)
        tensors = [value] if isinstance(value, torch.Tensor) else tensors_of(value)
        floats = [tensor for tensor in tensors if tensor.is_floating_point()]
        if self.inplace:
            floats = [tensor.mul_(1.25) for tensor in floats]
        hidden = self.map(sum(floats))
        if self.number < 0:
            return hidden
        parts = [
            torch.tanh(hidden) + 0,
            hidden * 2,
            hidden.detach() + 1,
            hidden.argmax(-1),
            hidden > 0,
        ]
        wrapped = draw.choice(WRAPS)(hidden + 1, (parts[0], 3, None, "text", 0.5))
        for part in draw.sample(parts, draw.randint(1, 3)):
            wrapped = draw.choice(WRAPS)(
                wrapped if draw.random() < 0.5 else {"in": wrapped, "part": part}, [part]
            )
        return wrapped


def chain_of(seed):
    """Layers that pass each other random nestings; some begin in place."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    layers = [Wrap(100 * seed + i, inplace=i > 0 and draw.random() < 0.4) for i in range(4)]
    return nn.Sequential(*layers, Wrap(-1))


def plain_gradients(net, x, y, parts):
    """By the same micro-batches, accumulated."""
    net = copy.deepcopy(net)
    for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True):
        (functional.mse_loss(net(xs), ys) * (len(xs) / len(x))).backward()
    return [parameter.grad for parameter in net.parameters()]


def batch(samples=6):
    """Inputs and targets."""
    torch.manual_seed(1)
    return torch.randn(samples, WIDTH), torch.randn(samples, WIDTH)


def assert_same(net, expected):
    """To the bit."""
    for parameter, grad in zip(net.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, grad)


def assert_near(net, expected):
    """A Pipe's caller has the loss of the whole batch, which rounds otherwise than a sum of shares."""
    for parameter, grad in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


SEEDS = range(8)


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_pipe_passes_any_nesting_in_every_checkpoint_mode(seed, checkpoint):
    """A dataclass was one leaf, and no tensor: gradients before it were lost or 32 % off."""
    net, (x, y) = chain_of(seed), batch()
    expected = plain_gradients(net, x, y, 3)
    pipe = ps.Pipe(net, balance=[1, 2, 2], devices=["cpu"] * 3, chunks=3, checkpoint=checkpoint)
    for _ in range(2):
        net.zero_grad()
        functional.mse_loss(pipe(x), y).backward()
        assert_near(net, expected)


@pytest.mark.parametrize("recompute", ["never", "always", "except_last", [0, 2, 3], [1]])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_pipeline_passes_any_nesting_with_any_recompute(seed, recompute):
    """Recomputed layers that were given a dataclass and changed its tensor in place were 14 to 42 %
    off.
    """
    net, (x, y) = chain_of(seed), batch()
    expected = plain_gradients(net, x, y, 3)
    for balance in ([1, 2, 2], [5]):
        pipe = ps.Pipeline(
            net,
            balance=balance,
            schedule="1f1b",
            micro_batches=3,
            loss=functional.mse_loss,
            executor="threads",
            recompute=recompute,
        )
        for _ in range(2):
            net.zero_grad()
            pipe.train_batch(x, y)
            assert_same(net, expected)


# Inputs and outputs.


class Sum(nn.Module):
    """Takes any nesting, returns it as `wrap` makes it."""

    def __init__(self, wrap):
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)
        self.wrap = wrap

    def forward(self, value):
        """One linear map of the floats' sum."""
        return self.wrap(self.map(sum(tensors_of(value))))


@pytest.mark.parametrize("wrap", WRAPS[:-2], ids=lambda wrap: wrap.__name__)
def test_inputs_and_outputs_may_be_mappings_and_records(wrap):
    """BatchEncoding and UserDict had "no tensors"; a dataclass came to the self-check as a dict."""
    net = nn.Sequential(Sum(lambda h: h), Sum(wrap))
    x, y = batch()

    def loss(output, target):
        return functional.mse_loss(tensors_of(output)[0], target)

    pipe = ps.Pipeline(
        net, balance=[1, 1], schedule="gpipe", micro_batches=3, loss=loss, executor="threads"
    )
    pipe_output = pipe.forward(wrap(x))
    assert type(pipe_output) is type(net(wrap(x)))
    torch.testing.assert_close(tensors_of(pipe_output)[0], tensors_of(net(wrap(x)))[0])
    assert float(pipe.train_batch(wrap(x), y)) == pytest.approx(float(loss(net(wrap(x)), y)))
    assert pipe.compare_with_one_device(wrap(x), y).relative < 1e-5
    module = ps.Pipe(net, balance=[1, 1], devices=2, chunks=3)
    assert type(module(wrap(x))) is type(pipe_output)
    torch.testing.assert_close(tensors_of(module(wrap(x)))[0], tensors_of(pipe_output)[0])


def test_a_loader_of_dicts_is_refused_with_what_to_yield():
    """`for x, y in loader` unpacked the two keys."""
    pipe = ps.Pipeline(
        nn.Sequential(Sum(lambda h: h)),
        balance=[1],
        schedule="gpipe",
        micro_batches=2,
        loss=functional.mse_loss,
        executor="threads",
    )
    x, y = batch()
    for item in ({"input_ids": x, "labels": y}, torch.stack([x, y]), (x, y, y)):
        with pytest.raises(
            SettingError, match=r"the loader yields a .*takes pairs \(x, y\).*Yield pairs"
        ):
            next(pipe.train([item]))
    assert len(list(pipe.train([(x, y), [x, y]]))) == 2


@pytest.mark.parametrize("x", [torch.eye(4).to_sparse(), {"a": torch.eye(4).to_sparse()}])
def test_sparse_inputs_are_refused_by_name(x):
    """They cannot be cut; their values are no samples."""
    pipe = ps.Pipeline(
        nn.Sequential(Sum(lambda h: h)),
        balance=[1],
        schedule="gpipe",
        micro_batches=2,
        loss=functional.mse_loss,
        executor="threads",
    )
    with pytest.raises(SettingError, match="the inputs of a batch have a sparse tensor in them"):
        pipe.train_batch(x, torch.ones(4, WIDTH))


class Counted(nn.Module):
    """Returns a number that depends on the micro-batch."""

    def forward(self, x):
        """How many samples it has seen."""
        return State(x, len(x))


def test_outputs_whose_constants_differ_are_not_joined():
    """The first micro-batch's number is not the batch's."""
    pipe = ps.Pipeline(
        nn.Sequential(Sum(lambda h: h), Counted()),
        balance=[1, 1],
        schedule="gpipe",
        micro_batches=2,
        executor="threads",
        loss=lambda output, y: functional.mse_loss(output.h, y),
    )
    with pytest.raises(
        SettingError, match=r"has 3 for one micro-batch and 2 for another, at output\.rest"
    ):
        pipe.forward(torch.randn(5, WIDTH))
    with pytest.raises(RuntimeError, match="returned 3 for one micro-batch and 2 for another"):
        ps.Pipe(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), Counted()), balance=[1, 1], devices=2, chunks=2
        )(torch.randn(5, WIDTH))


# Tensors that share memory.


class Shared(nn.Module):
    """Returns tensors that share memory, as `views` takes them from one."""

    def __init__(self, views):
        super().__init__()
        self.map, self.views = nn.Linear(WIDTH, WIDTH), views

    def forward(self, x):
        """Views of one tensor."""
        return self.views(self.map(x) + 1)


class Works(nn.Module):
    """Changes the first of what it is given in place, then uses all."""

    def __init__(self, *, inplace=True):
        super().__init__()
        self.inplace = inplace

    def forward(self, value):
        """Sums of rows."""
        first = value[0].mul_(3) if self.inplace else value[0] * 3
        return first.sum(-1, keepdim=True) + sum(other.sum(-1, keepdim=True) for other in value[1:])


def runs(net, kind):
    """One training step of `kind`; the gradients come to `net`."""
    x, y = batch()
    y = y[:, :1]
    if kind in ("never", "except_last", "always"):
        pipe = ps.Pipe(net, balance=[1, 1], devices=2, chunks=2, checkpoint=kind)
        functional.mse_loss(pipe(x), y).backward()
    else:
        recompute = {"pipeline": "never", "again": "always", "layer": [1]}[kind]
        pipe = ps.Pipeline(
            net,
            balance=[2] if kind == "layer" else [1, 1],
            schedule="gpipe",
            micro_batches=2,
            loss=functional.mse_loss,
            executor="threads",
            recompute=recompute,
        )
        pipe.train_batch(x, y)


KINDS = ["never", "except_last", "always", "pipeline", "again", "layer"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inplace", [False, True])
def test_one_tensor_twice_stays_one_tensor(kind, inplace):
    """`return h, h` with work in place behind the cut was 64 % off."""
    torch.manual_seed(0)
    net = nn.Sequential(Shared(lambda h: (h, h)), Works(inplace=inplace))
    x, y = batch()
    expected = plain_gradients(net, x, y[:, :1], 2)
    runs(net, kind)
    assert_same(net, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "views", [lambda h: (h, h[:, 1:]), lambda h: (h.view(-1, WIDTH), h), lambda h: (h, h.detach())]
)
def test_views_cross_and_work_in_place_on_one_of_them_is_refused(kind, views):
    """Each arrives in memory of its own; the other would not change with it, without an error."""
    torch.manual_seed(0)
    net = nn.Sequential(Shared(views), Works(inplace=False))
    x, y = batch()
    expected = plain_gradients(net, x, y[:, :1], 2)
    runs(net, kind)
    assert_same(net, expected)
    with pytest.raises(
        RuntimeError, match=r"share memory.*Return a clone\(\)|share memory.*pass a clone\(\)"
    ):
        runs(nn.Sequential(Shared(views), Works()), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_that_do_not_meet_may_be_changed_in_place(kind):
    """Rows of one tensor share its storage, and no number."""
    torch.manual_seed(0)
    views = lambda h: (h[:, ::2] + 0, h.narrow(1, 0, 2), h.narrow(1, 2, 2))  # noqa: E731
    net = nn.Sequential(Shared(views), Works())
    x, y = batch()
    expected = plain_gradients(net, x, y[:, :1], 2)
    runs(net, kind)
    assert_same(net, expected)


# Which tensors want a gradient.


class Weighs(nn.Module):
    """Returns class weights beside its output; floats that want no gradient."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        """Logits and weights."""
        return self.map(x), x.detach().abs().mean(0)


class Seen(nn.Module):
    """Takes logits and weights, and notes which want a gradient."""

    def __init__(self):
        super().__init__()
        self.flags = []

    def forward(self, value):
        """A weighted loss for every sample; torch has no gradient for the weights."""
        self.flags.append([tensor.requires_grad for tensor in value])
        logits, weight = value
        return functional.cross_entropy(logits, logits.argmax(-1), weight=weight, reduction="none")


@pytest.mark.parametrize("kind", KINDS)
def test_a_float_that_wants_no_gradient_is_asked_for_none(kind):
    """With recompute any float was, and torch refused: not differentiable with respect to argument
    'weight'.
    """
    torch.manual_seed(0)
    net = nn.Sequential(Weighs(), Seen())
    x, y = batch()
    expected = plain_gradients(net, x, y[:, 0], 2)
    net[1].flags.clear()
    if kind in ("never", "except_last", "always"):
        functional.mse_loss(
            ps.Pipe(net, balance=[1, 1], devices=2, chunks=2, checkpoint=kind)(x), y[:, 0]
        ).backward()
    else:
        recompute = {"pipeline": "never", "again": "always", "layer": [1]}[kind]
        pipe = ps.Pipeline(
            net,
            balance=[1, 1],
            schedule="gpipe",
            micro_batches=2,
            loss=functional.mse_loss,
            executor="threads",
            recompute=recompute,
        )
        pipe.train_batch(x, y[:, 0])
    assert_same(net, expected)
    assert set(map(tuple, net[1].flags)) == {(True, False)}


@pytest.mark.parametrize("recompute", ["always", "never"])
def test_layers_frozen_and_thawed_between_batches_have_the_flags_of_the_moment(recompute):
    """What the first batch has shown may not hold for the next."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    x, y = batch()
    pipe = ps.Pipeline(
        net,
        balance=[1, 1],
        schedule="gpipe",
        micro_batches=2,
        loss=functional.mse_loss,
        executor="threads",
        recompute=recompute,
    )
    pipe.train_batch(x, y)
    net.zero_grad()
    net[0].weight.requires_grad_(False)
    net[0].bias.requires_grad_(False)
    pipe.train_batch(x, y)
    assert net[0].weight.grad is None
    assert net[1].weight.grad is not None


class ByChance(nn.Module):
    """Sometimes hands on its input without a gradient."""

    def __init__(self):
        super().__init__()
        self.map, self.calls = nn.Linear(WIDTH, WIDTH), []  # a number would be put back

    def forward(self, x):
        """Every other time."""
        self.calls.append(len(self.calls))
        return self.map(x) if len(self.calls) % 2 else self.map(x).detach()


def test_a_recompute_with_other_flags_is_refused():
    """A gradient that arrives for nothing, or does not for something, would be lost."""
    net, (x, y) = nn.Sequential(ByChance(), nn.Linear(WIDTH, WIDTH)), batch()
    pipe = ps.Pipe(net, balance=[1, 1], devices=2, chunks=1, checkpoint="always")
    with pytest.raises(
        RuntimeError,
        match="run again for its backward, a forward made 1 tensors of which 0 want a gradient",
    ):
        functional.mse_loss(pipe(x), y).backward()
    pipeline = ps.Pipeline(
        net,
        balance=[1, 1],
        schedule="gpipe",
        micro_batches=1,
        loss=functional.mse_loss,
        executor="threads",
        recompute="always",
    )
    with pytest.raises(
        RunError, match="stage 0: run again for its backward, a forward made 1 tensors of which 0"
    ):
        pipeline.train_batch(x, y)


# Sparse.


class ToSparse(nn.Module):
    """Returns a sparse tensor."""

    def __init__(self, *, twice):
        super().__init__()
        self.map, self.twice = nn.Linear(WIDTH, WIDTH), twice

    def forward(self, x):
        """Of what is above 0; `twice`: each place in two entries."""
        sparse = functional.relu(self.map(x)).to_sparse()
        if self.twice:
            indices, values = sparse.indices(), sparse.values()
            sparse = torch.sparse_coo_tensor(
                torch.cat([indices, indices], 1), torch.cat([values, values]), sparse.shape
            )
        return {"sparse": sparse}


class FromSparse(nn.Module):
    """Takes it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, value):
        """A sparse product's row sums."""
        return torch.sparse.mm(value["sparse"], self.weight).sum(-1, keepdim=True)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_sparse_tensors_cross_with_their_gradients(kind, twice):
    """They were copied into dense memory, which torch refuses."""
    torch.manual_seed(0)
    net = nn.Sequential(ToSparse(twice=twice), FromSparse())
    x, y = batch()
    expected = plain_gradients(net, x, y[:, :1], 2)
    runs(net, kind)
    for parameter, grad in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
