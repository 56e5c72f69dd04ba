"""Tied weights over stages: one parameter, one gradient, one optimizer state, under every cut."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.conformance.catalogue import one_of_each
from tests.runtime.jobs import sgd
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import ChainError
from penstock.ranks.processes.launch import launch

#: Two pipelines of two stages in opposite directions.
BOTH_WAYS = """rank 0 | 0F0 1F1 1B1 0F2 1F3 1B3 0B0 0B2 0U1 1U1
rank 1 | 0F1 1F0 1B0 0F3 1F2 1B2 0B1 0B3 0U1 1U1"""
ADAM = {"adam": lambda params: torch.optim.Adam(params, lr=1e-2)}


class Head(nn.Module):
    """A head that uses the embedding's table, with a bias of its own."""

    def __init__(self, table):
        super().__init__()
        self.weight = table
        self.bias = nn.Parameter(torch.zeros(len(table)))

    def forward(self, x):
        """Run the layer."""
        return functional.linear(x, self.weight, self.bias)


def tied_model(*, dropout=0.0, second=True):
    """An embedding whose table is also the head's; of the linear maps between them two share a
    weight.
    """
    with torch.random.fork_rng():
        torch.manual_seed(1)
        embed = nn.Embedding(13, 8)
        inner = [nn.Linear(8, 8) for _ in range(4)]
        if second:
            inner[3].weight = inner[1].weight
        return nn.Sequential(
            embed,
            inner[0],
            nn.Tanh(),
            inner[1],
            nn.Dropout(dropout),
            inner[2],
            nn.Tanh(),
            inner[3],
            Head(embed.weight),
        )


def data(samples=12, number=0):
    """Return tokens and the tokens that follow."""
    with torch.random.fork_rng():
        torch.manual_seed(50 + number)
        return torch.randint(0, 13, (samples, 5)), torch.randint(0, 13, (samples, 5))


def loss(output, target):
    """Return the mean over samples and tokens."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def plain(model, steps, make=sgd):
    """Train in one process and return the losses."""
    optimizer = make(list(model.parameters()))
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        x, y = data(number=number)
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    return torch.stack(losses)


def close(actual, expected):
    """Return the names of tensors that differ by more than rounding."""
    assert actual.keys() == expected.keys()
    return [
        name
        for name in actual
        if not torch.allclose(actual[name], expected[name], rtol=1e-5, atol=1e-6)
    ]


def pipeline(model, lengths, **options):
    """Return a pipeline in this process."""
    options.setdefault("micro_batches", 4)
    options.setdefault("optimizer", sgd)
    if options.get("schedule") is not None and not isinstance(options["schedule"], str):
        options.pop("micro_batches")
    return ps.Pipeline(model, loss=loss, balance=lengths, executor="threads", **options)


@pytest.mark.parametrize("schedule", sorted(one_of_each(4)))
def test_training_with_tied_weights_is_that_of_one_device_under_every_schedule(schedule):
    """The gradients of all uses are summed, also with split backwards, several stages per rank and
    replicas.
    """
    entry = one_of_each(4)[schedule]
    if not entry.synchronous or entry.slicing is not None or entry.stages > 9:
        pytest.skip(
            "it updates at different times, cuts sequences, or has more stages than "
            "this model has layers"
        )
    lengths = [9 // entry.stages + (stage < 9 % entry.stages) for stage in range(entry.stages)]
    model, reference = tied_model(), tied_model()
    pipe = pipeline(model, lengths, schedule=entry)
    losses = torch.stack([pipe.train_batch(*data(number=number)) for number in range(3)])
    assert torch.allclose(losses, plain(reference, 3), rtol=1e-5)
    assert close(pipe.state_dict(), dict(reference.state_dict())) == []
    assert close(dict(model.state_dict()), dict(reference.state_dict())) == []
    assert model[8].weight is model[0].weight
    assert model[7].weight is model[3].weight


def test_tied_copies_stay_equal():
    """In torch.distributed.pipelining the copies of a tied weight are never synchronised, and
    diverge.
    """
    model = tied_model()
    pipe = pipeline(model, [3, 3, 3], optimizer=ADAM["adam"])
    for number in range(4):
        pipe.train_batch(*data(number=number))
        held = [
            p
            for stage in pipe._assembly.stages
            for layer in stage.layers
            for n, p in layer.module.named_parameters()
            if n == "weight"
        ]
        tables = [p for p in held if p.shape == (13, 8)]
        assert len(tables) == 2
        assert tables[0] is not tables[1]
        assert torch.equal(*tables)


def test_one_optimizer_state_is_kept_at_the_first_holder():
    """Two states of one weight would give two different updates."""
    pipe = pipeline(tied_model(), [3, 3, 3], optimizer=ADAM["adam"])
    pipe.train_batch(*data())
    counts = [len(stage.update.parameters) for stage in pipe._assembly.stages]
    assert counts == [3, 4, 2]
    assert [len(stage.update.borrowed) for stage in pipe._assembly.stages] == [0, 0, 2]
    assert [name for name, _ in pipe.named_parameters()] == [
        name for name, _ in tied_model().named_parameters()
    ]


def test_the_self_check_counts_a_tied_weight_once():
    """Its gradient is the sum over all uses, under the chain's one name."""
    pipe = pipeline(tied_model(dropout=0.3), [2, 4, 3])
    comparison = pipe.compare_with_one_device(*data())
    assert set(comparison.gradients) == {name for name, _ in tied_model().named_parameters()}
    assert comparison.relative < 1e-5
    assert list(pipe.state_dict()) == list(tied_model().state_dict())


