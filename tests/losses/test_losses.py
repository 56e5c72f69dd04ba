"""Losses of every kind under pipelines, held against plain PyTorch on the undivided batch."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import NonFinite, ScheduleError, SettingError, StageFailed
from penstock.modules.side_loss import collecting_side_losses, side_loss

CLASSES, TOKENS, SAMPLES = 7, 5, 7
WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5, 1.5, 0.1, 2.0])


def model(seed=1):
    """Seven numbers for each of five tokens; no token sees another."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Embedding(CLASSES, 12),
            nn.Linear(12, 12),
            nn.Tanh(),
            nn.Linear(12, 12),
            nn.Tanh(),
            nn.Linear(12, CLASSES),
        )


def batch(number=0):
    """Seven samples whose padding is unevenly spread: of three micro-batches, of 3, 2 and 2, the
    second is padding alone.
    """
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randint(0, CLASSES, (2, SAMPLES, TOKENS), generator=generator)
    y[0, :3] = y[3:5] = y[6, number % 3] = -100
    return x, y


def rows(output, target):
    """Tokens one by one."""
    return output.flatten(0, 1), target.flatten()


def cross_entropy(output, target, **options):
    """Of tokens."""
    return functional.cross_entropy(*rows(output, target), **options)


def masked_mean(output, target, least=None):
    """A mean over tokens that count, as written by hand."""
    mask = (target != -100).float()
    each = cross_entropy(output, target.clamp(0), reduction="none").view_as(mask)
    count = mask.sum() if least is None else mask.sum().clamp(min=least)
    return (each * mask).sum() / count


def chosen_mean(output, target):
    """The same by choosing."""
    return functional.cross_entropy(output[target != -100], target[target != -100])


def sum_and_count(output, target):
    """The same as a pair."""
    return cross_entropy(output, target, reduction="sum"), (target != -100).sum()


def contrastive(output, _):
    """Each sample against all others of the batch: InfoNCE."""
    one, other = (functional.normalize(part, dim=-1) for part in (output.mean(1), output[:, 0]))
    return functional.cross_entropy(one @ other.T / 0.1, torch.arange(len(one)))


class Transposed(nn.CrossEntropyLoss):
    """A loss module of the user's own."""

    def forward(self, output, target):
        """Classes come second."""
        return super().forward(output.transpose(1, 2), target)


LOSSES = {
    "ignored tokens": cross_entropy,
    "class weights": functools.partial(cross_entropy, weight=WEIGHTS),
    "label smoothing": functools.partial(cross_entropy, weight=WEIGHTS, label_smoothing=0.1),
    "module": Transposed(weight=WEIGHTS),
    "masked": masked_mean,
    "masked, at least 1": functools.partial(masked_mean, least=1),
    "chosen": chosen_mean,
    "sum and count": sum_and_count,
    "sum": functools.partial(cross_entropy, reduction="sum"),
    "sum over a number": lambda output, target: cross_entropy(output, target, reduction="sum") / 9,
    "sum over samples": lambda output, target: (
        cross_entropy(output, target, reduction="sum") / len(target)
    ),
    "mean": lambda output, target: (output - target.unsqueeze(-1)).square().mean(),
    "half a mean": lambda output, target: 0.5 * functional.mse_loss(output.sum(-1), target.float()),
    "sum over samples of means": lambda output, _: output.square().mean((1, 2)).sum(),
}


def plain(loss, x, y, net=None):
    """Loss and gradients of the undivided batch in plain PyTorch."""
    net = model() if net is None else net
    found = loss(net(x), y)
    if isinstance(found, tuple):
        found = found[0] / found[1]
    found.backward()
    return float(found.detach()), {name: p.grad for name, p in net.named_parameters()}


def pipeline(net, loss, schedule="1f1b", micro_batches=3, **options):
    """In this process, over as many stages as the schedule has."""
    if isinstance(schedule, str):
        stages = {"chimera": 4, "interleaved": 4}.get(schedule, 3)
        micro_batches = 4 if schedule in ("chimera", "interleaved") else micro_batches
        schedule = ps.schedule(schedule, stages, micro_batches)
    balance = {2: [3, 3], 3: [2, 2, 2], 4: [1, 1, 2, 2]}[schedule.stages]
    options.setdefault("executor", "threads")
    return ps.Pipeline(net, loss=loss, balance=balance, schedule=schedule, **options)


def train(pipe, batches):
    """On several, as a cause may not be in the first."""
    return [float(pipe.train_batch(*batch(number))) for number in range(batches)]


