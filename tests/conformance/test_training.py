"""Weights, losses and gradients over several steps: the pipeline trains as plain PyTorch does."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from tests.conformance.models import CASES, lengths_of, made
from tests.conformance.reference import PlainTraining, differences, gradients, layers_of
from torch import nn
from torch.nn import functional

import penstock as ps

OPTIMIZERS = {
    "sgd with momentum": lambda params: torch.optim.SGD(
        params, lr=0.05, momentum=0.9, weight_decay=1e-3
    ),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2),
    "adamw, biases apart": lambda params: torch.optim.AdamW(
        [
            {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in params if p.dim() < 2]},
        ],
        lr=1e-2,
    ),
}


def batches(case, count, samples=10):
    """Different batches, always the same ones."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return [case.data(samples) for _ in range(count)]


def pipeline(model, case, stages, optimizer=None, **options):
    """A pipeline of the case's model in this process."""
    lengths = lengths_of(len(layers_of(model)), stages)
    return ps.Pipeline(
        model,
        loss=case.loss,
        balance=lengths,
        micro_batches=4,
        optimizer=optimizer,
        executor="threads",
        **options,
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["vgg", "resnet", "gpt", "mlp"])
@pytest.mark.parametrize("stages", [1, 3])
def test_five_steps_of_an_optimizer_leave_the_weights_of_plain_training_to_the_bit(
    name, optimizer, stages
):
    """Every stage has an optimizer of its own over its own parameters; together they are the one
    that plain training has.
    """
    case = CASES[name]
    model, _, _ = made(case)
    plain = PlainTraining(copy.deepcopy(model), case.loss)
    pipe = pipeline(model, case, stages, OPTIMIZERS[optimizer])
    plain_optimizer = OPTIMIZERS[optimizer](list(plain.model.parameters()))
    for x, y in batches(case, 5):
        plain_optimizer.zero_grad()
        assert torch.equal(pipe.train_batch(x, y), plain.backward(x, y, 4))
        plain_optimizer.step()
    assert differences(pipe.state_dict(), dict(plain.model.state_dict())) == []


def test_gradients_can_be_looked_at_until_the_next_batch_begins():
    """For clipping statistics, histograms, debugging; the next batch starts from none, so nothing
    adds up.
    """
    case = CASES["mlp"]
    model, _, _ = made(case)
    plain = PlainTraining(copy.deepcopy(model), case.loss)
    pipe = pipeline(model, case, 3, OPTIMIZERS["adam"])
    optimizer = OPTIMIZERS["adam"](list(plain.model.parameters()))
    for x, y in batches(case, 3):
        optimizer.zero_grad()
        plain.backward(x, y, 4)
        optimizer.step()
        pipe.train_batch(x, y)
        assert differences(gradients(model), gradients(plain.model)) == []
        pipe.eval_batch(x, y)
        pipe.forward(x)
        assert differences(gradients(model), gradients(plain.model)) == []


def test_without_an_optimizer_gradients_add_up_until_they_are_dropped():
    """Accumulation over batches, and optimizers of the user's own, need gradients left alone."""
    case = CASES["gpt"]
    model, _, _ = made(case)
    before = copy.deepcopy(model.state_dict())
    plain = PlainTraining(copy.deepcopy(model), case.loss)
    pipe = pipeline(model, case, 2)
    for x, y in batches(case, 2):
        pipe.train_batch(x, y)
        plain.backward(x, y, 4)
    assert differences(gradients(model), gradients(plain.model)) == []
    assert differences(model.state_dict(), before) == []
    pipe.zero_grad()
    assert gradients(model) == {}


def test_train_yields_the_losses_of_a_loader_in_batch_order():
    """A stream and a loop of batches are two ways to say the same."""
    case = CASES["vgg"]
    model, _, _ = made(case)
    streamed = pipeline(copy.deepcopy(model), case, 3, OPTIMIZERS["adam"])
    looped = pipeline(model, case, 3, OPTIMIZERS["adam"])
    losses = list(streamed.train(iter(batches(case, 4))))
    assert torch.equal(
        torch.stack(losses), torch.stack([looped.train_batch(x, y) for x, y in batches(case, 4)])
    )
    assert streamed.step == looped.step == 4
    assert differences(streamed.state_dict(), looped.state_dict()) == []


def test_the_loss_is_one_float_that_holds_no_graph():
    """Losses are kept in lists; each with its graph would hold all activations of all steps."""
    case = CASES["mlp"]
    model, x, y = made(case)
    loss = pipeline(model, case, 2).train_batch(x, y)
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    assert not loss.requires_grad


def test_a_model_trains_in_place_when_its_weights_are_real():
    """The user's own modules are the pipeline's: no second copy of the weights, and the trained
    model is at hand.
    """
    case = CASES["mlp"]
    model, x, y = made(case)
    pipe = pipeline(model, case, 3, OPTIMIZERS["adam"])
    pipe.train_batch(x, y)
    assert differences(pipe.state_dict(), dict(model.state_dict())) == []
    assert list(pipe.state_dict()) == list(model.state_dict())


def test_two_pipelines_in_one_process_do_not_disturb_each_other():
    """Nothing is process-wide: that is how two ways to train are compared."""
    case = CASES["vgg"]
    model, _, _ = made(case)
    alone = pipeline(copy.deepcopy(model), case, 3, OPTIMIZERS["adam"])
    first = pipeline(copy.deepcopy(model), case, 3, OPTIMIZERS["adam"])
    second = pipeline(copy.deepcopy(model), case, 2, OPTIMIZERS["sgd with momentum"], seed=5)
    expected = [alone.train_batch(x, y) for x, y in batches(case, 3)]
    results = []
    for x, y in batches(case, 3):
        results.append(first.train_batch(x, y))
        second.train_batch(x, y)
    assert torch.equal(torch.stack(results), torch.stack(expected))
    assert differences(first.state_dict(), alone.state_dict()) == []


