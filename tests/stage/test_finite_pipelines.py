"""Pipelines with a NaN or infinite loss or gradient, which `penstock.stage.finite_check` reports."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import NonFinite, SettingError
from penstock.ranks.processes.launch import RankFailed
from penstock.stage.finite_check import FiniteCheck

NAN = float("nan")


def batch(target=1.0):
    """Return eight samples and targets."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    return x, torch.full((8, 6), target)


class SpoilGradient(torch.autograd.Function):
    """Identity whose gradient is NaN if it was asked to be."""

    @staticmethod
    def forward(ctx, x, spoils):
        """Return x."""
        ctx.spoils = spoils
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        """Return the gradient, or NaN."""
        return grad * NAN if ctx.spoils else grad, None


class Poisoned(nn.Module):
    """A linear map whose output is finite, with a NaN gradient in its second forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.forwards = 0

    def forward(self, x):
        """Count the forwards."""
        self.forwards += 1
        return SpoilGradient.apply(self.linear(x), self.forwards == 2)


def model(poisoned=None):
    """Return four layers; the one of index `poisoned` has a NaN gradient in micro-batch 1."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            *(Poisoned() if index == poisoned else nn.Linear(6, 6) for index in range(4))
        )


def sgd(parameters):
    """SGD with momentum and decay, which change weights without gradients too."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def pipeline(network, schedule="1f1b", **options):
    """Return a pipeline of two stages in threads."""
    options.setdefault("optimizer", sgd)
    return ps.Pipeline(
        network,
        loss=functional.mse_loss,
        balance=[2, 2],
        schedule=schedule,
        micro_batches=4,
        executor="threads",
        **options,
    )


def weights(network):
    """Return a copy of all weights."""
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


def unchanged(network, before):
    """Whether all weights are as before, to the bit."""
    return all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "chimera", "zb-h1"])
def test_a_nan_loss_stops_before_any_weight_changes_and_names_the_micro_batch(schedule):
    """The loss of micro-batch 2 is NaN; no rank has updated."""
    network = model()
    pipe = pipeline(network, schedule)
    pipe.train_batch(*batch())
    before = weights(network)
    x, y = batch()
    y[5] = NAN
    with pytest.raises(
        NonFinite, match=r"stage 1\) failed in 1F2 of step 1: the loss of micro-batch 2 is nan"
    ) as caught:
        pipe.train_batch(x, y)
    assert (caught.value.stage, caught.value.micro_batch) == (1, 2)
    assert unchanged(network, before)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize(("poisoned", "stage"), [(1, 0), (3, 1)])
def test_a_nan_gradient_of_a_finite_loss_names_stage_and_micro_batch(schedule, poisoned, stage):
    """The stage whose backward makes the NaN, or the one before it, stops before its update."""
    network = model(poisoned)
    pipe = pipeline(network, schedule)
    before = weights(network)
    with pytest.raises(NonFinite, match=r"is not finite, from micro-batch 1 on") as caught:
        pipe.train_batch(*batch())
    assert caught.value.micro_batch == 1
    # A NaN of the last stage reaches the first, which may be at its update before.
    assert caught.value.stage <= stage
    assert f"(stage {caught.value.stage}) failed in {caught.value.stage}U" in str(caught.value)
    stopped = (0, 1) if caught.value.stage == 0 else (2, 3)
    for name, tensor in network.state_dict().items():
        assert int(name[0]) not in stopped or torch.equal(tensor, before[name])


@pytest.mark.parametrize("schedule", ["gpipe", "chimera"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_skip_leaves_all_ranks_as_they_were_and_trains_on(schedule, clip, caplog):
    """A skipped batch leaves no trace: as if training had gone without it."""
    network, plain = model(), model()
    pipe = pipeline(network, schedule, on_nonfinite="skip", clip_grad_norm=clip)
    reference = pipeline(plain, schedule, on_nonfinite="skip", clip_grad_norm=clip)
    bad = batch(target=NAN)
    with caplog.at_level(logging.WARNING, "penstock"):
        pipe.train_batch(*batch())
        assert not caplog.records
        pipe.train_batch(*bad)
        pipe.train_batch(*batch(target=2.0))
    assert "the update is skipped on all ranks" in caplog.text
    reference.train_batch(*batch())
    reference.train_batch(*batch(target=2.0))
    assert unchanged(network, weights(plain))


def test_skip_holds_tied_weights_together():
    """Stages that share a weight step or skip together."""
    network = model()
    network[3].weight = network[0].weight
    pipe = pipeline(network, on_nonfinite="skip")
    before = weights(network)
    pipe.train_batch(*batch(target=NAN))
    assert unchanged(network, before)
    pipe.train_batch(*batch())
    assert not unchanged(network, before)


def test_warn_goes_on_with_one_line_per_rank_and_step(caplog):
    """The update is applied, as in plain PyTorch."""
    network = model()
    pipe = pipeline(network, on_nonfinite="warn")
    with caplog.at_level(logging.WARNING, "penstock"):
        pipe.train_batch(*batch(target=NAN))
    assert all(tensor.isnan().any() for tensor in network.state_dict().values())
    assert sorted(record.args[0] for record in caplog.records) == [0, 1]


def test_a_loss_scaler_goes_on_after_infinite_gradients_and_a_nan_loss_raises():
    """The scaler lowers its scale for gradients; a loss that is NaN no scale can mend."""
    network = model(poisoned=1)
    pipe = pipeline(network, scaler={"init_scale": 8.0})
    before = weights(network)
    pipe.train_batch(*batch())
    assert unchanged(network, before)
    with pytest.raises(NonFinite, match="the loss of micro-batch 0 is nan"):
        pipe.train_batch(*batch(target=NAN))


@pytest.mark.parametrize("policy", ["raise", "warn"])
def test_asynchronous_schedules_check_before_every_update(policy):
    """A stage of a stream checks at its own updates."""
    pipe = pipeline(model(), "pipedream", on_nonfinite=policy)
    if policy == "warn":
        pipe.train_batch(*batch(target=NAN))
        return
    with pytest.raises(NonFinite, match="the loss of micro-batch 0 is nan"):
        pipe.train_batch(*batch(target=NAN))


def test_skip_is_refused_for_asynchronous_schedules():
    """Their stages update at different times and cannot skip together."""
    with pytest.raises(SettingError, match="on_nonfinite: pipedream is asynchronous"):
        pipeline(model(), "pipedream", on_nonfinite="skip")


def test_an_unknown_policy_is_refused():
    """The message names the three values."""
    with pytest.raises(SettingError, match="'raise', 'skip' or 'warn', not 'ignore'"):
        pipeline(model(), on_nonfinite="ignore")


def test_evaluation_and_pipelines_without_optimizer_return_what_is_computed():
    """A NaN test loss is a result; without an optimizer the gradients are the caller's."""
    pipe = pipeline(model())
    assert pipe.eval_batch(*batch(target=NAN)).isnan()
    network = model(poisoned=1)
    pipeline(network, optimizer=None).train_batch(*batch())
    assert network[0].weight.grad.isnan().any()