def check_gradients(net, expected, times=1):
    """Those of the undivided batch, but for rounding."""
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(
            parameter.grad, times * expected[name], rtol=2e-4, atol=2e-6 * times, msg=name
        )


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


# -- refused
# ---------------------------------------------------------------------------------------------------------------


REFUSED = {
    "contrastive": contrastive,
    "root": lambda output, target: masked_mean(output, target).sqrt(),
    "two means": lambda output, target: cross_entropy(output, target) + output.square().mean(),
    "mean over what the output chooses": lambda output, _: output[output > 0].mean(),
    "spread": lambda output, _: output.var(),
}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "chimera", "seq1f1b"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_cannot_be_divided_is_refused_with_its_numbers(name, schedule):
    """Each of these trains plainly, and would train something else in micro-batches."""
    pipe = pipeline(model(), REFUSED[name], schedule)
    with pytest.raises(
        StageFailed,
        match=r"the loss of a batch is not made of .* both joined have .* Ways out: .*loss_on",
    ):
        train(pipe, 3)


@pytest.mark.parametrize("training", [False, True])
def test_label_smoothing_without_any_class_weight_is_refused(training):
    """Plain training divides the smoothing of these samples by the weights of the others."""
    weight = WEIGHTS.clone()
    weight[0] = 0.0
    x, y = batch()
    y[3:5] = 0
    loss = functools.partial(cross_entropy, weight=weight, label_smoothing=0.1)
    pipe = pipeline(model(), loss)
    with pytest.raises(StageFailed, match="all targets of micro-batch 1 have a class weight of 0"):
        (pipe.train_batch if training else pipe.eval_batch)(x, y)


def test_a_loss_of_torch_that_broadcasts_its_samples_is_refused():
    """Outputs (n, 1) and targets (n,) give n x n differences: of a micro-batch, other ones."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    pipe = ps.Pipeline(
        net, loss=functional.mse_loss, balance=[1, 1], micro_batches=2, executor="threads"
    )
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    with (
        pytest.warns(UserWarning, match="broadcasting"),
        pytest.raises(StageFailed, match=r"the loss of a batch is not made of .* both joined have"),
    ):
        pipe.train_batch(x, x.sum(1))
    pipe.train_batch(x, x.sum(1, keepdim=True))


def flooding(output, target, level=0.01):
    """Ishida et al., 2020: a mean below a level is pushed up to it. Here it is always above."""
    return (functional.cross_entropy(*rows(output, target.clamp(0))) - level).abs() + level


def over_its_value(output, target):
    """A loss whose value is 1 on every batch."""
    mean = cross_entropy(output, target.clamp(0))
    return mean / mean.item()


def balanced(output, target):
    """Two terms, of which one is scaled to the size of the other."""
    mean, square = cross_entropy(output, target.clamp(0)), output.square().mean()
    return mean + square * (mean.detach() / square.detach())


def clamped(output, _):
    """Means of features, of which the small ones do not count. Here none is."""
    return output.square().mean(0).clamp(min=1e-9).sum() / 8


def larger(output, _):
    """The same with a comparison that leaves no trace in the graph."""
    return max(output.square().mean(), torch.tensor(0.02))


REFUSED_BY_GRAPH = {
    "flooding": (flooding, "nonlinear function of a mean or sum over samples: abs acts"),
    "clamped means": (clamped, "nonlinear function of a mean or sum over samples: clamp acts"),
    "over its value": (over_its_value, "These values add up, their gradients do not"),
    "balanced": (balanced, "is not made of"),
    "larger": (larger, "is not made of"),
}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "chimera"])
@pytest.mark.parametrize("name", REFUSED_BY_GRAPH)
def test_a_loss_whose_values_add_up_but_whose_gradients_do_not_is_refused(name, schedule):
    """Of each, the losses of micro-batches add up to the loss of the first batches."""
    loss, message = REFUSED_BY_GRAPH[name]
    pipe = pipeline(model(), loss, schedule)
    with pytest.raises(StageFailed, match=message):
        train(pipe, 1)


MIXED = {
    "softmax over samples": lambda o, y: functional.cross_entropy(
        o[:, 0].T.log_softmax(-1).T, y[:, 0].clamp(0)
    ),
    "samples left out": lambda o, y: functional.cross_entropy(
        torch.narrow(o, -3, 0, len(o) - 1)[:, 0], y[1:, 0].clamp(0)
    ),
    "targets of other samples": lambda o, y: functional.cross_entropy(
        o[:, 0], y[:, 0].clamp(0).roll(1)
    ),
    "weights of the targets": lambda o, y: functional.cross_entropy(
        o[:, 0],
        y[:, 0].clamp(0),
        weight=torch.bincount(y[:, 0].clamp(0), minlength=CLASSES).float(),
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_a_cross_entropy_over_several_samples_does_not_count_as_one_per_row(name, monkeypatch):
    """The graph of each ends in the likelihood that the numeric test is left out for, where outputs
    are large.
    """
    monkeypatch.setattr("penstock.losses.loss_weights._LARGE_OUTPUT", 0)
    with pytest.raises(StageFailed, match="is not made of"):
        train(pipeline(model(), MIXED[name], "gpipe"), 1)


@pytest.mark.parametrize("large", [False, True], ids=["tested", "by its graph"])
def test_a_hook_that_rescales_the_gradient_of_the_output_is_refused(large, monkeypatch):
    """By the norm over the whole batch, which no micro-batch has; the graph is that of a plain
    cross entropy.
    """

    def loss(output, target):
        output.register_hook(lambda grad: grad / grad.norm())
        return functional.cross_entropy(*rows(output, target.clamp(0)))

    if large:
        monkeypatch.setattr("penstock.losses.loss_weights._LARGE_OUTPUT", 0)
    with pytest.raises(StageFailed, match="their gradients do not"):
        train(pipeline(model(), loss), 1)


def test_nonlinear_functions_of_single_samples_are_no_obstacle():
    """Each sample's loss is one number, and the graph has as many of them as there are samples."""

    def loss(output, target):
        means = [
            cross_entropy(output[i : i + 1], target.clamp(0)[i : i + 1]) for i in range(len(output))
        ]
        return sum((mean - 0.01).abs().exp() for mean in means) / len(means)

    expected, gradients = plain(loss, *batch())
    net = model()
    assert math.isclose(train(pipeline(net, loss), 1)[0], expected, rel_tol=1e-5)
    check_gradients(net, gradients)