def test_training_under_no_grad_has_gradients_all_the_same():
    """A caller's mode is about the caller's own code; in threads it would not even be seen."""
    case = CASES["mlp"]
    for stages in (1, 2):
        model, x, y = made(case)
        with torch.no_grad():
            pipeline(model, case, stages, recompute="except_last").train_batch(x, y)
        plain, _, _ = made(case)
        PlainTraining(plain, case.loss).backward(x, y, 4)
        assert differences(gradients(model), gradients(plain)) == []


def test_autocast_around_a_batch_holds_for_all_its_stages():
    """Ranks in threads must do what the caller's own thread would do: mixed precision included."""
    case = CASES["mlp"]
    model, x, y = made(case)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = PlainTraining(copy.deepcopy(model), case.loss).backward(x, y, 4)
        for stages in (1, 3):
            assert torch.equal(
                pipeline(copy.deepcopy(model), case, stages).train_batch(x, y), expected.float()
            )
    assert not torch.equal(pipeline(model, case, 3).train_batch(x, y), expected.float())


def test_a_batch_without_targets_is_refused():
    """A loss of nothing would be nothing, on some ranks only."""
    model, x, _ = made(CASES["mlp"])
    pipe = pipeline(model, CASES["mlp"], 2)
    for run in (pipe.train_batch, pipe.eval_batch, pipe.compare_with_one_device):
        with pytest.raises(ps.PenstockError, match="a batch needs targets for its loss, not None"):
            run(x, None)


def test_a_model_from_the_meta_device_has_the_same_weights_under_every_cut():
    """Ranks make only what they hold, so initial weights must not depend on who makes what before."""
    case = CASES["gpt"]

    def weights(lengths, seed=3):
        with torch.device("meta"):
            model = case.make()
        pipe = ps.Pipeline(
            model, loss=case.loss, balance=lengths, micro_batches=2, executor="threads", seed=seed
        )
        return pipe.state_dict()

    whole = weights([5])
    assert all(not value.is_meta and value.isfinite().all() for value in whole.values())
    for lengths in ([1, 4], [2, 3], [1, 1, 1, 1, 1]):
        assert differences(weights(lengths), whole) == []
    assert differences(weights([5], seed=4), whole) != []


@pytest.mark.parametrize("stages", [1, 3])
def test_training_depends_on_the_seed_and_not_on_the_global_random_state(stages):
    """Two runs with one seed agree, whatever else the program draws; and the program's own draws do
    not change by training.
    """
    case = CASES["vgg"]

    def run(global_seed, seed):
        model, x, y = made(case)
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        pipe = pipeline(model, case, stages, OPTIMIZERS["adam"], seed=seed, recompute="except_last")
        losses = [pipe.train_batch(x, y) for _ in range(3)]
        pipe.eval_batch(x, y)
        pipe.forward(x)
        pipe.compare_with_one_device(x, y)
        assert torch.equal(torch.get_rng_state(), before)
        return torch.stack(losses)

    first = run(0, seed=1)
    assert torch.equal(run(99, seed=1), first)
    assert not torch.equal(run(0, seed=2), first)


def test_dropout_differs_between_steps_layers_and_micro_batches():
    """One mask for all would be no dropout at all."""

    class Ones(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(()))
            self.seen = []

        def forward(self, x):
            self.seen.append(x.detach().clone())
            return torch.ones_like(x) * self.gain

    layers = [Ones(), nn.Dropout(0.5), Ones(), nn.Dropout(0.5), Ones()]
    pipe = ps.Pipeline(
        nn.Sequential(*layers),
        loss=lambda out, _: out.mean(),
        balance=[2, 2, 1],
        micro_batches=2,
        executor="threads",
    )
    for _ in range(2):
        pipe.train_batch(torch.ones(2, 64), torch.ones(2, 64))
    masks = [
        tuple(mask.flatten().tolist()) for layer in (layers[2], layers[4]) for mask in layer.seen
    ]
    assert len(masks) == len(set(masks)) == 8


def test_a_loss_that_is_not_reduced_is_refused_before_anything_runs():
    """It gives a number for each sample, and a backward begins with one."""
    model, _, _ = made(CASES["mlp"])
    for loss in (
        nn.CrossEntropyLoss(reduction="none"),
        partial(functional.cross_entropy, reduction="none"),
    ):
        with pytest.raises(
            ps.PenstockError, match=r"the loss has reduction='none', .* it must give one number"
        ):
            ps.Pipeline(model, loss=loss, balance=[7], executor="threads")
    ps.Pipeline(model, loss=nn.CrossEntropyLoss(), balance=[7], executor="threads")


def test_a_loss_that_is_not_one_number_is_refused_with_its_shape():
    """`reduction="none"` as a function's argument cannot be seen before it runs."""
    model, x, y = made(CASES["mlp"])
    pipe = ps.Pipeline(
        model,
        loss=lambda out, y: functional.cross_entropy(out, y, reduction="none"),
        balance=[4, 3],
        micro_batches=2,
        executor="threads",
    )
    with pytest.raises(
        ps.PenstockError,
        match=r"failed in 1F0 of step 0: .*the loss must be one number.* this one is \(5,\)",
    ):
        pipe.train_batch(x, y)
