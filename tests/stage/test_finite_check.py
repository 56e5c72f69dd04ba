"""A NaN or infinite loss or gradient is raised, skipped or logged before an update uses it."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import NonFinite, SettingError
from penstock.ranks.processes.launch import RankFailed
from penstock.stage import finite_check
from penstock.stage.finite_check import FiniteCheck

NAN = float("nan")


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


def batch(target=1.0):
    """Return eight samples and targets."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    return x, torch.full((8, 6), target)


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


class Recorded:
    """Checks that are read later, which note their calls."""

    def __init__(self, *, deferring=False):
        self.deferring, self.added, self.reads = deferring, [], 0

    def add(self, failed, message, report=None):
        """Note a check."""
        self.added.append((bool(failed), message, report))

    def read(self):
        """Count the reads."""
        self.reads += 1


def stage_of(*layers, index=4, borrowed=(), loss_on="micro_batch"):
    """Return a stage with these layers."""
    parameters = [p for layer in layers for p in layer.parameters() if p.requires_grad]
    return SimpleNamespace(
        index=index,
        device=torch.device("cpu"),
        layers=[SimpleNamespace(name=f"l{n}", module=layer) for n, layer in enumerate(layers)],
        update=SimpleNamespace(parameters=parameters, borrowed=list(borrowed)),
        loss_options=SimpleNamespace(loss_on=loss_on),
        runner=SimpleNamespace(checks=Recorded()),
    )


def batch_with(losses=(), *, step=3, training=True, keeps_outputs=False):
    """Return a batch whose micro-batches have these losses."""
    numbers = {number: torch.tensor(value) for number, value in losses}
    return SimpleNamespace(
        step=step, training=training, keeps_outputs=keeps_outputs, losses=numbers
    )


def check_of(policy="raise", *, gradients=True):
    """Return the check of rank 2."""
    return FiniteCheck(2, policy, gradients)


INF = float("inf")


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("loss_on", ["micro_batch", "batch"])
def test_a_loss_is_checked_when_its_micro_batch_has_been_computed(value, loss_on):
    """Only that of the op; a loss on the whole batch comes for all micro-batches at once."""
    stage = stage_of(nn.Linear(1, 1), loss_on=loss_on)
    batch = batch_with([(0, 1.0), (1, value)])
    check = check_of()
    if loss_on == "micro_batch":
        check.after_loss(stage, batch, 0, "4F0")
        check.after_loss(stage, batch, 2, "4F2")
    number = 1 if loss_on == "micro_batch" else 0
    with pytest.raises(NonFinite, match=f"the loss of micro-batch 1 is {value}") as caught:
        check.after_loss(stage, batch, number, f"4F{number}")
    error = caught.value
    assert (error.rank, error.stage, error.micro_batch) == (2, 4, 1)
    assert f"(stage 4) failed in 4F{number} of step 3" in str(error)
    assert check.has_nonfinite
    check.reset()
    assert not check.has_nonfinite


@pytest.mark.parametrize("state", [{"training": False}, {"keeps_outputs": True}])
def test_evaluations_and_comparisons_are_not_checked(state):
    """They return what was computed."""
    layer = nn.Linear(2, 1)
    stage, check = stage_of(layer), check_of()
    batch = batch_with([(0, NAN)], **state)
    layer.bias.grad = torch.full((1,), NAN)
    check.after_loss(stage, batch, 0, "4F0")
    check.after_backward(stage, batch, 0)
    check.before_update(stage, "4U1")
    assert not check.has_nonfinite
    check.after_backward(stage, batch_with(), 0)
    with pytest.raises(NonFinite, match="from micro-batch 0 on"):
        check.before_update(stage, "4U1")


def test_the_first_micro_batch_with_a_gradient_that_is_not_finite_is_named():
    """Once: the next update is another. Without checks of gradients there is none."""
    layer = nn.Linear(2, 1)
    layer.bias.grad, layer.weight.grad = torch.zeros(1), torch.zeros(1, 2)
    stage = stage_of(layer, index=4)
    check, none = check_of(), check_of(gradients=False)
    for number, value in enumerate([1.0, INF, NAN]):
        layer.bias.grad += value
        check.after_backward(stage, batch_with(), number)
        none.after_backward(stage, batch_with(), number)
    none.before_update(stage, "4U1")
    text = r"in 4U1 of step 3: the gradient of l0\.bias is not finite, from micro-batch 1 on; this"
    with pytest.raises(NonFinite, match=text) as caught:
        check.before_update(stage, "4U1")
    assert caught.value.micro_batch == 1
    layer.weight.grad[0, 1] = NAN
    with pytest.raises(NonFinite, match=r"of l0\.weight and 1 more parameters is .*, from one of"):
        check.before_update(stage, "4U1")
    layer.bias.grad.zero_()
    check.after_backward(stage, batch_with(), 5)
    check.reset()
    with pytest.raises(NonFinite, match=r"of l0\.weight is not finite, from one of"):
        check.before_update(stage, "4U1")


def test_the_probe_is_the_smallest_trained_parameter_of_the_first_layer_that_has_a_small_one():
    """All gradients of the layers behind flow through it; larger ones would take time."""
    frozen = nn.Linear(1, 1).requires_grad_(requires_grad=False)
    large = nn.Linear(300, 300, bias=False)
    small = nn.Linear(5, 2)
    behind = nn.Linear(1, 1)
    layers = (frozen, large, small, behind)
    stage, check = stage_of(*layers), check_of()
    for layer in layers:
        for parameter in layer.parameters():
            parameter.grad = torch.full_like(parameter, NAN)
    small.bias.grad = None
    check.after_backward(stage, batch_with(), 0)
    small.bias.grad = torch.zeros(2)
    check.after_backward(stage, batch_with(), 1)
    small.bias.grad[1] = NAN
    check.after_backward(stage, batch_with(), 2)
    with pytest.raises(NonFinite, match="from micro-batch 2 on"):
        check.before_update(stage, "4U1")


