"""What a Pipeline takes beyond its schedule: mixed precision, clipping, groups, schedulers,
accumulation, compiled stages.
"""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tests.conformance.models import CASES, lengths_of, made
from tests.conformance.reference import PlainTraining, differences, gradients, layers_of
from tests.runtime.jobs import sgd
from torch import nn
from torch.optim import lr_scheduler

import penstock as ps
from penstock.errors import ScheduleError, SettingError
from penstock.stage.training_options import TrainingOptions, parse_options

CASE = CASES["mlp"]


def pipeline(model=None, stages=3, name="mlp", **options):
    """In this process."""
    model = made(CASES[name])[0] if model is None else model
    options.setdefault("optimizer", sgd)
    options.setdefault("micro_batches", 4)
    return ps.Pipeline(
        model,
        loss=CASES[name].loss,
        balance=lengths_of(len(layers_of(model)), stages),
        executor="threads",
        **options,
    )


def batch(number=0, samples=10, name="mlp"):
    """One of the case's batches."""
    with torch.random.fork_rng():
        torch.manual_seed(100 + number)
        return CASES[name].data(samples)


def same(model, other):
    """Names whose tensors differ by more than rounding."""
    pairs = [
        (n, a, b)
        for (n, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True)
    ]
    return [name for name, a, b in pairs if not torch.allclose(a, b, rtol=1e-5, atol=1e-6)]


# -- clipping
# --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("most", [0.05, 100.0])
def test_clipping_is_torchs_own_to_the_bit_whatever_the_cut(stages, most):
    """A norm per stage would clip each stage by another factor: another direction, which no error
    tells.
    """
    model, _, _ = made(CASE)
    plain = PlainTraining(copy.deepcopy(model), CASE.loss)
    optimizer = sgd(list(plain.model.parameters()))
    pipe = pipeline(model, stages, clip_grad_norm=most)
    for number in range(3):
        optimizer.zero_grad()
        plain.backward(*batch(number), 4)
        norm = torch.nn.utils.clip_grad_norm_(plain.model.parameters(), most)
        optimizer.step()
        pipe.train_batch(*batch(number))
        assert pipe.grad_norm == float(norm)
    assert differences(dict(model.state_dict()), dict(plain.model.state_dict())) == []


def test_a_frozen_stage_and_copies_count_not_at_all_and_once():
    """Copies of a stage have the same gradients: counted twice they would make the norm larger than
    it is.
    """
    model, x, y = made(CASE, 12)
    model[0].requires_grad_(False)
    plain = copy.deepcopy(model)
    CASE.loss(plain(x), y).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    both_ways = ps.Schedule.parse(
        "rank 0 | 0F0 1F1 1B1 0F2 1F3 1B3 0B0 0B2 0U1 1U1\nrank 1 | 0F1 1F0 1B0 0F3 1F2 1B2 0B1 0B3 0U1 1U1"
    )
    pipe = ps.Pipeline(
        model,
        loss=CASE.loss,
        balance=[3, 4],
        schedule=both_ways,
        optimizer=sgd,
        executor="threads",
        clip_grad_norm=0.01,
    )
    pipe.train_batch(x, y)
    assert pipe.grad_norm == pytest.approx(float(expected), rel=1e-5)
    for name, grad in gradients(plain).items():
        assert torch.allclose(dict(model.named_parameters())[name].grad, grad, atol=1e-7), name


def test_evaluation_and_the_self_check_leave_the_norm_alone():
    """It is of the last step."""
    pipe = pipeline(clip_grad_norm=1.0)
    assert pipe.grad_norm is None
    pipe.train_batch(*batch())
    norm = pipe.grad_norm
    pipe.eval_batch(*batch(1))
    pipe.compare_with_one_device(*batch(1))
    assert pipe.grad_norm == norm