def test_a_tied_weight_with_replicas_is_held_by_four_ranks():
    """Every rank's gradient counts, and the all-reduce of the replicas leaves the weight out."""
    model, reference = tied_model(), tied_model()
    pipe = pipeline(model, [4, 5], schedule=ps.Schedule.parse(BOTH_WAYS))
    for number in range(3):
        pipe.train_batch(*data(number=number))
    plain(reference, 3)
    assert close(dict(model.state_dict()), dict(reference.state_dict())) == []
    tables = [stage.layers[-1].module.weight for stage in pipe._assembly.stages if stage.index == 1]
    assert torch.equal(tables[0], tables[1])


def test_three_uses_of_one_weight():
    """T5 uses its table in the encoder, the decoder and the head."""

    def made():
        model = tied_model(second=False)
        model[3].weight = model[1].weight
        model[7].weight = model[1].weight
        return model

    model, reference = made(), made()
    pipe = pipeline(model, [2, 2, 5], clip_grad_norm=0.1)
    for number in range(2):
        pipe.train_batch(*data(number=number))
    optimizer = sgd(list(reference.parameters()))
    for number in range(2):
        optimizer.zero_grad()
        x, y = data(number=number)
        loss(reference(x), y).backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        optimizer.step()
    assert pipe.grad_norm == pytest.approx(float(norm), rel=1e-5)
    assert close(dict(model.state_dict()), dict(reference.state_dict())) == []


def test_frozen_tied_weights_are_shared_and_nothing_is_sent_for_them():
    """They have no gradient, no step, and no communication after the program."""
    model, reference = tied_model(), tied_model()
    for network in (model, reference):
        network[0].weight.requires_grad_(False)
        network[3].weight.requires_grad_(False)
    pipe = pipeline(model, [3, 3, 3])
    assert not pipe._global_step.needed
    pipe.train_batch(*data())
    plain(reference, 1)
    assert close(dict(model.state_dict()), dict(reference.state_dict())) == []


def test_without_an_optimizer_gradients_of_all_uses_are_at_the_models_own_parameter():
    """A user who steps the weights finds the sum there, and the next batch uses the new weights
    everywhere.
    """
    model, reference = tied_model(), tied_model()
    pipe = pipeline(model, [3, 3, 3], optimizer=None)
    for target in (pipe, None):
        for number in range(2):
            x, y = data(number=number)
            if target is not None:
                pipe.train_batch(x, y)
            else:
                loss(reference(x), y).backward()
    assert (
        close(
            {n: p.grad for n, p in model.named_parameters()},
            {n: p.grad for n, p in reference.named_parameters()},
        )
        == []
    )
    with torch.no_grad():
        model[0].weight.mul_(2)
        reference[0].weight.mul_(2)
    x, y = data(number=2)
    assert torch.allclose(pipe.eval_batch(x, y), loss(reference(x), y), rtol=1e-5)


@pytest.mark.parametrize("recompute", ["always", "except_last"])
def test_recomputed_stages_with_tied_weights(recompute):
    """A stage may have no trainable weight but a tied one whose home is another stage."""
    model, reference = tied_model(), tied_model()
    pipe = pipeline(model, [2, 2, 3, 2], recompute=recompute)
    pipe.train_batch(*data())
    plain(reference, 1)
    assert close(dict(model.state_dict()), dict(reference.state_dict())) == []


