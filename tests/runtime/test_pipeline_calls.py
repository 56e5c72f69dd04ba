"""Which parts of a pipeline its methods call, and in which order."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from tests.runtime.failing import Trap
from tests.runtime.test_pipeline_training import data, plain_layers, threads
from torch import nn

import penstock as ps
from penstock.errors import RunError, SettingError, StageFailed
from penstock.schedule.op import Kind


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_every_call_of_all_ranks_is_announced_under_its_name(schedule, tmp_path):
    """Ranks in processes compare these names, so that a call that one of them leaves out is an
    error and not a rank that waits.
    """
    pipe = threads(plain_layers(), [2, 1], schedule=schedule, micro_batches=1)
    x, y = data(0)
    pipe.train_batch(x, y)
    log = []
    calls = pipe._world.calls
    calls.enter = log.append
    calls.begin = lambda batch, x, y, call: log.append(call) or batch
    calls.check_loader = lambda loader: log.append(("loader", loader))
    streams = schedule == "pipedream"
    average, batches, state = pipe.ema(), [(x, y), (x, y)], plain_layers().state_dict()
    average.update()
    average_state = average.state_dict()
    for expected, call in (
        (["train_batch", *["flush"] * streams], lambda: pipe.train_batch(x, y)),
        (["update"], pipe.update),
        (["zero_grad"], pipe.zero_grad),
        (["flush"], pipe.flush),
        (["eval_batch"], lambda: pipe.eval_batch(x, y)),
        (["forward"], lambda: pipe.forward(x)),
        (["compare_with_one_device"], lambda: pipe.compare_with_one_device(x, y)),
        (["state_dict"], pipe.state_dict),
        (["model_state"], pipe.model_state),
        (["load_into"], lambda: pipe.load_into(plain_layers())),
        (["load_state_dict"], lambda: pipe.load_state_dict(state)),
        (["save"], lambda: pipe.save(tmp_path / schedule)),
        (["load"], lambda: pipe.load(tmp_path / schedule)),
        (["timeline"], pipe.timeline),
        (["scheduler"], lambda: pipe.scheduler(lambda o: torch.optim.lr_scheduler.StepLR(o, 1))),
        (["ema"], pipe.ema),
        (["ema.update"], average.update),
        (["ema.applied", "state_dict"], average.state_dict),
        (["ema.applied", "model_state"], average.model_state),
        (["ema.load_state_dict"], lambda: average.load_state_dict(average_state)),
        (
            [("loader", batches), "train_batch", "train_batch", "the end of train()", "flush"],
            lambda: list(pipe.train(batches)),
        ),
    ):
        log.clear()
        call()
        assert log == expected
    if not streams:
        log.clear()
        pipe.train_batch(x, y, update=False)
        assert log == ["train_batch without an update"]


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_calls_that_change_weights_mark_the_users_model_as_stale(schedule, tmp_path):
    """Before they change any, since a failure may come in between."""
    pipe = threads(plain_layers(), [2, 1], schedule=schedule, micro_batches=1)
    marks = []
    pipe._guard = SimpleNamespace(mark=lambda: marks.append(pipe.step), stale=True)
    x, y = data(0)
    pipe.train_batch(x, y)
    pipe.save(tmp_path)
    for changes, call in (
        (True, lambda: pipe.train_batch(x, y)),
        (True, lambda: list(pipe.train([(x, y)]))),
        (True, lambda: pipe.load_state_dict(pipe.state_dict())),
        (True, lambda: pipe.load(tmp_path)),
        (True, lambda: pipe.load(tmp_path / "nowhere")),
        (False, lambda: pipe.eval_batch(x, y)),
        (False, lambda: pipe.forward(x)),
        (False, pipe.state_dict),
        (False, pipe.zero_grad),
    ):
        marks.clear()
        step = pipe.step
        with suppress(ps.PenstockError):
            call()
        assert marks == [step] * changes


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_batch_that_fails_changes_the_model_and_is_no_step(schedule):
    """Some stages may have updated by then, so that the user's model is stale."""
    pipe = threads(plain_layers(), [2, 1], schedule=schedule, micro_batches=1)
    marks = []
    pipe._guard = SimpleNamespace(mark=lambda: marks.append(pipe.step), stale=True)

    def fail(job):
        raise RunError("a rank is lost")

    pipe._world.run = fail
    for call in (lambda: pipe.train_batch(*data(0)), lambda: list(pipe.train([data(0)]))):
        with suppress(RunError):
            call()
    assert (marks, pipe.step) == ([0, 0], 0)