# -- mixed precision
# -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stages", [1, 3])
def test_autocast_trains_as_it_does_on_one_device(dtype, stages):
    """Forward, loss and what crosses boundaries are in the low precision; weights and gradients in
    theirs.
    """
    model, _, _ = made(CASE)
    plain = PlainTraining(copy.deepcopy(model), CASE.loss)
    optimizer = sgd(list(plain.model.parameters()))
    pipe = pipeline(model, stages, autocast=dtype)
    for number in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            expected = plain.backward(*batch(number), 4)
        optimizer.step()
        assert torch.allclose(pipe.train_batch(*batch(number)), expected.float(), rtol=1e-6)
    assert same(model, plain.model) == []
    assert pipe.compare_with_one_device(*batch(5)).relative < 1e-6


class Overflow(nn.Module):
    """Passes on what it is given; its backward makes the batches in `at` overflow."""

    def __init__(self, at):
        super().__init__()
        self.at, self.calls = at, 0
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x):
        """Run the layer."""
        out = x * self.gain
        if out.requires_grad:
            bad = self.calls // 4 in self.at
            out.register_hook(lambda grad: grad * float("inf") if bad else grad)
        self.calls += 1
        return out


def overflowing(at):
    """A model whose gradients are not finite in some batches, in the middle stage and those before
    it.
    """
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), Overflow(at), nn.Linear(16, 5))


@pytest.mark.parametrize("lengths", [[4], [1, 1, 1, 1]])
def test_steps_are_skipped_and_scales_move_as_with_torchs_scaler(lengths):
    """The last stage's own gradients are finite: without a word from the others it would step
    alone.
    """
    options = {
        "init_scale": 1024.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2,
    }
    at = {1, 4, 5}
    model, plain = overflowing(at), overflowing(at)
    optimizer, scaler = sgd(list(plain.parameters())), torch.amp.GradScaler("cpu", **options)
    pipe = ps.Pipeline(
        model,
        loss=CASE.loss,
        balance=lengths,
        micro_batches=4,
        optimizer=sgd,
        scaler=options,
        executor="threads",
        clip_grad_norm=0.1,
    )
    scales = []
    for number in range(8):
        x, y = batch(number, 8)
        optimizer.zero_grad()
        for own_x, own_y in zip(x.split(2), y.split(2), strict=True):
            scaler.scale(CASE.loss(plain(own_x), own_y) / 4).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        before = copy.deepcopy(model.state_dict())
        pipe.train_batch(x, y)
        scales.append(pipe.loss_scale)
        assert pipe.loss_scale == scaler.get_scale()
        assert pipe.grad_norm == pytest.approx(float(norm), rel=1e-5, nan_ok=True)
        assert (differences(model.state_dict(), before) == []) == (number in at)
    assert pipe.skipped == 3
    assert len(set(scales)) > 2
    assert same(model, plain) == []


def test_float16_with_a_scaler_trains_as_on_one_device(tmp_path):
    """Scale, skipped steps and growth go on from a checkpoint."""
    options = {"init_scale": 2.0**16, "growth_interval": 3}
    model, _, _ = made(CASE)
    plain = copy.deepcopy(model)
    optimizer, scaler = sgd(list(plain.parameters())), torch.amp.GradScaler("cpu", **options)
    pipe = pipeline(model, autocast=torch.float16, scaler=scaler)
    for number in range(5):
        x, y = batch(number, 8)
        optimizer.zero_grad()
        for own_x, own_y in zip(x.split(2), y.split(2), strict=True):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = CASE.loss(plain(own_x), own_y) / 4
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        pipe.train_batch(x, y)
        assert pipe.loss_scale == scaler.get_scale()
    assert same(model, plain) == []
    pipe.save(tmp_path)
    other = pipeline(stages=2, autocast=torch.float16, scaler=options)
    other.load(tmp_path)
    assert (other.loss_scale, other.skipped) == (pipe.loss_scale, pipe.skipped)
    assert torch.allclose(other.train_batch(*batch(7)), pipe.train_batch(*batch(7)), rtol=1e-4)
    assert other.loss_scale == pipe.loss_scale