def test_checkpoints_load_under_cuts_that_separate_tied_layers_or_do_not(tmp_path):
    """A tied tensor is saved once, under the chain's one name."""
    make = ADAM["adam"]
    whole, parted = (
        pipeline(tied_model(), [9], optimizer=make),
        pipeline(tied_model(), [3, 3, 3], optimizer=make),
    )
    for number in range(2):
        parted.train_batch(*data(number=number))
    parted.save(tmp_path / "a")
    whole.load(tmp_path / "a")
    whole.save(tmp_path / "b")
    again = pipeline(tied_model(), [1, 4, 4], optimizer=make)
    again.load(tmp_path / "b")
    losses = [pipe.train_batch(*data(number=2)) for pipe in (parted, whole, again)]
    assert torch.allclose(losses[0], losses[1], rtol=1e-5)
    assert torch.allclose(losses[0], losses[2], rtol=1e-5)
    assert close(parted.state_dict(), whole.state_dict()) == []
    assert close(again.state_dict(), whole.state_dict()) == []
    fresh = pipeline(tied_model(), [2, 5, 2])
    fresh.load_state_dict(whole.state_dict())
    assert close(fresh.state_dict(), whole.state_dict()) == []


def test_a_tied_model_from_the_meta_device_begins_alike_under_every_cut():
    """The home draws the initial values that one device would draw."""

    def made():
        with torch.device("meta"):
            embed, head = nn.Embedding(13, 8), nn.Linear(8, 13)
            head.weight = embed.weight
            return nn.Sequential(embed, nn.Linear(8, 8), nn.Tanh(), head)

    whole = pipeline(made(), [4]).state_dict()
    for lengths in ([1, 3], [2, 2], [1, 2, 1]):
        assert close(pipeline(made(), lengths).state_dict(), whole) == []


def test_an_asynchronous_schedule_refuses_tied_weights_over_stages():
    """Its stages update at different times: no batch's gradients could be summed before both have
    stepped.
    """
    with pytest.raises(
        ChainError,
        match=(
            r"0\.weight is used by layers 0, 8, which this cut puts into stages 0, 1\. "
            r".*untie them"
        ),
    ):
        pipeline(tied_model(), [4, 5], schedule="pipedream", micro_batches=1)
    pipeline(tied_model(), [9], schedule="pipedream", micro_batches=1)


def test_a_batch_norm_used_in_two_stages_is_refused():
    """Each use updates the statistics of the one before, which two stages cannot do."""
    norm = nn.BatchNorm1d(8)
    model = nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 8), norm)
    with pytest.raises(
        ChainError,
        match=r"1\.running_mean is used by layers 1, 3.* or give each a batch norm of its own",
    ):
        ps.Pipeline(model, loss=nn.MSELoss(), balance=[2, 2], executor="threads")


def in_processes(options, steps):
    """Train on a rank; rank 0 returns the results."""
    pipe = ps.Pipeline(tied_model(), loss=loss, optimizer=sgd, deadline_s=60, **options)
    losses = [pipe.train_batch(*data(number=number)) for number in range(steps)]
    compared = pipe.compare_with_one_device(*data(number=9))
    state = pipe.state_dict()
    results = {
        "losses": torch.stack(losses),
        "state": state,
        "norm": pipe.grad_norm,
        "relative": compared.relative,
    }
    pipe.close()
    return results


def test_processes_with_crossing_homes_agree_with_one_device():
    """Rank 0 is home of the table that rank 1 uses and vice versa; they do not wait for each other
    in a circle.
    """
    options = {
        "balance": [2, 2, 4, 1],
        "clip_grad_norm": 0.5,
        "schedule": ps.schedule("interleaved", 4, 4),
    }
    by_rank = launch(in_processes, 2, options, 3, threads=1)
    model = tied_model()
    optimizer = sgd(list(model.parameters()))
    for number in range(3):
        optimizer.zero_grad()
        x, y = data(number=number)
        loss(model(x), y).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    assert close(by_rank[0]["state"], dict(model.state_dict())) == []
    assert by_rank[0]["norm"] == by_rank[1]["norm"] == pytest.approx(float(norm), rel=1e-5)
    assert torch.equal(by_rank[0]["losses"], by_rank[1]["losses"])
    assert by_rank[0]["relative"] < 1e-5


def test_nothing_of_the_users_model_is_replaced():
    """The pipeline trains the user's own model, ties included."""
    model = tied_model()
    before = {name: id(p) for name, p in model.named_parameters()}
    deep = copy.deepcopy(model)
    pipeline(model, [3, 3, 3]).train_batch(*data())
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert not torch.equal(model[0].weight, deep[0].weight)
