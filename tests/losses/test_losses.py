"""Losses of every kind under pipelines, held against plain PyTorch on the undivided batch."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from tests.losses.undivided import (
    CLASSES,
    LOSSES,
    WEIGHTS,
    Transposed,
    batch,
    check_gradients,
    contrastive,
    cross_entropy,
    model,
    pipeline,
    plain,
    sum_and_count,
)
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import NonFinite, ScheduleError, StageFailed
from penstock.modules.side_loss import collecting_side_losses, side_loss


@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "chimera", "seq1f1b", "terapipe"]
)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_that_of_the_undivided_batch(name, schedule):
    """It covers loss, gradients and evaluation for batches with different padding."""
    loss, net, other = LOSSES[name], model(), model()
    pipe = pipeline(net, loss, schedule)
    for number in range(3):
        x, y = batch(number)
        expected, grads = plain(loss, x, y, other)
        assert float(pipe.eval_batch(x, y)) == pytest.approx(expected, rel=1e-5)
        assert float(pipe.train_batch(x, y)) == pytest.approx(expected, rel=1e-5)
        check_gradients(net, grads)


@pytest.mark.parametrize("recompute", ["except_last", "always"])
@pytest.mark.parametrize("name", ["ignored tokens", "sum and count", "sum", "masked"])
def test_recompute_changes_nothing_of_a_loss(name, recompute):
    """A loss that is computed twice is counted once."""
    x, y = batch()
    net = model()
    pipe = pipeline(net, LOSSES[name], recompute=recompute)
    expected, grads = plain(LOSSES[name], x, y)
    assert float(pipe.train_batch(x, y)) == pytest.approx(expected, rel=1e-5)
    check_gradients(net, grads)


def test_losses_of_torch_are_weighted_by_their_divisors():
    """Modules, functions and partials, with two-dimensional targets and none."""
    x, y = torch.randn(7, 12), torch.tensor([3, -100, 1, -100, -100, 0, 2])
    for loss in (
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=1),
        nn.CrossEntropyLoss(reduction="sum"),
        functional.cross_entropy,
        functools.partial(functional.cross_entropy, label_smoothing=0.2),
    ):
        target = y.clamp(0) if getattr(loss, "ignore_index", -100) == 1 else y
        nets = [nn.Sequential(nn.Linear(12, 12), nn.Linear(12, CLASSES)) for _ in range(2)]
        nets[1].load_state_dict(nets[0].state_dict())
        pipe = ps.Pipeline(nets[0], loss=loss, balance=[1, 1], micro_batches=3, executor="threads")
        expected, grads = plain(loss, x, target, nets[1])
        assert float(pipe.train_batch(x, target)) == pytest.approx(expected, rel=1e-5)
        check_gradients(nets[0], grads)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_positive_weights_of_a_binary_loss_are_a_mean_over_elements(reduction):
    """`pos_weight` scales terms, and is no part of the divisor."""
    x, y = torch.randn(7, 12), torch.randint(0, 2, (7, CLASSES)).float()
    loss = nn.BCEWithLogitsLoss(pos_weight=WEIGHTS, reduction=reduction)
    nets = [nn.Sequential(nn.Linear(12, 12), nn.Linear(12, CLASSES)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    pipe = ps.Pipeline(nets[0], loss=loss, balance=[1, 1], micro_batches=3, executor="threads")
    expected, grads = plain(loss, x, y, nets[1])
    assert float(pipe.train_batch(x, y)) == pytest.approx(expected, rel=1e-5)
    check_gradients(nets[0], grads)


def test_without_ignored_targets_shares_are_the_very_floats_of_the_samples():
    """Counted otherwise they could differ in the last bit, and with them all that was ever trained."""
    x, y = batch()
    pipe = pipeline(model(), cross_entropy)
    seen = []
    right = type(pipe._assembly.stages[-1])._first_grad

    def note(stage, batch, number, root, *, side=False):
        seen.append((batch.loss_weights[number], batch.shares[number]))
        return right(stage, batch, number, root, side=side)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(pipe._assembly.stages[-1]), "_first_grad", note)
        for _ in range(3):
            pipe.train_batch(x, y.clamp(0))
    assert len(seen) == 9
    assert all(weight == share for weight, share in seen)


@pytest.mark.parametrize(
    ("name", "value"), [("weight", WEIGHTS), ("ignore_index", 3), ("reduction", "sum")]
)
def test_options_of_a_loss_module_may_change_between_batches(name, value):
    """From the next batch on, as in plain training: class weights may begin in a late epoch."""
    criterion = Transposed()
    x, y = batch()
    net, y = model(), y.clamp(0)
    for loss in (criterion, nn.CrossEntropyLoss()):
        pipe = pipeline(net, loss)
        tokens = (x, y) if loss is criterion else (x[:, 0], y[:, 0])
        for step in range(4):
            if step == 2:
                setattr(loss, name, value)
            expected = float(loss(net(tokens[0]), tokens[1]).detach())
            assert float(pipe.train_batch(*tokens)) == pytest.approx(expected, rel=1e-5)


def test_a_function_that_weighs_classes_from_some_batch_on_is_refused_then():
    """Its divisors are those of the first batches no longer."""
    options = {}
    pipe = pipeline(model(), lambda output, target: cross_entropy(output, target, **options))
    x, y = batch()
    for _ in range(4):
        pipe.train_batch(x, y.clamp(0))
    options["weight"] = WEIGHTS
    with pytest.raises(StageFailed, match="or has changed since earlier batches"):
        pipe.train_batch(x, y.clamp(0))


def test_a_batch_of_weight_zero_has_the_loss_of_plain_training():
    """That is NaN, and no gradient is: its weights stay as they are. By default it ends the run."""
    x, y = batch()
    y = torch.full_like(y, -100)
    with pytest.raises(NonFinite, match="the loss of micro-batch 0 is nan"):
        pipeline(model(), cross_entropy).train_batch(x, y)
    net = model()
    pipe = pipeline(net, cross_entropy, on_nonfinite="warn")
    assert torch.isnan(pipe.train_batch(x, y))
    expected, grads = plain(cross_entropy, x, y)
    assert math.isnan(expected)
    check_gradients(net, grads)


def test_a_total_count_of_zero_is_refused():
    """A sum over 0 is the caller's own division."""
    x, y = batch()
    pipe = pipeline(model(), sum_and_count)
    with pytest.raises(
        StageFailed, match=r"returns \(sum, count\), and the counts .* are \[0.0, 0.0, 0.0\]"
    ):
        pipe.train_batch(x, torch.full_like(y, -100))