# -- groups and schedulers
# -------------------------------------------------------------------------------------------------


def no_decay(name, parameter):
    """Biases do not decay, and the first layer learns slowly."""
    if name.startswith("fc1"):
        return {"lr": 0.01}
    return {"weight_decay": 0.0} if parameter.dim() == 1 else {}


def decaying(params):
    """With a decay that groups can change."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.2)


def grouped(model):
    """The groups of `no_decay`, by hand."""
    rows = {}
    for name, parameter in model.named_parameters():
        options = no_decay(name, parameter)
        rows.setdefault(repr(options), {"params": [], **options})["params"].append(parameter)
    return decaying(list(rows.values()))


SCHEDULERS = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.3),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 6),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, [0.1, 0.2, 0.3], total_steps=8
    ),
    "by group": lambda optimizer: lr_scheduler.LambdaLR(
        optimizer, [lambda n, k=k: 1 / (1 + n * k) for k in range(3)]
    ),
    "warm up, then decay": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
            lr_scheduler.ExponentialLR(optimizer, 0.7),
        ],
        [2],
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_over_parameter_groups_move_all_stages_as_one_optimizer(name, tmp_path):
    """Every stage's optimizer has all groups, so a scheduler by group means the same on each; a
    checkpoint goes on under another cut.
    """
    model, _, _ = made(CASE)
    plain = PlainTraining(copy.deepcopy(model), CASE.loss)
    optimizer = grouped(plain.model)
    theirs = SCHEDULERS[name](optimizer)
    pipe = pipeline(model, 3, optimizer=decaying, parameter_groups=no_decay)
    ours = pipe.scheduler(SCHEDULERS[name])
    for number in range(6):
        optimizer.zero_grad()
        loss = plain.backward(*batch(number), 4)
        optimizer.step()
        assert torch.allclose(pipe.train_batch(*batch(number)), loss)
        word = (float(loss),) if name == "plateau" else ()
        theirs.step(*word)
        ours.step(*word)
        assert ours.get_last_lr() == pytest.approx(theirs.get_last_lr())
        if number == 3:
            pipe.save(tmp_path)
            pipe = pipeline(stages=2, optimizer=decaying, parameter_groups=no_decay)
            pipe.load(tmp_path)
            ours = pipe.scheduler(SCHEDULERS[name])
            assert ours.get_last_lr() == pytest.approx(theirs.get_last_lr())
    assert (
        same(
            nn.Sequential(
                *(layer.module for stage in pipe._assembly.stages for layer in stage.layers)
            ),
            plain.model,
        )
        == []
    )


def test_a_rank_with_nothing_to_train_knows_the_learning_rate_too():
    """It is asked there for the progress line, as on the others."""
    model, x, y = made(CASE)
    model.requires_grad_(False)
    pipe = pipeline(model)
    scheduler = pipe.scheduler(lambda optimizer: lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
    pipe.train_batch(x, y)
    scheduler.step()
    assert scheduler.get_last_lr() == [0.025]


# -- accumulation
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [{}, {"clip_grad_norm": 0.1}, {"scaler": {"init_scale": 8.0}}])
def test_accumulating_over_batches_is_one_device_with_the_loss_divided(extra):
    """Every third batch steps with the mean of three batches' gradients; what is left over steps
    when it is told to.
    """
    model, _, _ = made(CASE)
    plain = PlainTraining(copy.deepcopy(model), lambda out, y: CASE.loss(out, y) / 3)
    optimizer = sgd(list(plain.model.parameters()))
    pipe = pipeline(model, accumulate=3, **extra)
    for number in range(7):
        plain.backward(*batch(number), 4)
        if number in (2, 5, 6):
            if "clip_grad_norm" in extra:
                torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        loss = pipe.train_batch(*batch(number))
        if not number:
            assert torch.allclose(loss, CASE.loss(made(CASE)[0](batch(0)[0]), batch(0)[1]))
    assert same(model, plain.model) != []
    pipe.update()
    pipe.update()
    assert same(model, plain.model) == []


def test_update_can_be_asked_for_or_left_out_batch_by_batch():
    """`update=False` adds up and `update=True` steps: the sum that two backward calls give on one
    device.
    """
    model, _, _ = made(CASE)
    plain = PlainTraining(copy.deepcopy(model), CASE.loss)
    optimizer = sgd(list(plain.model.parameters()))
    pipe = pipeline(model)
    for number, update in enumerate([False, False, True, None, False]):
        plain.backward(*batch(number), 4)
        pipe.train_batch(*batch(number), update=update)
        if update is not False:
            optimizer.step()
            assert differences(gradients(model), gradients(plain.model)) == []
            optimizer.zero_grad()
        assert differences(dict(model.state_dict()), dict(plain.model.state_dict())) == []
    assert differences(gradients(model), gradients(plain.model)) == []
    with pytest.raises(
        SettingError,
        match="accumulate cannot change while the gradients of 1 batches wait for their step",
    ):
        pipe.accumulate = 2
    pipe.zero_grad()
    pipe.accumulate = 2
    pipe.train_batch(*batch(0))
    assert pipe.accumulate == 2
    assert differences(dict(model.state_dict()), dict(plain.model.state_dict())) == []


def test_an_optimizer_of_the_users_own_over_the_pipelines_parameters():
    """Without one in the pipeline gradients are the user's, and so is the step."""
    model, _, _ = made(CASE)
    plain = PlainTraining(copy.deepcopy(model), CASE.loss)
    pipe = pipeline(model, optimizer=None)
    assert [name for name, _ in pipe.named_parameters()] == [
        name for name, _ in model.named_parameters()
    ]
    ours, theirs = sgd(list(pipe.parameters())), sgd(list(plain.model.parameters()))
    for number in range(3):
        plain.backward(*batch(number), 4)
        pipe.train_batch(*batch(number))
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
    assert differences(dict(model.state_dict()), dict(plain.model.state_dict())) == []
    with pytest.raises(
        SettingError, match="there is nothing to step: this pipeline has no optimizer"
    ):
        pipe.update()