@pytest.mark.parametrize("borrowed", [False, True])
def test_gradients_of_borrowed_parameters_are_checked_too(borrowed):
    """Another stage updates them, with the sum of all."""
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.grad = torch.tensor([[1.0, NAN]])
    stage = stage_of(nn.Linear(1, 1), layer, borrowed=[layer.weight] if borrowed else ())
    stage.update.parameters = stage.update.parameters[:2]
    check = check_of()
    check.after_backward(stage, batch_with(), 0)
    if borrowed:
        with pytest.raises(NonFinite, match=r"l1\.weight is not finite"):
            check.before_update(stage, "4U1")
    else:
        check.before_update(stage, "4U1")


def test_a_sparse_gradient_that_is_not_finite_is_named():
    """It is no probe, whose sum would take time; its values are checked."""
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    stage, check = stage_of(table), check_of()
    check.after_backward(stage, batch_with(), 0)
    check.before_update(stage, "4U1")
    table.weight.grad = table.weight.grad * NAN
    check.after_backward(stage, batch_with(), 1)
    with pytest.raises(NonFinite, match=r"l0\.weight is not finite, from one of its micro-batches"):
        check.before_update(stage, "4U1")


@pytest.mark.parametrize(
    ("policy", "text"), [("skip", "the update is skipped on all ranks"), ("warn", "going on")]
)
def test_a_line_is_logged_once_a_step(policy, text, caplog):
    """With rank, stage and step; every other loss or gradient of the step is known as well."""
    stage, check = stage_of(nn.Linear(1, 1)), check_of(policy)
    for step in (3, 4):
        batch = batch_with([(0, NAN), (1, INF)], step=step)
        for number in range(2):
            check.after_loss(stage, batch, number, f"4F{number}")
    assert check.has_nonfinite
    assert [record.getMessage() for record in caplog.records] == [
        f"rank 2 (stage 4), step {step}: the loss of micro-batch 0 is nan; {text}"
        for step in (3, 4)
    ]


class OnDevice(torch.Tensor):
    """A tensor in host memory that says that it is on a device."""

    is_cpu = False


def on_device(value):
    """Return a number on a device."""
    return torch.tensor(value).as_subclass(OnDevice)


def test_without_checks_of_gradients_a_device_reports_losses_alone():
    """A loss scaler checks the gradients, and skips the step."""
    layer = nn.Linear(2, 1, bias=False)
    stage, check = stage_of(layer), check_of(gradients=False)
    checks = stage.runner.checks
    stage.device = SimpleNamespace(type="device")
    layer.weight.grad = torch.tensor([[1.0, INF]]).as_subclass(OnDevice)
    check.after_backward(stage, batch_with(), 0)
    check.before_update(stage, "4U1")
    assert checks.added == []
    batch = batch_with()
    batch.losses = {0: on_device(NAN)}
    check.after_loss(stage, batch, 0, "4F0")
    check.after_backward(stage, batch, 0)
    check.before_update(stage, "4U1")
    assert [message.partition(":")[2][:29] for _, message, _ in checks.added] == [
        " the loss of micro-batch 0 is"
    ]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("deferring", [False, True])
@pytest.mark.parametrize("policy", ["raise", "warn", "skip"])
def test_on_a_device_checks_are_left_there_and_read_in_time(policy, deferring, streaming):
    """Losses and probes with their micro-batches, then all gradients; "skip" must know at once."""
    layer = nn.Linear(2, 1, bias=False)
    stage, check = stage_of(layer), check_of(policy)
    stage.device = torch.device("meta")
    stage.runner.checks = checks = Recorded(deferring=deferring)
    batch = batch_with()
    batch.losses = {0: on_device(1.0), 1: on_device(NAN)}
    for number in range(2):
        check.after_loss(stage, batch, number, f"4F{number}")
        layer.weight.grad = torch.tensor([[1.0, INF if number else 2.0]]).as_subclass(OnDevice)
        check.after_backward(stage, batch, number)
    stage.device = SimpleNamespace(type="device")
    with pytest.MonkeyPatch.context() as patch:
        norms = torch.tensor([INF])
        patch.setattr(finite_check, "norms_of", lambda parameters, device, kind: norms)
        check.before_update(stage, "4U1", streaming=streaming)
    if policy == "skip":
        assert check.has_nonfinite
        assert checks.added == []
    else:
        assert not check.has_nonfinite
        place = "rank 2 (stage 4): "
        expected = [
            (False, f"{place}the loss of micro-batch 0 is not finite"),
            (True, f"{place}the loss of micro-batch 1 is not finite"),
            (False, f"{place}the gradient of stage 4 after micro-batch 0 is not finite"),
            (True, f"{place}the gradient of stage 4 after micro-batch 1 is not finite"),
            (True, f"{place}a gradient of stage 4 is not finite"),
        ]
        for (failed, message, report), (is_failed, start) in zip(
            checks.added, expected, strict=True
        ):
            assert failed is is_failed
            advice = f". {finite_check._ADVICE}" if policy == "raise" else ""
            assert message == start + advice
            assert (report is None) == (policy == "raise")
    assert checks.reads == (0 if streaming or deferring else 1)