# -- loss_weight
# -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "chimera", "seq1f1b"])
def test_loss_weight_sets_the_weight_of_a_micro_batch(schedule):
    """For a mean whose divisor cannot be seen: it goes through NumPy."""

    def hidden(output, target):
        count = float((target != -100).numpy().sum()) or float("nan")
        return cross_entropy(output, target, reduction="sum") / count

    x, y = batch()
    net = model()
    pipe = pipeline(net, hidden, schedule, loss_weight=lambda target: (target != -100).sum())
    expected, grads = plain(hidden, x, y)
    assert float(pipe.eval_batch(x, y)) == pytest.approx(expected, rel=1e-5)
    assert float(pipe.train_batch(x, y)) == pytest.approx(expected, rel=1e-5)
    check_gradients(net, grads)


def test_loss_weight_and_a_count_must_agree():
    """Both are the caller's, and one is wrong."""
    x, y = batch()
    net = model()
    pipe = pipeline(net, sum_and_count, loss_weight=lambda target: (target != -100).sum())
    expected, grads = plain(sum_and_count, x, y)
    assert float(pipe.train_batch(x, y)) == pytest.approx(expected, rel=1e-5)
    check_gradients(net, grads)
    wrong = pipeline(model(), sum_and_count, loss_weight=lambda target: (target != 3).sum())
    with pytest.raises(StageFailed, match=r"is divided by 12, and .* was expected"):
        wrong.train_batch(x, y)


@pytest.mark.parametrize("weight", [lambda _: -1, lambda target: target, lambda _: None])
def test_a_weight_that_is_not_a_number_is_refused(weight):
    """The message has the returned value."""
    pipe = pipeline(model(), cross_entropy, loss_weight=weight)
    with pytest.raises(StageFailed, match="loss_weight must return one finite number of 0 or more"):
        pipe.train_batch(*batch())


# -- loss_on="batch"
# -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "terapipe"])
def test_loss_on_batch_computes_a_contrastive_loss_on_the_whole_batch(schedule, recompute):
    """The gradient is split into micro-batches."""
    net, other = model(), model()
    pipe = pipeline(net, contrastive, schedule, loss_on="batch", recompute=recompute)
    for number in range(2):
        x, y = batch(number)
        expected, grads = plain(contrastive, x, y, other)
        assert float(pipe.eval_batch(x, y)) == pytest.approx(expected, rel=1e-5)
        assert float(pipe.train_batch(x, y)) == pytest.approx(expected, rel=1e-5)
        check_gradients(net, grads)
    assert pipe.compare_with_one_device(x, y).relative < 1e-4


def test_a_whole_loss_without_a_gradient_is_refused():
    """It would train nothing."""
    x, y = batch()

    def detached(output, target):
        return contrastive(output.detach(), target)

    pipe = pipeline(model(), detached, schedule="gpipe", loss_on="batch")
    with pytest.raises(StageFailed, match="the loss has no gradient"):
        pipe.train_batch(x, y)
    assert float(pipe.eval_batch(x, y)) > 0


def test_a_whole_loss_with_a_scaler_and_accumulation():
    """The gradient that it begins with is scaled before it is cut."""
    net, other = model(), model()
    pipe = pipeline(
        net,
        contrastive,
        "gpipe",
        loss_on="batch",
        accumulate=2,
        scaler={"init_scale": 64.0},
        optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
    )
    grads = [plain(contrastive, *batch(number), other)[1] for number in range(2)]
    for number in range(2):
        pipe.train_batch(*batch(number))
    before = dict(model().named_parameters())
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(
            parameter, before[name] - grads[1][name] / 2, rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "chimera", "seq1f1b", "pipedream"])