def test_a_norm_that_overflows_is_no_reason_to_stop():
    """The norm of finite gradients may be infinite in float32."""
    network = model()
    pipe = pipeline(network)
    stage = next(stage for stage in pipe._assembly.stages if stage.index == 0)
    for parameter in stage.update.parameters:
        parameter.grad = torch.full_like(parameter, 1e30)
    update = ps.schedule("gpipe", stages=2, micro_batches=1).programs[0][-1]
    check = FiniteCheck(0, "raise", gradients=True, _active=True)
    check.before_update(stage, update)
    stage.update.parameters[0].grad[0, 0] = NAN
    with pytest.raises(NonFinite, match=r"the gradient of 0\.weight is not finite, from one of"):
        check.before_update(stage, update)


def train_in_process(policy):
    """Train three batches as one of two processes; the targets of the second are NaN.

    Returns the weights on rank 0, and the norm of the last step.
    """
    network = model()
    network[3].weight = network[0].weight
    pipe = ps.Pipeline(
        network,
        loss=functional.mse_loss,
        optimizer=sgd,
        balance=[2, 2],
        schedule="1f1b",
        micro_batches=4,
        on_nonfinite=policy,
    )
    for target in (1.0, NAN, 2.0):
        pipe.train_batch(*batch(target=target))
    weights_here = pipe.state_dict()
    pipe.close()
    return weights_here


def test_processes_skip_together_as_threads_do():
    """The rank of the first stage hears of the other's loss; tied weights are those of threads."""
    network = model()
    network[3].weight = network[0].weight
    pipe = pipeline(network, on_nonfinite="skip")
    for target in (1.0, 2.0):
        pipe.train_batch(*batch(target=target))
    in_processes = ps.launch(train_in_process, 2, "skip")[0]
    for name, tensor in network.state_dict().items():
        torch.testing.assert_close(in_processes[name], tensor, rtol=0, atol=0)


def test_the_other_process_names_rank_stage_and_micro_batch():
    """The error of the launcher is that of the rank with the loss."""
    with pytest.raises(
        RankFailed, match=r"^rank 1 \(stage 1\) failed in 1F0 of step 1: the loss of micro-batch 0"
    ) as caught:
        ps.launch(train_in_process, 2, "raise")
    assert caught.value.rank == 1