def test_an_update_that_fails_leaves_nothing_to_update():
    """The gradients have been dropped: a further update would step with none."""
    pipe = threads(plain_layers(), [2, 1], accumulate=2)
    pipe.train_batch(*data(0))
    calls = []

    def fail():
        calls.append("step")
        raise RunError("a rank is lost")

    pipe._player.step = fail
    with pytest.raises(RunError, match="lost"):
        pipe.update()
    pipe.update()
    assert calls == ["step"]


def test_times_of_ranks_are_counted_after_every_batch_that_has_trained():
    """Once, with the interpreters of this process; an evaluation is no step."""
    pipe = threads(plain_layers(), [2, 1])
    counted = []
    pipe._busy_times = SimpleNamespace(step=counted.append)
    pipe.train_batch(*data(0))
    pipe.eval_batch(*data(0))
    assert counted == [pipe._assembly.interpreters]


def test_a_failure_in_an_evaluation_names_the_step_of_the_training():
    """So that it can be placed in the log of the run."""
    pipe = threads(nn.Sequential(*plain_layers(), Trap(at=2 * 2)), [2, 2])
    for number in range(2):
        pipe.train_batch(*data(number))
    with pytest.raises(StageFailed, match="a planted failure") as failure:
        pipe.forward(data(0)[0])
    assert failure.value.step == 2


@pytest.mark.parametrize("stage", [0, 1])
def test_closing_ends_everything_and_reports_what_no_batch_has_read(stage):
    """A check on a device is deferred to the next batch, and there is none."""
    pipe = threads(plain_layers(), [2, 1])
    log = []
    pipe._busy_times = SimpleNamespace(close=lambda: log.append("times"))
    pipe._world.close = lambda: log.append("world")

    def fail():
        raise RunError("the gradients were not finite")

    pipe._guard = SimpleNamespace(stale=False, release=lambda: log.append("guard"))
    pipe._assembly.stages[stage].read_checks = fail
    with pytest.raises(RunError, match="not finite"):
        pipe.close()
    assert log == ["guard", "times", "world"]
    pipe._guard.stale = True
    log.clear()
    with pytest.raises(RunError, match="not finite"):
        pipe.close()
    assert log == ["times", "world"], "a model that is stale stays guarded"


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_graphs_are_prepared_before_every_batch_and_checks_are_read_before_other_calls(
    schedule, tmp_path
):
    """In the middle of a batch other ranks would wait; a deferred failure is not passed over."""
    pipe = threads(plain_layers(), [2, 1], schedule=schedule, micro_batches=1)
    x, y = data(0)
    pipe.train_batch(x, y)
    log = []
    preparation, player, stream = pipe._preparation, pipe._player, pipe._stream
    for owner, name in (
        (pipe._trainability, "checked"),
        (preparation, "prepare"),
        (player, "play"),
        (player, "read_checks"),
        (stream, "feed"),
        (stream, "flush"),
        (pipe._world, "barrier"),
    ):
        if owner is not None:
            method = getattr(owner, name)

            def recorded(*args, name=name, method=method, **options):
                log.append(name)
                return method(*args, **options)

            setattr(owner, name, recorded)
    drain = ["flush", "read_checks"] if stream else ["read_checks"]
    prepare = ["checked", "prepare"]
    train = [*prepare, "feed", "flush", "barrier"] if stream else [*prepare, "play"]
    loop = [*prepare, "feed", *drain, "barrier"] if stream else [*train, *drain, "barrier"]
    evaluation = [*drain, *prepare, "play"]
    for expected, call in (
        (train, lambda: pipe.train_batch(x, y)),
        (loop, lambda: list(pipe.train([(x, y)]))),
        (evaluation, lambda: pipe.eval_batch(x, y)),
        ([*drain, "prepare", "play"], lambda: pipe.forward(x)),
        (evaluation, lambda: pipe.compare_with_one_device(x, y)),
        ([*drain, "barrier"], pipe.flush),
        (["flush"] if stream else [], pipe.zero_grad),
        (drain, pipe.state_dict),
        (drain, pipe.model_state),
        (drain, lambda: pipe.save(tmp_path)),
    ):
        log.clear()
        call()
        assert log == expected