def test_schedules_that_go_back_too_early_for_a_whole_loss_are_refused(schedule):
    """At construction, with one that does not."""
    with pytest.raises(ScheduleError, match=r"loss_on='batch' needs all outputs .* such as gpipe"):
        pipeline(model(), contrastive, schedule, loss_on="batch")


# -- what the evaluations leave alone
# --------------------------------------------------------------------------------------


class Counting(nn.Module):
    """A loss with a buffer and a list that move whenever it is called."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.seen = []

    def forward(self, output, target):
        """Once for each micro-batch."""
        self.calls += 1
        self.seen.append(len(target))
        return cross_entropy(output, target)


def test_a_loss_module_is_called_once_for_each_micro_batch():
    """Evaluations that test how it adds up use copies."""
    loss = Counting()
    pipe = pipeline(model(), loss)
    for _ in range(2):
        pipe.train_batch(*batch())
    assert float(loss.calls) == 6
    assert loss.seen == [3, 2, 2] * 2


def test_a_random_loss_repeats_its_numbers_and_does_not_change_the_generator():
    """Its numbers depend on seed, step and micro-batch, also with ranks as threads."""

    def noisy(output, target):
        return functional.mse_loss(
            functional.dropout(output, 0.5), target.float().unsqueeze(-1).expand_as(output)
        )

    def run(schedule, recompute):
        net = model()
        net[2] = nn.Dropout(0.3)
        torch.manual_seed(9)
        pipe = pipeline(net, noisy, schedule, recompute=recompute)
        losses = [float(pipe.train_batch(*batch())) for _ in range(3)]
        return losses, torch.rand(())

    first = run("1f1b", "never")
    assert len(set(first[0])) == 3
    for schedule in ("1f1b", "gpipe", "zb-h1"):
        for recompute in ("never", "always"):
            assert run(schedule, recompute) == first


def test_a_loss_that_works_in_place_is_not_disturbed():
    """Evaluations use separate outputs."""

    def loss(output, target):
        return functional.mse_loss(output.mul_(2.0).sub_(1.0).sum(-1), target.float())

    x, y = batch()
    net = model()
    pipe = pipeline(net, loss)
    expected, grads = plain(loss, x, y)
    assert float(pipe.train_batch(x, y)) == pytest.approx(expected, rel=1e-5)
    check_gradients(net, grads)


def test_a_loss_that_cannot_be_tested_is_weighted_by_samples_with_a_warning():
    """It takes nothing but what the model gives it."""
    outputs = []

    def picky(output, target):
        if output.data_ptr() not in outputs:
            raise RuntimeError("not an output of the model")
        return output.square().mean()

    class Noting(nn.Module):
        def forward(self, x):
            outputs.append(x.data_ptr())
            return x

    x, y = batch()
    net = nn.Sequential(*model(), Noting())
    pipe = ps.Pipeline(net, loss=picky, balance=[3, 4], micro_batches=3, executor="threads")
    with pytest.warns(UserWarning, match=r"could not be tested, .*not an output of the model"):
        loss = float(pipe.train_batch(x, y))
    assert loss == pytest.approx(float(model()(x).square().mean().detach()), rel=1e-5)


class Penalised(nn.Linear):
    """Has a loss of its own."""

    per_token = True

    def forward(self, x):
        """A mean over samples."""
        out = super().forward(x)
        side_loss(out.square().mean())
        return out


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "seq1f1b"])
def test_side_losses_are_weighted_by_samples_and_the_loss_by_its_divisor(schedule):
    """This holds also if the last stage has both."""

    def made():
        net = model()
        for place in (1, 5):
            source = net[place]
            net[place] = Penalised(source.in_features, source.out_features)
            net[place].load_state_dict(source.state_dict())
        return net

    x, y = batch()
    net, other = made(), made()
    pipe = pipeline(net, cross_entropy, schedule)
    with collecting_side_losses() as sides:
        whole = cross_entropy(other(x), y)
        whole = sum(sides, whole)
    whole.backward()
    for number in range(3):
        assert float(pipe.train_batch(x, y)) == pytest.approx(float(whole.detach()), rel=1e-5)
        check_gradients(net, {n: p.grad for n, p in other.named_parameters()}, number + 1)


def test_asynchronous_schedules_weight_each_batch_separately():
    """Several batches are in flight, each with its weights."""
    pipe = pipeline(
        model(),
        cross_entropy,
        ps.schedule("pipedream-2bw", 3, 3),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
    )
    batches = [batch(number) for number in range(5)]
    losses = [float(loss) for loss in pipe.train(batches)]
    assert losses == pytest.approx([plain(cross_entropy, *pair)[0] for pair in batches], rel=1e-5)
