"""What `penstock.stage.replica_check` refuses of weights: hooks, `max_norm` and sparse gradients."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from tests.stage.replicated_layers import Centred, data, model_of, pipeline
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.batches.batch import make_batch
from penstock.errors import RunError, SettingError
from penstock.optim.update import Update
from penstock.schedule.slicing import Slicing
from penstock.stage import replica_check
from penstock.stage.replica_check import HookedStage, ReplicatedStage, stage_class
from penstock.stage.stage import Stage, StageLayer
from penstock.stage.stage_layers import StageLayers
from penstock.transport.payload import Payload


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


def test_a_hook_is_refused_where_micro_batches_are_cut_into_slices():
    """It would see the gradient of each slice. Without a hook the schedule is taken."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    sliced = ps.schedule("autopipe", 2, 4, sliced=1)
    pipeline(model, sliced).close()
    model[2].bias.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    with pytest.raises(
        SettingError,
        match=r"2\.bias has a gradient hook \(register_hook\) and autopipe cuts micro-batches",
    ):
        pipeline(model, sliced)


@pytest.mark.parametrize("place", [0, 2, 3])
def test_only_layers_of_stages_with_copies_are_refused(place):
    """The message names the stage and its ranks; a stage on one rank may have such layers."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    model[place].weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    schedule = ps.schedule("1f1b", 2, 4, replicas=[1, 2])
    if place == 0:
        pipeline(model, schedule).close()
        return
    with pytest.raises(SettingError, match=r"stage 1 \(ranks 1, 2\): .*weight has a gradient hook"):
        pipeline(model, schedule)


def test_all_reasons_against_a_layer_are_listed():
    """Else a user would find the second one after removing the first."""
    layer = nn.Linear(4, 4)
    for parameter in layer.parameters():
        parameter.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    with pytest.raises(SettingError) as caught:
        pipeline(model_of(layer))
    for name in ("weight", "bias"):
        assert f"{name} has a gradient hook (register_hook)" in str(caught.value)


def test_all_reasons_against_a_weight_of_two_stages_are_listed():
    """Else a user would find the second one after removing the first."""
    table = nn.Embedding(9, 4, max_norm=1.0)
    table.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    model = nn.Sequential(table, nn.Tanh(), Head(table.weight))
    with pytest.raises(SettingError, match=r"(?s)0\.weight has a gradient hook.*has max_norm"):
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


def test_a_stage_has_the_checks_that_its_copies_and_hooks_need():
    """Others run as fast as a stage without checks; other stages may have copies."""
    schedule = ps.schedule("1f1b", 2, 4, replicas=[1, 2])
    plain = [StageLayer(0, "0", nn.Linear(4, 4))]
    assert stage_class(plain, schedule, 0) is Stage
    assert stage_class([*plain, StageLayer(1, "1", clipped())], schedule, 0) is Stage
    assert stage_class([*plain, StageLayer(1, "1", clipped_afterwards())], schedule, 0) is (
        HookedStage
    )
    replicated = stage_class(plain, schedule, 1)
    assert (replicated.func, replicated.args) == (ReplicatedStage, ("1f1b",))


class Passing(nn.Module):
    """A layer that counts its forwards in a buffer, and passes on the count between slices alone."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward_slice(self, value, past):
        """Count, and pass on the count."""
        self.count += 1
        return self.inner(value), self.count * 1


def test_state_that_is_read_for_the_next_slice_alone_is_refused_in_copies():
    """The next slice would compute with the count of its own copy."""
    layers = [StageLayer(0, "0", Passing())]
    schedule = ps.schedule("1f1b", 2, 4, replicas=[1, 2])
    parameters = list(layers[0].module.parameters())
    runner = StageLayers(layers, torch.device("cpu"), 0)
    stage = stage_class(layers, schedule, 1)(1, runner, Update.make(parameters, None))
    x = torch.randn(2, 8, 4)
    slicing = Slicing("tokens", ((0.5, 0.5),) * 2)
    batch = make_batch(x, x, 2, step=0, training=True, slicing=slicing)
    with pytest.raises(SettingError, match=r"buffer 0\.count is changed by a forward and read by"):
        stage.forward(batch, 0, None)


def test_a_stage_with_hooks_passes_on_the_gradients_of_its_inputs():
    """Checks of its weights change nothing of them, in a whole backward or in two parts."""
    layer = clipped_afterwards()
    layers, schedule = [StageLayer(1, "1", layer)], ps.schedule("1f1b", 2, 4)
    runner = StageLayers(layers, torch.device("cpu"), 0)
    update = Update.make(list(layer.parameters()), None)
    stage = stage_class(layers, schedule, 1)(1, runner, update)
    assert type(stage) is HookedStage
    x, arrived = torch.randn(2, 4), Payload.flat([torch.ones(2, 4)])
    for split in (False, True):
        batch = make_batch(x, x, 1, step=split, training=True)
        stage.forward(batch, 0, Payload("", (x.clone(),), (True,)))
        method = stage.input_grad if split else stage.backward
        grads = method(batch, 0, arrived)
        torch.testing.assert_close(grads.leaves[0], torch.ones(2, 4) @ layer.weight.detach())


@pytest.mark.parametrize("cuts_tokens", [False, True])
@pytest.mark.parametrize("options", [None, {"backend": "one"}])
def test_copies_are_observed_as_far_as_their_layers_permit(monkeypatch, cuts_tokens, options):
    """A slice cannot be run again without the state before it, nor compiled code be followed."""
    calls = []

    def observe(state, run, rerun, *, follow):
        calls.append((rerun is None, follow))
        return SimpleNamespace(findings=(), changed=frozenset(), output=run())

    monkeypatch.setattr(replica_check, "observe", observe)
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)
    layers = [StageLayer(0, "0", Passing() if cuts_tokens else nn.Linear(4, 4))]
    parameters = list(layers[0].module.parameters())
    runner = StageLayers(layers, torch.device("cpu"), 0, compile=options)
    schedule = ps.schedule("1f1b", 2, 4, replicas=[1, 2])
    stage = stage_class(layers, schedule, 1)(1, runner, Update.make(parameters, None))
    x = torch.randn(2, 8, 4)
    slicing = Slicing("tokens", ((0.5, 0.5),) * 2) if cuts_tokens else None
    batch = make_batch(x, x, 2, step=0, training=True, slicing=slicing)
    stage.forward(batch, 0, None)
    assert calls == [(cuts_tokens, options is None)]
