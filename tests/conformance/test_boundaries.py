"""What may cross from stage to stage, and what a layer may do to it: exact in every case,
recomputed or not.
"""

from __future__ import annotations

import copy

import pytest
import torch
from tests.conformance.models import lengths_of
from tests.conformance.reference import PlainTraining, differences, gradients, layers_of
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.schedule.op import Schedule

every_way = pytest.mark.parametrize("recompute", ["never", "except_last", "always"])
every_backward = pytest.mark.parametrize("split", [False, True], ids=["B", "I and W"])

# Rows of 64 bytes: the order in which kernels sum, and so the last bit, can depend on how a
# micro-batch is aligned in memory,
# and where a layer works in place it is given a copy.
X = torch.linspace(-1, 1, 10 * 16).reshape(10, 16)
Y = torch.arange(10) % 4


def programs(stages, micro_batches, *, split):
    """1F1B, or the same with every backward as I and then W at the end."""
    schedule = ps.schedule("1f1b", stages, micro_batches)
    if not split:
        return schedule
    rows = []
    for line in str(schedule).splitlines():
        words = line.partition("|")[2].split()
        late = [word.replace("B", "W") for word in words if "B" in word]
        rows.append(" ".join([*(word.replace("B", "I") for word in words[:-1]), *late, words[-1]]))
    return Schedule.parse("\n".join(rows))


def check_exact(
    model,
    loss=functional.cross_entropy,
    *,
    recompute="never",
    split=False,
    stages=3,
    x=X,
    y=Y,
    steps=2,
):
    """Losses, gradients and buffers of a few steps equal plain training's to the bit, with each
    layer at some boundary.
    """
    model.zero_grad()
    plain = PlainTraining(copy.deepcopy(nn.Sequential(*model)), loss)
    lengths = lengths_of(len(layers_of(model)), stages)
    pipe = ps.Pipeline(
        model,
        loss=loss,
        balance=lengths,
        schedule=programs(stages, 4, split=split),
        recompute=recompute,
        executor="threads",
    )
    for _ in range(steps):
        assert torch.equal(pipe.train_batch(x, y), plain.backward(x, y, 4).float())
    assert differences(gradients(model), gradients(plain.model)) == []
    assert differences(dict(model.named_buffers()), dict(plain.model.named_buffers())) == []
    return pipe


class Fork(nn.Module):
    """One tensor to a dict of what a boundary may carry: floats, integers, flags, None, constants,
    nested.
    """

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(16, 5), nn.Linear(16, 5)

    def forward(self, x):
        order = torch.arange(5).flip(0).expand(len(x), 5)
        mask = x[:, :5] > 0
        return {
            "pair": (self.left(x), [self.right(x)]),
            "order": order,
            "mask": mask,
            "nothing": None,
            "scale": 0.5,
            "name": "fork",
        }


class Mix(nn.Module):
    """The same dict with its tensors changed."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, value):
        left, (right,) = value["pair"]
        assert value["nothing"] is None
        assert (value["name"], value["scale"]) == ("fork", 0.5)
        moved = torch.gather(self.linear(left), 1, value["order"])
        return {**value, "pair": (moved, [right * value["mask"]])}


class Join(nn.Module):
    """The dict back to one tensor."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(5, 4)

    def forward(self, value):
        left, (right,) = value["pair"]
        return self.out(left + value["scale"] * right)


@every_way
@every_backward
def test_nested_tuples_lists_and_dicts_cross_with_integers_flags_none_and_constants(
    recompute, split
):
    """Skip connections, masks and positions travel beside activations; only float tensors have
    gradients.
    """
    check_exact(
        nn.Sequential(Fork(), Mix(), Mix(), Join()), recompute=recompute, split=split, stages=4
    )


class Counted(nn.Module):
    """Beside its output, float statistics that nothing is trained by, and a tensor that no stage
    uses.
    """

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, 16)

    def forward(self, value):
        x = value[0] if isinstance(value, tuple) else value
        out = self.linear(x)
        return out, out.detach().mean(0, keepdim=True).expand(len(x), 16), self.linear(x * 2)


