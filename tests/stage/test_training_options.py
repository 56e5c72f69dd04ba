"""Options of training: which are refused, alone or with a schedule, and what they mean."""

from __future__ import annotations

import dataclasses
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tests.stage.option_pipelines import SCHEDULERS, batch, decaying, no_decay, pipeline
from torch import nn

import penstock as ps
from penstock.errors import ScheduleError, SettingError
from penstock.losses.stage_loss import LossOptions
from penstock.modules.deferred_batch_norm import DeferredBatchNorm
from penstock.stage.training_options import TrainingOptions, parse_options
from penstock.tracing.traced_chain import chain


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


@pytest.mark.parametrize("deferred", [False, True])
def test_batch_norms_are_deferred_on_request_and_in_layers_alone(deferred):
    """A traced model calls no modules, so its batch norms cannot be."""
    options = TrainingOptions(deferred_batch_norm=deferred)
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    converted = options.converted(chain(layers), 3)
    norm = converted.modules[1]
    assert type(norm) is (DeferredBatchNorm if deferred else nn.BatchNorm1d)
    assert getattr(norm, "micro_batches", None) == (3 if deferred else None)
    traced = dataclasses.replace(chain(layers), variants=object(), roots=(layers,))
    if not deferred:
        assert options.converted(traced, 3) is traced
        return
    with pytest.raises(SettingError, match=r"Sequential is traced: .* statistics of 1 at every"):
        options.converted(traced, 3)


MSE = nn.functional.mse_loss


def named(loss):
    """Give a loss an attribute, so that `partial` does not join it with another one."""
    loss.name = "a loss"
    return loss


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
        ({"clip_grad_value": float("nan")}, "clip_grad_value is the largest absolute value"),
        (
            {"clip_grad_value": 1.0, "clip_grad_norm": 2.0},
            "clip_grad_norm=2.0 and clip_grad_value=1.0: give one of them",
        ),
        ({"clip_norm_type": 1.0}, "clip_norm_type=1.0 is an option of clip_grad_norm="),
        (
            {"clip_norm_type": 1.0, "clip_grad_value": 1.0},
            "clip_norm_type=1.0 is an option of clip_grad_norm=",
        ),
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
        ({"clip_grad_value": 1.0, "schedule": "pipedream"}, "clip_grad_value: pipedream is"),
        ({"scaler": True, "schedule": "pipedream"}, "scaler: pipedream is asynchronous"),
        ({"gradient_hook": "bf16", "schedule": "pipedream"}, "gradient_hook: pipedream is"),
        ({"parallelize": len, "schedule": "pipedream"}, "parallelize: pipedream is asynchronous"),
        ({"deferred_batch_norm": True, "schedule": "pipedream"}, "deferred_batch_norm: pipedream"),
        (
            {"steps": False, "parameter_groups": len},
            "parameter_groups is an option of the update, and this pipeline has no optimizer",
        ),
        ({"steps": False, "accumulate": 2}, "accumulate is an option of the update"),
        (
            {"steps": False, "clip_grad_norm": 1.0, "parameter_groups": len},
            "clip_grad_norm is an option of the update",
        ),
        ({"loss": 3}, "loss must be a function of output and target, not 3"),
        ({"loss": partial(MSE, reduction="none")}, "the loss has reduction='none'"),
        ({"loss": partial(partial(MSE, reduction="none"))}, "the loss has reduction='none'"),
        ({"loss": partial(named(partial(MSE, reduction="none")))}, "the loss has reduction='none'"),
        ({"loss": nn.MSELoss(reduction="none")}, "the loss has reduction='none'"),
        ({"loss": partial(nn.MSELoss(reduction="none"))}, "the loss has reduction='none'"),
        ({"loss_weight": 3}, "loss_weight must be a function from the targets"),
        ({"loss_weight": 0}, "loss_weight must be a function from the targets"),
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


def test_arguments_are_parsed_without_a_change_to_them():
    """A caller may construct several pipelines from one dictionary."""
    arguments = {"autocast": torch.float16, "zero": 1}
    options = parse_options(arguments)
    assert (options.autocast, options.autocast_dtype) == ("float16", torch.float16)
    assert arguments == {"autocast": torch.float16, "zero": 1}


def test_the_loss_is_divided_by_the_weight_and_the_place_that_are_given():
    """Both reach the last stage; by default a loss is computed on each micro-batch."""
    assert TrainingOptions().loss_options == LossOptions(None, "micro_batch")
    assert TrainingOptions(loss_weight=len).loss_options == LossOptions(len, "micro_batch")
    assert TrainingOptions(loss_on="batch").loss_options == LossOptions(None, "batch")


@pytest.mark.parametrize(
    ("compilation", "device", "installed", "is_refused"),
    [
        (True, "cpu", [], True),
        ({}, "cpu", [], True),
        ({"backend": "inductor"}, "cpu", [], True),
        ({"mode": "max-autotune"}, "cpu", ["g++"], True),
        (True, "cpu", ["c++17"], False),
        (True, "cpu", ["clang++"], False),
        (True, "meta", [], False),
        ({"backend": "aot_eager"}, "cpu", [], False),
        (False, "cpu", [], False),
    ],
)
def test_a_missing_compiler_is_reported_before_the_first_batch(
    compilation, device, installed, is_refused, monkeypatch
):
    """On a CPU alone, and only for the backend that generates C++; CXX names the compiler."""
    monkeypatch.setenv("CXX", "c++17")
    monkeypatch.setattr(shutil, "which", lambda name: name if name in installed else None)
    options = TrainingOptions(compile=compilation)
    if not is_refused:
        options.check_compiler(torch.device(device))
        return
    with pytest.raises(SettingError, match=r"there is no compiler 'c\+\+17' here"):
        options.check_compiler(torch.device(device))


@pytest.mark.parametrize("installed", ["g++", "clang++", "c++"])
def test_the_compiler_is_g_plus_plus_unless_it_is_named(installed, monkeypatch):
    """As for torch."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: name if name == installed else None)
    options = TrainingOptions(compile=True)
    if installed != "c++":
        options.check_compiler(torch.device("cpu"))
        return
    with pytest.raises(SettingError, match=r"there is no compiler 'g\+\+' here"):
        options.check_compiler(torch.device("cpu"))
