"""Training with each option of `penstock.stage.training_options`, as on one device."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.conformance.models import CASES, made
from tests.conformance.reference import PlainTraining, differences, gradients
from tests.runtime.jobs import sgd
from tests.stage.option_pipelines import SCHEDULERS, batch, decaying, no_decay, pipeline
from torch import nn
from torch.optim import lr_scheduler

import penstock as ps
from penstock.errors import SettingError

CASE = CASES["mlp"]


def same(model, other):
    """Names whose tensors differ by more than rounding."""
    pairs = [
        (n, a, b)
        for (n, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True)
    ]
    return [name for name, a, b in pairs if not torch.allclose(a, b, rtol=1e-5, atol=1e-6)]


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


def grouped(model):
    """The groups of `no_decay`, by hand."""
    rows = {}
    for name, parameter in model.named_parameters():
        options = no_decay(name, parameter)
        rows.setdefault(repr(options), {"params": [], **options})["params"].append(parameter)
    return decaying(list(rows.values()))


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