# -- how stages compute
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "vgg"])
def test_compiled_stages_train_alike(name):
    """torch.compile per stage, with any of its backends."""
    case = CASES[name]
    model, x, y = made(case)
    other = copy.deepcopy(model)
    pipe = pipeline(model, 2, name, compile={"backend": "aot_eager"})
    plain = pipeline(other, 2, name)
    for _ in range(2):
        assert torch.allclose(pipe.train_batch(x, y), plain.train_batch(x, y), rtol=1e-5)
    assert same(model, other) == []
    assert list(pipe.state_dict()) == list(other.state_dict())


def test_compiling_without_a_compiler_is_refused_before_anything_runs(monkeypatch):
    """torch says so in the middle of the first batch, in a hundred lines."""
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(
        SettingError,
        match=r"there is no compiler 'g\+\+' here\. Install one, or name it in CXX; compile=\{'backend'",
    ):
        pipeline(compile=True)
    pipeline(compile={"backend": "eager"})


def test_channels_last_changes_the_layout_and_not_the_numbers():
    """Of weights; what convolutions return follows them."""
    case = CASES["vgg"]
    model, x, y = made(case)
    other = copy.deepcopy(model)
    pipe, plain = (
        pipeline(model, 3, "vgg", memory_format=torch.channels_last),
        pipeline(other, 3, "vgg"),
    )
    assert torch.allclose(pipe.train_batch(x, y), plain.train_batch(x, y), rtol=1e-5)
    assert model[0][0].weight.is_contiguous(memory_format=torch.channels_last)
    assert pipe.compare_with_one_device(x, y).relative < 1e-4


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_deferred_batch_norm_has_the_whole_batchs_running_statistics(recompute):
    """Also after a small batch, which has fewer micro-batches."""
    case = CASES["resnet"]
    model, _, _ = made(case)
    whole = copy.deepcopy(model)
    pipe = pipeline(
        model, 3, "resnet", deferred_batch_norm=True, recompute=recompute, optimizer=None
    )
    for samples in (12, 2, 12):
        x, y = batch(1, samples, "resnet")
        assert pipe.compare_with_one_device(x, y).relative < 1e-4
        pipe.train_batch(x, y)
        whole(x)
    first = {name: value for name, value in pipe.state_dict().items() if name.startswith("1.")}
    expected = {name: value for name, value in whole.state_dict().items() if name.startswith("1.")}
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert torch.allclose(first[name], expected[name], rtol=1e-4), name