class First(nn.Module):
    """Only the first two of three tensors."""

    def forward(self, value):
        return value[0] + value[1]


@every_way
@every_backward
def test_an_output_without_gradient_or_without_use_crosses_beside_one_with_both(recompute, split):
    """Some outputs want no gradient, for some none ever comes back: the others' must not be shifted
    onto them.
    """
    model = nn.Sequential(Counted(16), Counted(16), First(), nn.Linear(16, 4))
    check_exact(model, recompute=recompute, split=split, stages=4)


@every_way
@every_backward
def test_the_same_tensor_twice_in_one_output_gets_both_gradients(recompute, split):
    """A residual stream that is handed on beside itself: its gradient is the sum."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x):
            out = self.linear(x).tanh()
            return out, out

    class Product(nn.Module):
        def forward(self, pair):
            return pair[0] * pair[1].exp()

    check_exact(
        nn.Sequential(Twice(), Product(), nn.Linear(16, 4)), recompute=recompute, split=split
    )


@every_way
@every_backward
def test_a_stage_that_hands_on_what_it_was_given_hands_on_its_gradient(recompute, split):
    """Identities stand where layers were taken out, and dropouts of 0."""
    model = nn.Sequential(
        nn.Identity(),
        nn.Linear(16, 16),
        nn.Identity(),
        nn.Flatten(),
        nn.Dropout(0.0),
        nn.Linear(16, 4),
    )
    check_exact(model, recompute=recompute, split=split, stages=6)


class InPlaceChanges(nn.Module):
    """Works on what it is given, and has no flag that says so."""

    def forward(self, x):
        return x.mul_(1.5).add_(0.1)


IN_PLACE = {
    "with a flag": lambda: nn.ReLU(inplace=True),
    "without a flag": InPlaceChanges,
    "behind a view": lambda: nn.Sequential(
        nn.Flatten(0), InPlaceChanges(), nn.Unflatten(0, (-1, 16))
    ),
    "as a function": lambda: Function(functional.relu_),
}


class Function(nn.Module):
    """A function as a layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@every_way
@pytest.mark.parametrize("kind", IN_PLACE)
def test_the_first_layer_of_a_stage_may_work_in_place(kind, recompute):
    """Where a cut falls is not the model's business; what a stage keeps for its backward, and what
    others hold, stays whole.
    """
    model = nn.Sequential(
        nn.Linear(16, 16), IN_PLACE[kind](), nn.Linear(16, 16), IN_PLACE[kind](), nn.Linear(16, 4)
    )
    check_exact(model, recompute=recompute, stages=len(layers_of(model)))
    check_exact(model, recompute=recompute, stages=len(layers_of(model)), split=True)
    model[0].requires_grad_(False)
    check_exact(model, recompute=recompute, stages=3)


@every_way
@pytest.mark.parametrize("kind", IN_PLACE)
def test_a_first_layer_that_works_in_place_leaves_the_callers_batch_alone(kind, recompute):
    """The caller may use its batch again, for one to evaluate on it; plain training would see it
    changed.
    """
    torch.manual_seed(0)
    model = nn.Sequential(IN_PLACE[kind](), nn.Linear(16, 16), nn.Linear(16, 4))
    batch = X.clone()
    plain = PlainTraining(copy.deepcopy(model), functional.cross_entropy)
    pipe = ps.Pipeline(
        model,
        loss=functional.cross_entropy,
        balance=lengths_of(len(layers_of(model)), 2),
        micro_batches=4,
        recompute=recompute,
        executor="threads",
    )
    for _ in range(2):
        pipe.forward(batch)
        pipe.eval_batch(batch, Y)
        loss = pipe.train_batch(batch, Y)
        assert torch.equal(batch, X)
        assert torch.equal(loss, plain.backward(X.clone(), Y, 4))
    assert differences(gradients(model), gradients(plain.model)) == []