def test_a_loss_that_draws_is_said_to_be_untested():
    """Its numbers are others for each part of a batch, so they cannot be compared."""

    def loss(output, target):
        order = torch.randperm(len(target))
        return cross_entropy(output, target.clamp(0)[order])

    with pytest.warns(UserWarning, match="could not be tested, for the loss draws random"):
        train(pipeline(model(), loss), 1)


def test_one_micro_batch_allows_any_loss():
    """Nothing is divided."""
    x, y = batch()
    for loss in REFUSED.values():
        net = model()
        expected, grads = plain(loss, x, y)
        found = float(pipeline(net, loss, micro_batches=1).train_batch(x, y))
        assert found == pytest.approx(expected, rel=1e-5)
        check_gradients(net, grads)


def test_a_count_that_depends_on_the_output_is_refused():
    """It is known too late."""

    def loss(output, _):
        positive = output > 0
        return output[positive].sum(), positive.sum()

    pipe = pipeline(model(), loss)
    with pytest.raises(StageFailed, match=r"micro-batch \d is divided by .* Ways out"):
        pipe.train_batch(*batch())


def test_a_divisor_that_needs_real_values_is_computed_by_an_evaluation():
    """The loss goes through NumPy, and its count does not depend on the output."""

    def loss(output, target):
        assert output.detach().numpy().size
        return cross_entropy(output, target, reduction="sum"), (target != -100).sum()

    x, y = batch()
    for schedule in ("1f1b", "seq1f1b"):
        net = model()
        expected, grads = plain(loss, x, y)
        found = float(pipeline(net, loss, schedule).train_batch(x, y))
        assert found == pytest.approx(expected, rel=1e-5)
        check_gradients(net, grads)


def test_a_loss_that_is_no_function_and_words_that_mean_nothing_are_refused():
    """Before anything runs."""
    for options, words in (
        ({"loss_weight": 3}, "loss_weight must be a function"),
        ({"loss_on": "sample"}, "loss_on must be 'micro_batch' or 'batch'"),
        (
            {"loss_on": "batch", "loss_weight": len, "schedule": "gpipe"},
            "loss_weight has no effect",
        ),
    ):
        with pytest.raises(SettingError, match=words):
            pipeline(model(), cross_entropy, **options)
    with pytest.raises(SettingError, match="loss must be a function of output and target"):
        pipeline(model(), 3)


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
        found = float(pipe.train_batch(x, y))
    assert found == pytest.approx(float(model()(x).square().mean().detach()), rel=1e-5)


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
    found = [float(loss) for loss in pipe.train(batches)]
    assert found == pytest.approx([plain(cross_entropy, *each)[0] for each in batches], rel=1e-5)