def test_layers_that_run_again_are_named_or_numbered():
    """Less memory where it lies, and the same numbers, dropout and batch norm too."""
    case = CASES["vgg"]
    model, x, y = made(case)
    names = [layer.name for layer in ps.chain(model)]
    pipe = pipeline(model, 3, "vgg", recompute=[names[0], 3, 4, names[11], 12], optimizer=None)
    assert pipe.setting.recomputed == frozenset({0, 3, 4, 11, 12})
    plain = PlainTraining(copy.deepcopy(model), case.loss)
    assert torch.equal(pipe.train_batch(x, y), plain.backward(x, y, 4))
    assert differences(gradients(model), gradients(plain.model)) == []
    assert pipe.compare_with_one_device(x, y).relative < 1e-6


# -- what is refused
# -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"clip_grad_norm": 0.0},
            "clip_grad_norm is the maximum norm of the gradients, above 0, not 0.0",
        ),
        (
            {"autocast": torch.float64},
            "autocast is torch.bfloat16 or torch.float16, not torch.float64",
        ),
        ({"accumulate": 0}, "accumulate is a number of batches for each step, 1 or more, not 0"),
        (
            {"scaler": 1024},
            "scaler is True, options such as .* or a torch.amp.GradScaler, not 1024",
        ),
        ({"scaler": {"scale": 2}}, "scaler has no option 'scale'; it has init_scale"),
        (
            {"scaler": {"backoff_factor": 2}},
            "backoff_factor between 0 and 1; these are 65536, 2, 2",
        ),
        ({"parameter_groups": lambda name, p: 0.1}, r"for fc1\.weight it returned float"),
        (
            {"parameter_groups": lambda name, p: {"params": []}},
            r"for fc1\.weight it returned one with 'params'",
        ),
        ({"memory_format": torch.preserve_format}, "memory_format is torch.channels_last"),
        (
            {"clip_grad_norm": 1.0, "optimizer": None},
            "clip_grad_norm is an option of the update, and this pipeline has no optimizer",
        ),
        (
            {"scaler": True, "schedule": "pipedream", "micro_batches": 1},
            "scaler: pipedream is asynchronous, its stages update at different",
        ),
        (
            {"accumulate": 2, "schedule": "pipedream", "micro_batches": 1},
            "accumulate=2: pipedream is asynchronous and updates after every",
        ),
        (
            {"deferred_batch_norm": True, "schedule": "pipedream", "micro_batches": 1},
            "deferred_batch_norm: pipedream is asynchronous",
        ),
        (
            {"recompute": ["fc9"]},
            "recompute names layer 'fc9', which the model does not have: it has 7 layers",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_what_makes_no_sense_is_refused_in_words(options, message):
    """At the door, before anything runs."""
    with pytest.raises(SettingError, match=message):
        pipeline(**options)


def test_scheduling_without_an_optimizer_or_without_a_scheduler_is_refused():
    """Before training starts with a learning rate that nobody moves."""
    with pytest.raises(
        SettingError, match="there is no learning rate to set: this pipeline has no optimizer"
    ):
        pipeline(optimizer=None).scheduler(SCHEDULERS["step"])
    with pytest.raises(
        SettingError,
        match=r"scheduler\(\) takes a function from an optimizer to one of torch.optim.lr_scheduler",
    ):
        pipeline().scheduler(lambda optimizer: 0.1)


def test_an_asynchronous_schedule_takes_autocast_groups_and_schedulers():
    """What belongs to a stage alone needs no moment at which all have their gradients."""
    pipe = pipeline(
        schedule="pipedream",
        micro_batches=1,
        autocast=torch.bfloat16,
        optimizer=decaying,
        parameter_groups=no_decay,
    )
    scheduler = pipe.scheduler(SCHEDULERS["step"])
    losses = []
    for loss in pipe.train(batch(number) for number in range(6)):
        losses.append(loss)
        scheduler.step()
    assert len(losses) == 6
    assert all(loss.isfinite() for loss in losses)
    assert scheduler.get_last_lr()[0] < 0.1 * 0.3


MSE = nn.functional.mse_loss


def refusal(*, schedule="1f1b", loss=MSE, steps=True, **options):
    """Return the message with which options are refused; None if they are not."""
    made_schedule = ps.schedule(schedule, 2, 1 if schedule == "pipedream" else 4)
    try:
        TrainingOptions(**options).check(made_schedule, loss, steps=steps)
    except (SettingError, ScheduleError) as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"offload": True},
        {"offload": 0.0},
        {"offload": 1.0},
        {"clip_grad_norm": float("inf"), "clip_norm_type": 1.0},
        {"clip_grad_norm": 1e-9, "clip_norm_type": float("inf")},
        {"clip_grad_value": 0.5},
        {"autocast": "float16", "on_nonfinite": "warn"},
        {"accumulate": 1, "schedule": "pipedream"},
        {"accumulate": 7},
        {"zero": 1},
        {"zero": 0, "gradient_hook": "bf16"},
        {"boundary": "int8"},
        {"memory_format": torch.contiguous_format},
        {"memory_format": torch.channels_last_3d},
        {"loss_on": "batch", "schedule": "gpipe"},
        {"loss_weight": len},
        {"on_nonfinite": "raise", "schedule": "pipedream"},
        {"steps": False, "offload": 0.5, "autocast": "bfloat16"},
        {"loss": partial(MSE, reduction="sum")},
        {"loss": nn.CrossEntropyLoss()},
    ],
    ids="-".join,
)
def test_options_that_make_sense_are_taken(options):
    """Also the extreme ones of a range."""
    assert refusal(**options) is None