def test_checksums_of_a_stream_are_those_of_the_batch_as_it_was_given():
    """The next batch is read before this one is done, and may reuse its memory."""
    for schedule in ("1f1b", "pipedream"):
        pipe = threads(plain_layers(), [2, 1], schedule=schedule, micro_batches=1)

        def begin(batch, x, y, call):
            batch.pending_check = lambda: 5
            return batch

        pipe._world.calls.begin = begin
        batch = pipe._batch(*data(0), training=True, call="train_batch")
        streams = schedule == "pipedream"
        assert (batch.pending_check is None, batch.check) == (streams, 5 * streams)


def test_a_timeline_is_that_of_the_stream_once_it_goes_on_after_an_evaluation():
    """Of what has run last."""
    pipe = threads(plain_layers(), [2, 1], schedule="pipedream", micro_batches=1)

    def kinds():
        return {event.op.kind for event in pipe.timeline().compute}

    pipe.train_batch(*data(0))
    assert kinds() == {Kind.F, Kind.B, Kind.U}
    pipe.eval_batch(*data(0))
    assert kinds() == {Kind.F}
    list(pipe.train([data(0)]))
    assert kinds() == {Kind.F, Kind.B, Kind.U}


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_training_without_a_scheduler_that_was_saved_is_refused(schedule, tmp_path):
    """By every method that trains; evaluation is allowed."""

    def constant(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1)

    pipe = threads(plain_layers(), [2, 1], schedule=schedule, micro_batches=1)
    pipe.scheduler(constant)
    pipe.train_batch(*data(0))
    pipe.save(tmp_path)
    other = threads(plain_layers(), [2, 1], schedule=schedule, micro_batches=1)
    other.load(tmp_path)
    assert other.step == 1
    for call in (lambda: other.train_batch(*data(1)), lambda: list(other.train([data(1)]))):
        with pytest.raises(SettingError, match="the learning rate would stay constant"):
            call()
    assert other.step == 1
    other.eval_batch(*data(1))
    other.scheduler(constant)
    assert float(other.train_batch(*data(1))) == float(pipe.train_batch(*data(1)))


def test_copies_of_a_mesh_play_the_batch_of_all_and_return_the_outputs_of_each():
    """Their loaders have different data by design, and are not compared."""
    pipe = threads(plain_layers(), [2, 1])
    log = []

    def joined(x, y):
        log.append((tuple(x.shape), y is not None))
        return torch.cat([x, x]), None if y is None else torch.cat([y, y])

    pipe._copies = SimpleNamespace(joined=joined, outputs_of_copy=lambda value: value[:4])
    pipe._world.calls.check_loader = lambda loader: log.append("loader")
    x, y = data(0)
    played = []
    play = pipe._player.play
    pipe._player.play = lambda batch, *args, **options: (
        played.append(sum(len(part) for part in batch.inputs)),
        play(batch, *args, **options),
    )
    pipe.train_batch(x, y)
    list(pipe.train([(x, y)]))
    pipe.eval_batch(x, y)
    output = pipe.forward(x)
    assert log == [((4, 4), True)] * 3 + [((4, 4), False)]
    assert played == [8] * 4
    assert len(output) == 4
    pipe._copies = None
    # Of micro-batches of another size, whose products may round otherwise.
    torch.testing.assert_close(pipe.forward(x), output)


def test_batches_are_compared_with_their_data_and_train_only_where_gradients_are_wanted():
    """An evaluation has no gradients, and `forward` no targets."""
    pipe = threads(plain_layers(), [2, 1])
    log = []

    def begin(batch, x, y, call):
        log.append((call, batch.training, x is inputs, y is targets, y is None))
        return batch

    pipe._world.calls.begin = begin
    inputs, targets = data(0)
    pipe.train_batch(inputs, targets)
    pipe.eval_batch(inputs, targets)
    pipe.forward(inputs)
    pipe.compare_with_one_device(inputs, targets)
    assert log == [
        ("train_batch", True, True, True, False),
        ("eval_batch", False, True, True, False),
        ("forward", False, True, False, True),
        ("compare_with_one_device", True, True, True, False),
    ]