class Remembering(nn.Module):
    """Centres by a running mean that every forward moves: what it gives depends on how often it has
    run.
    """

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.gain = nn.Parameter(torch.ones(16))

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.25)
        return (x - self.mean.clone()) * self.gain


@every_way
def test_a_layer_whose_output_depends_on_its_buffers_is_recomputed_from_the_buffers_it_had(
    recompute,
):
    """Spectral norm, running centres, memory banks: a second forward must see what the first saw,
    and leave no trace.
    """
    check_exact(
        nn.Sequential(nn.Linear(16, 16), Remembering(), nn.Tanh(), Remembering(), nn.Linear(16, 4)),
        recompute=recompute,
    )


def test_spectral_norm_is_exact_with_recompute():
    """torch's own layer of that kind: its power iteration moves on with every forward."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)), nn.Tanh(), nn.Linear(16, 4)
    )
    check_exact(model, recompute="always")


@every_way
@every_backward
@pytest.mark.parametrize("frozen", [[0], [1, 2], [0, 1], [4], [0, 1, 2, 3]])
def test_frozen_layers_stages_and_first_stages_are_exact(frozen, recompute, split):
    """Fine-tuning: below the first trained layer no gradient flows at all, above it through frozen
    layers.
    """
    model = nn.Sequential(
        nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
    )
    for index in frozen:
        model[index].requires_grad_(False)
    check_exact(model, recompute=recompute, split=split, stages=5)
    check_exact(model, recompute=recompute, split=split, stages=2)
    assert all(model[index].weight.grad is None for index in frozen)


def test_half_frozen_layers_are_exact():
    """A frozen weight beside a trained bias, as in bias-only fine-tuning."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)), nn.Linear(16, 4))
    for layer in model:
        layer.weight.requires_grad_(False)
    check_exact(model, stages=5, split=True)


@every_way
@every_backward
def test_weights_tied_within_a_stage_get_the_sum_of_their_gradients(recompute, split):
    """A weight that two layers of one stage share is one weight."""
    model = nn.Sequential(
        nn.Linear(16, 16),
        nn.Linear(16, 16),
        nn.Tanh(),
        nn.Linear(16, 16),
        nn.Linear(16, 16),
        nn.Linear(16, 4),
    )
    model[1].weight = model[0].weight
    model[4].weight = model[3].weight
    check_exact(model, recompute=recompute, split=split, stages=2)


def test_inputs_and_targets_may_be_nested():
    """Two inputs and two targets, cut alike; a constant among them goes to every micro-batch whole."""

    class Entry(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.linear = nn.Embedding(4, 16), nn.Linear(16, 16)

        def forward(self, batch):
            return self.linear(batch["features"]) + batch["gain"] * self.embed(batch["tokens"][0])

    def loss(output, target):
        labels, values = target
        return functional.cross_entropy(output, labels) + functional.mse_loss(output.sum(1), values)

    check_exact(
        nn.Sequential(Entry(), nn.Tanh(), nn.Linear(16, 4)),
        loss,
        y=(Y, X.sum(1)),
        x={"features": X, "tokens": (torch.arange(10) % 4,), "gain": 2.0},
    )


@every_way
@every_backward
def test_half_precision_and_double_layers_cross_in_their_own_dtype(recompute, split):
    """What arrives has the dtype that was sent, and so has its gradient."""

    class To(nn.Module):
        def __init__(self, dtype):
            super().__init__()
            self.dtype = dtype

        def forward(self, x):
            return x.to(self.dtype)

    model = nn.Sequential(
        nn.Linear(16, 16),
        To(torch.bfloat16),
        nn.Linear(16, 16).to(torch.bfloat16),
        To(torch.float64),
        nn.Linear(16, 4).to(torch.float64),
    )
    check_exact(model, recompute=recompute, split=split, stages=5)