@pytest.mark.parametrize(
    ("options", "start"),
    [
        ({"offload": -0.1}, "offload is True, False, or the share"),
        ({"offload": 1.01}, "offload is True, False, or the share"),
        ({"clip_grad_norm": 0.0}, "clip_grad_norm is the maximum norm of the gradients, above 0"),
        ({"clip_grad_norm": float("nan")}, "clip_grad_norm is the maximum norm"),
        ({"clip_grad_value": -1.0}, "clip_grad_value is the largest absolute value"),
        ({"clip_grad_value": 0.0}, "clip_grad_value is the largest absolute value"),
        (
            {"clip_grad_value": 1.0, "clip_grad_norm": 2.0},
            "clip_grad_norm=2.0 and clip_grad_value=1.0: give one of them",
        ),
        ({"clip_norm_type": 1.0}, "clip_norm_type=1.0 is an option of clip_grad_norm="),
        (
            {"clip_norm_type": float("nan"), "clip_grad_norm": 1.0},
            "clip_norm_type is the order of the norm",
        ),
        ({"clip_norm_type": "2", "clip_grad_norm": 1.0}, "clip_norm_type is the order of"),
        ({"autocast": "float64"}, "autocast is torch.bfloat16 or torch.float16, not 'float64'"),
        ({"on_nonfinite": "stop"}, "on_nonfinite is 'raise', 'skip' or 'warn', not 'stop'"),
        ({"accumulate": 0}, "accumulate is a number of batches"),
        ({"accumulate": True}, "accumulate is a number of batches"),
        ({"accumulate": 2.0}, "accumulate is a number of batches"),
        ({"accumulate": 2, "schedule": "pipedream"}, "accumulate=2: pipedream is asynchronous"),
        ({"boundary": "int4"}, "boundary='int4' is unknown"),
        ({"gradient_hook": "int8"}, "gradient_hook is 'none', 'fp16'"),
        ({"zero": 1, "gradient_hook": "fp16"}, "zero=1 and gradient_hook='fp16'"),
        ({"zero": 4}, "zero is 0 or 1, not 4"),
        ({"memory_format": torch.preserve_format}, "memory_format is torch.channels_last"),
        (
            {"on_nonfinite": "skip", "clip_grad_norm": 1.0, "schedule": "pipedream"},
            "clip_grad_norm and on_nonfinite: pipedream is asynchronous",
        ),
        ({"zero": 1, "schedule": "pipedream"}, "zero: pipedream is asynchronous"),
        ({"deferred_batch_norm": True, "schedule": "pipedream"}, "deferred_batch_norm: pipedream"),
        (
            {"steps": False, "parameter_groups": len},
            "parameter_groups is an option of the update, and this pipeline has no optimizer",
        ),
        ({"steps": False, "accumulate": 2}, "accumulate is an option of the update"),
        ({"loss": 3}, "loss must be a function of output and target, not 3"),
        ({"loss": partial(MSE, reduction="none")}, "the loss has reduction='none'"),
        ({"loss": partial(partial(MSE, reduction="none"))}, "the loss has reduction='none'"),
        ({"loss": nn.MSELoss(reduction="none")}, "the loss has reduction='none'"),
        ({"loss": partial(nn.MSELoss(reduction="none"))}, "the loss has reduction='none'"),
        ({"loss_weight": 3}, "loss_weight must be a function from the targets"),
        ({"loss_on": "sample"}, "loss_on must be 'micro_batch' or 'batch', not 'sample'"),
        (
            {"loss_on": "batch", "loss_weight": len, "schedule": "gpipe"},
            "loss_on='batch' computes the loss once, so that loss_weight has no effect",
        ),
        ({"loss_on": "batch"}, "loss_on='batch' needs all outputs of a batch before the first"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_each_invalid_option_is_refused_with_its_name_and_its_values(options, start):
    """Alone, or with the other option, the schedule or the loss that it does not go with."""
    message = refusal(**options)
    assert message is not None
    assert message.startswith(start)


def test_an_option_that_is_given_wins_over_the_plan():
    """zero=0 too; without a plan the level is 0."""
    plan = SimpleNamespace(zero=1)
    assert TrainingOptions().zero_level == 0
    assert TrainingOptions().with_plan(None).zero_level == 0
    assert TrainingOptions().with_plan(plan).zero_level == 1
    assert TrainingOptions(zero=0).with_plan(plan).zero_level == 0
    assert TrainingOptions(zero=1).with_plan(SimpleNamespace(zero=0)).zero_level == 1
    assert TrainingOptions(accumulate=3).with_plan(plan).accumulate == 3


@pytest.mark.parametrize(
    ("given", "expected"),
    [(False, None), (True, {}), ({"mode": "max"}, {"mode": "max"}), ({}, {})],
)
def test_options_of_the_compiler_are_those_that_are_given(given, expected):
    """True has none; and dtypes of autocast are kept as names, as files have them."""
    assert TrainingOptions(compile=given).compiled == expected
    for value in (torch.bfloat16, "bfloat16"):
        options = parse_options({"autocast": value, "compile": given})
        assert (options.autocast, options.autocast_dtype) == ("bfloat16", torch.bfloat16)
    assert parse_options({}).autocast_dtype is None
    with pytest.raises(
        TypeError, match=r"unexpected keyword argument 'clip'; its options of train"
    ):
        parse_options({"zero": 1, "clip": 2})
