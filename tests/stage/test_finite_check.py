"""Checks of losses and gradients: what they read, when, and what they report."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from penstock.errors import NonFinite
from penstock.stage import finite_check
from penstock.stage.finite_check import FiniteCheck

NAN, INF = float("nan"), float("inf")


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


def batch_with(losses=(), *, step=3, training=True, keeps_outputs=False, targets=None):
    """Return a batch whose micro-batches have these losses."""
    numbers = {number: torch.tensor(value) for number, value in losses}
    return SimpleNamespace(
        step=step, training=training, keeps_outputs=keeps_outputs, losses=numbers, targets=targets
    )


def check_of(policy="raise", *, gradients=True):
    """Return the check of rank 2."""
    return FiniteCheck(2, policy, gradients)


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


@pytest.mark.parametrize(
    ("target", "padding"),
    [
        (torch.tensor([-100, -100]), True),
        ((torch.tensor([1, 2]), {"mask": torch.tensor([False])}), True),
        (torch.tensor([-100, 1]), False),
        (torch.tensor([-100.0]), False),
        (torch.tensor([], dtype=torch.int64), False),
    ],
)
def test_a_nan_of_a_micro_batch_in_which_no_target_counts_is_said_to_be_one(target, padding):
    """A lower learning rate does not help where a mean over no targets is 0 / 0."""
    batch = batch_with([(1, NAN)], targets=[None, target])
    with pytest.raises(NonFinite, match="the loss of micro-batch 1 is nan") as caught:
        check_of().after_loss(stage_of(nn.Linear(1, 1)), batch, 1, "4F1")
    assert ("all its targets are -100 or False" in str(caught.value)) == padding
    assert ("loss_on='batch'" in str(caught.value)) == padding
    assert ("Lower the learning rate" in str(caught.value)) != padding


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
    text = r"l0\.weight is not finite, from one of its micro-batches"
    with pytest.raises(NonFinite, match=text):
        check.before_update(stage, "4U1")
    # Two finite rows of one index, whose sum is not.
    rows = torch.full((2, 2), 3e38)
    table.weight.grad = torch.sparse_coo_tensor([[1, 1]], rows, (4, 2), check_invariants=False)
    with pytest.raises(NonFinite, match=text):
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


def test_a_device_skips_for_a_gradient_that_no_probe_has_shown(caplog):
    """Its micro-batch is not known, and the update would spoil the weights all the same."""
    layer = nn.Linear(2, 1)
    stage, check = stage_of(layer), check_of("skip")
    stage.device = SimpleNamespace(type="device")
    layer.bias.grad = torch.zeros(1).as_subclass(OnDevice)
    layer.weight.grad = torch.tensor([[1.0, INF]]).as_subclass(OnDevice)
    check.after_backward(stage, batch_with(), 0)
    check.before_update(stage, "4U1")
    assert check.has_nonfinite
    (record,) = caplog.records
    assert "a gradient of stage 4 is not finite; the update is skipped" in record.getMessage()


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


def test_stages_of_a_rank_are_checked_apart():
    """A rank may hold several stages, whose updates come one after the other."""
    layers = [nn.Linear(2, 1, bias=False) for _ in range(2)]
    stages = [stage_of(layer, index=index) for index, layer in enumerate(layers)]
    check = check_of()
    for number in range(2):
        for stage, layer in zip(stages, layers, strict=True):
            layer.weight.grad = torch.full((1, 2), INF if number == stage.index else 1.0)
            check.after_backward(stage, batch_with(), number)
    for stage, layer in zip(stages, layers, strict=True):
        layer.weight.grad[:] = INF
        with pytest.raises(NonFinite, match=f"from micro-batch {stage.index} on") as caught:
            check.before_update(stage, f"{stage.index}U1")
        assert caught.value.stage == stage.index


def test_a_reset_forgets_the_micro_batch_of_a_gradient_that_is_dropped():
    """The next batch has micro-batches of the same numbers."""
    layer = nn.Linear(2, 1, bias=False)
    stage, check = stage_of(layer), check_of()
    layer.weight.grad = torch.full((1, 2), NAN)
    check.after_backward(stage, batch_with(), 0)
    check.reset()
    with pytest.raises(NonFinite, match="is not finite, from one of its micro-batches") as caught:
        check.before_update(stage, "4U1")
    assert caught.value.micro_batch is None


def test_a_parameter_without_a_gradient_hides_no_other_one():
    """A branch of the layer may not have run."""
    layer = nn.Linear(2, 1)
    layer.bias.grad = torch.full((1,), NAN)
    with pytest.raises(NonFinite, match=r"the gradient of l0\.bias is not finite"):
        check_with_step(stage_of(layer)).before_update(stage_of(layer), "4U1")


def check_with_step(stage):
    """Return a check of a stage in a batch of training, without a probed backward."""
    check = check_of()
    check.after_loss(stage, batch_with(), 0, "4F0")
    return check


def device_check(policy="warn"):
    """Return a stage on a device, with one weight, and its check."""
    stage = stage_of(nn.Linear(2, 1, bias=False))
    stage.device = SimpleNamespace(type="device")
    return stage, check_of(policy)


@pytest.mark.parametrize("ends_by", ["update", "reset"])
def test_a_device_reports_a_loss_and_a_probe_once(ends_by):
    """The next update begins without those of the last one, and so does one after a skipped step."""
    stage, check = device_check()
    batch = batch_with()
    batch.losses = {0: on_device(NAN)}
    check.after_loss(stage, batch, 0, "4F0")
    stage.update.parameters[0].grad = torch.ones(1, 2).as_subclass(OnDevice)
    check.after_backward(stage, batch, 0)
    if ends_by == "update":
        check.before_update(stage, "4U1")
        assert len(stage.runner.checks.added) == 3
        stage.runner.checks.added.clear()
    else:
        check.reset()
    check.before_update(stage, "4U1")
    ((failed, message, _),) = stage.runner.checks.added
    assert not failed
    assert message.startswith("rank 2 (stage 4): a gradient of stage 4")


@pytest.mark.parametrize(
    ("value", "failed"), [(3e38, False), (NAN, True), (INF, True), (-INF, True)]
)
@pytest.mark.parametrize("borrowed", [False, True])
def test_a_device_checks_the_largest_element_of_all_gradients(value, failed, borrowed):
    """Those of borrowed parameters too. Large finite gradients are no error."""
    stage, check = device_check()
    layer = nn.Linear(2, 2)
    layer.bias.grad = torch.tensor([value, 1.0]).as_subclass(OnDevice)
    layer.weight.grad = torch.full((2, 2), 3e38).as_subclass(OnDevice)
    parameters = list(layer.parameters())
    stage.update.parameters = [] if borrowed else parameters
    stage.update.borrowed = parameters if borrowed else []
    check.after_loss(stage, batch_with(), 0, "4F0")
    check.before_update(stage, "4U1")
    assert [entry[0] for entry in stage.runner.checks.added] == [failed]


def test_a_gradient_is_not_kept_alive_by_its_probe_after_the_update():
    """An optimizer sets it to None, which must free its memory."""
    layer = nn.Linear(2, 1, bias=False)
    stage, check = stage_of(layer), check_of()
    layer.weight.grad = torch.ones(1, 2)
    check.after_backward(stage, batch_with(), 0)
    check.before_update(stage, "4U1")
    gradient = weakref.ref(layer.weight.grad)
    layer.weight.grad = None
    assert gradient() is None
