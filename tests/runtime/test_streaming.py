"""Streams on the runtime: feeding, timelines, counts, and failures in mid-stream."""

from __future__ import annotations

import math

import pytest
import torch
from tests.runtime.failing import Trap
from torch import nn

import penstock as ps
from penstock.errors import RunError, StageFailed
from penstock.runtime import streaming
from penstock.runtime.interpreter import Interpreter
from penstock.runtime.player import make_stream
from penstock.schedule.op import Kind


def model(trap=None):
    """Six small layers, one of which may fail."""
    torch.manual_seed(0)
    layers = [
        nn.Linear(8, 8),
        nn.Tanh(),
        nn.Linear(8, 8),
        nn.Tanh(),
        nn.Linear(8, 8),
        nn.Linear(8, 4),
    ]
    if trap is not None:
        layers[3] = trap
    return nn.Sequential(*layers)


def batches(count, samples=8):
    """Return batches of random data, always the same."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(samples, 8, generator=generator), torch.randn(samples, 4, generator=generator))
        for _ in range(count)
    ]


def pipeline(schedule="pipedream", balance=(2, 2, 2), *, trap=None, **options):
    """Return an asynchronous pipeline in this process."""
    options = {"micro_batches": 1, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1), **options}
    return ps.Pipeline(
        model(trap),
        balance=balance,
        schedule=schedule,
        loss=nn.functional.mse_loss,
        executor="threads",
        **options,
    )


def test_a_stream_reads_as_many_batches_ahead_as_are_in_flight():
    """The first loss comes when the pipeline is full, and then one for every batch."""
    numbers = []

    def loader():
        for number, batch in enumerate(batches(6)):
            numbers.append(number)
            yield batch

    counts = [len(numbers) for _ in pipeline().train(loader())]
    assert counts == [3, 4, 5, 6, 6, 6]


def test_a_stream_never_holds_more_marks_or_batches_than_it_needs():
    """An epoch has thousands of batches."""
    pipe = pipeline()
    held = []
    for _ in pipe.train(batches(100)):
        (stream,) = [pipe._stream]
        held.append(
            (
                max(len(interpreter.marks) for interpreter in stream.interpreters.values()),
                len(stream._in_flight._batches),
                max(len(rank.transfers._sent) for rank in stream.interpreters.values()),
            )
        )
    most_marks, most_batches, most_messages = map(max, zip(*held, strict=True))
    assert most_marks <= 60
    assert most_batches <= 3
    assert most_messages <= 60


def test_the_timeline_has_the_last_completed_batches_numbered_from_0():
    """So it can be compared with the simulated one, at any point of the stream."""
    pipe = pipeline()
    for count in (2, 40):
        for _ in pipe.train(batches(count)):
            pass
        timeline = pipe.timeline()
        expected = ps.schedule("pipedream", 3, 1, batches=min(count, 7))
        events = {
            rank: tuple(event.op for event in timeline.compute if event.rank == rank)
            for rank in range(3)
        }
        assert tuple(events.values()) == expected.programs
        assert timeline.peak_in_flight == ps.simulate(expected, ps.Costs()).peak_in_flight


def test_the_timeline_leaves_out_micro_batches_that_a_small_batch_does_not_have():
    """The last batch of an epoch may have fewer samples than micro-batches."""
    pipe = pipeline(micro_batches=4)
    for _ in pipe.train([*batches(3), *batches(1, samples=2)]):
        pass
    assert (
        sum(event.op.kind is Kind.F for event in pipe.timeline().compute if event.rank == 0)
        == 3 * 4 + 2
    )


@pytest.mark.parametrize(
    ("weights", "versions"),
    [("stash", (3, 2, 1)), ("none", (1, 1, 1)), ("vertical-sync", (3, 3, 3))],
)
def test_versions_are_counted_and_their_bytes_are_in_the_peak_memory(weights, versions):
    """The paper's cost of asynchrony: S - s versions on stage s, or p, or one."""
    pipe = pipeline(weights=weights)
    for _ in pipe.train(batches(12)):
        pass
    assert pipe.weight_versions == versions
    flush = pipeline("1f1b")
    flush.train_batch(*batches(1)[0])
    first = flush.timeline().peak_memory
    flush.train_batch(
        *batches(1)[0]
    )  # the very first graph copies its input, to see whether layers change it; so does a stream's
    stage_bytes = [4 * (8 * 8 + 8), 4 * (8 * 8 + 8), 4 * (8 * 8 + 8 + 8 * 4 + 4)]
    expected = [(count - 1) * size for count, size in zip(versions, stage_bytes, strict=True)]
    version_bytes = [(count - 1) * _saved(flush, stage) for stage, count in enumerate((3, 2, 1))]
    more = [a - b for a, b in zip(pipe.timeline().peak_memory, first, strict=True)]
    assert more == [a + b for a, b in zip(expected, version_bytes, strict=True)]


def _saved(pipe, stage):
    """Return the bytes of activations that one micro-batch holds on a stage."""
    return pipe._assembly.interpreters[stage].activation_meter.peak


def test_an_op_that_fails_in_mid_stream_is_named_and_ends_the_stream():
    """Some stages have had updates that others have not: the weights are of no single version."""
    pipe = pipeline(trap=Trap("raise", "B", at=4))
    with pytest.raises(StageFailed, match=r"rank 1.*1B4.*a planted failure"):
        list(pipe.train(batches(9)))
    with pytest.raises(RunError, match="cannot go on after a batch that failed"):
        pipe.train_batch(*batches(1)[0])
    with pytest.raises(RunError, match="cannot go on after a batch that failed"):
        pipe.flush()


def test_loading_a_checkpoint_restarts_a_failed_stream(tmp_path):
    """Loading replaces the inconsistent weights."""
    trap = Trap("raise", "F", at=8)
    pipe = pipeline(trap=trap)
    for step, _ in enumerate(pipe.train(batches(4))):
        if step == 3:
            pipe.save(tmp_path)
    with pytest.raises(StageFailed):
        list(pipe.train(batches(9)))
    pipe.load(tmp_path)
    trap.armed = False
    fresh = pipeline(trap=Trap("never"))
    fresh.load(tmp_path)
    assert pipe.step == fresh.step == 4
    assert [float(loss) for loss in pipe.train(batches(5))] == [
        float(loss) for loss in fresh.train(batches(5))
    ]


def test_evaluating_in_mid_stream_leaves_updates_on():
    """Evaluation drains the stream, which then fills again and continues to update."""
    pipe, plain = pipeline(), pipeline()
    for step, _ in enumerate(pipe.train(batches(12))):
        if step == 4:
            pipe.eval_batch(*batches(1)[0])
            pipe.forward(batches(1)[0][0])
    for count in (7, 5):  # where the first had drained
        list(plain.train(batches(12)[:7] if count == 7 else batches(12)[7:]))
    assert all(
        torch.equal(value, plain.state_dict()[name]) for name, value in pipe.state_dict().items()
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [("pipedream", {}), ("avgpipe", {}), ("hetpipe", {}), ("2bw", {"micro_batches": 4})],
)
def test_outside_the_stream_the_model_is_the_one_that_a_checkpoint_has(name, options, tmp_path):
    """Whatever copies and versions a rule uses; with AvgPipe it is the reference model, which no
    batch reads.
    """
    pipe = pipeline(name, **options)
    list(pipe.train(batches(7)))
    x, y = batches(1)[0]
    assert pipe.compare_with_one_device(x, y).worst[1] < 1e-6
    pipe.save(tmp_path)
    alone = pipeline("gpipe", balance=(6,))
    alone.load(tmp_path)
    torch.testing.assert_close(alone.eval_batch(x, y), pipe.eval_batch(x, y))


@pytest.mark.parametrize("replicas", [2, (2, 1, 1)])
def test_synchronised_replicas_stream_and_are_saved_once(replicas, tmp_path):
    """PipeDream's stages on several ranks: gradients are summed at every U.

    Two pipelines of one micro-batch each compute what one pipeline computes whose micro-batch is
    the whole batch.
    """
    pipe, alike = (
        pipeline(ps.schedule("pipedream", 3, 2, replicas=replicas), micro_batches=None),
        pipeline(),
    )
    losses = [float(loss) for loss in pipe.train(batches(6))]
    expected = [float(loss) for loss in alike.train(batches(6))]
    assert len(losses) == 6
    if replicas == 2:
        assert losses == pytest.approx(expected, rel=1e-5)
    pipe.save(tmp_path)
    alone = pipeline("gpipe", balance=(6,))
    alone.load(tmp_path)
    assert all(
        torch.equal(value, pipe.state_dict()[name]) for name, value in alone.state_dict().items()
    )


def test_a_stream_without_an_optimizer_accumulates_gradients():
    """As a synchronous schedule does: the user updates the weights."""
    pipe = pipeline(optimizer=None)
    count = len(list(pipe.train(batches(3))))
    grads = {name: parameter.grad for name, parameter in pipe.chain.modules[0].named_parameters()}
    assert count == 3
    assert all(grad is not None and math.isfinite(float(grad.sum())) for grad in grads.values())


def test_a_stage_without_weights_streams_too():
    """It may have only an activation function, or frozen layers."""
    pipe = pipeline(balance=(1, 1, 4), trap=None)
    assert len(list(pipe.train(batches(5)))) == 5
    assert pipe.weight_versions[1] == 1


def test_the_timeline_has_the_sizes_of_the_batches_since_the_pipeline_was_filled_again():
    """A small batch ends the first epoch; those of the next one count from 0."""
    pipe = pipeline(micro_batches=4)
    for epoch in (batches(1, samples=2), batches(2)):
        for _ in pipe.train(epoch):
            pass
    forwards = [event for event in pipe.timeline().compute if event.op.kind is Kind.F]
    assert len([event for event in forwards if event.rank == 0]) == 2 * 4


def stream_of(pipe):
    """Return the stream of a pipeline after a batch, which was completed."""
    list(pipe.train(batches(1)))
    return pipe._stream


def test_losses_are_taken_in_order_and_those_of_an_abandoned_iterator_are_dropped():
    """Several batches may be complete at once, at the end of a stream."""
    stream = stream_of(pipeline())
    stream.ready.extend((step, torch.tensor(float(step))) for step in range(3, 8))
    assert [float(loss) for loss in stream.take_losses(5)] == [5.0, 6.0, 7.0]
    assert not stream.ready


def test_a_rank_waits_only_for_sends_of_batches_that_all_have_completed(monkeypatch):
    """Of the last completed one a receiver may still need what this rank has yet to send."""
    released = {rank: [] for rank in range(3)}
    original = Interpreter.release

    def release(self, before):
        released[self.rank].append(before)
        original(self, before)

    monkeypatch.setattr(Interpreter, "release", release)
    pipe = pipeline("2bw", micro_batches=4)
    stream = stream_of(pipe)
    for rows in released.values():
        rows.clear()
    list(pipe.train(batches(6)))
    expected = [(stream.increments.completed_batches(index) - 1) * 4 for index in range(6)]
    assert released == dict.fromkeys(range(3), expected)
    assert expected[-1] > 0


def test_ops_of_a_stream_read_its_batches_and_the_weights_of_their_rank():
    """And tell a loss to the ranks that report it."""
    stream = stream_of(pipeline())
    for rank in range(3):
        context = stream._context(rank)
        assert context.batches is stream._in_flight
        assert context.weights is stream.weights.by_rank[rank]
        assert list(context.weights) == [rank]
        assert context.on_loss == stream._losses.tell
        assert context.updates


def test_a_drained_stream_runs_nothing_and_a_new_one_has_no_window(monkeypatch):
    """A flush is called before every evaluation and every save."""
    pipe = pipeline()
    stream = make_stream(pipe._assembly)
    assert stream.window() == {0: [], 1: [], 2: []}
    monkeypatch.setattr(stream.world, "run", lambda job: pytest.fail("ran"))
    stream.flush()
    stream.empty()


def test_emptying_a_failed_stream_drops_all_of_it():
    """Losses, batches and activations of before would be taken for those of the next batches."""
    trap = Trap("raise", "B", at=4)
    pipe = pipeline(trap=trap)
    with pytest.raises(StageFailed):
        list(pipe.train(batches(9)))
    stream = pipe._stream
    stream.ready.append((2, torch.tensor(1.0)))
    assert stream._in_flight._batches
    stream.empty()
    assert not stream.ready
    assert not stream._in_flight._batches
    for interpreter in stream.interpreters.values():
        assert not interpreter._values
        assert not interpreter._arrivals
        for stage in interpreter.stages.values():
            assert not stage._saved
    trap.armed = False
    stream.weights.restart()
    assert len(list(pipe.train(batches(2)))) == 2


def test_flushing_waits_until_all_sends_have_left(monkeypatch):
    """The weights are read, or the process ends, right after it."""
    pipe = pipeline()
    stream = stream_of(pipe)
    calls = []
    monkeypatch.setattr(Interpreter, "finish", lambda self: calls.append(self.rank))
    monkeypatch.setattr(stream._losses, "verify", lambda: calls.append("verified"))
    feed_one(pipe)
    assert calls == []
    pipe.flush()
    assert sorted(calls[:3]) == [0, 1, 2]
    assert calls[3:] == ["verified"]


def feed_one(pipe):
    """Feed one batch, and leave it in flight."""
    x, y = batches(1)[0]
    pipe._feed(pipe._stream, pipe._batch(x, y, training=True, call="train_batch"))


@pytest.mark.parametrize("warm_up", [0, 2])
def test_the_batches_of_a_warm_up_are_completed_one_by_one(warm_up):
    """Exactly as many as the option says; the next ones fill the pipeline."""
    pipe = pipeline(
        "pipedream", weights="pipemare", weights_options={"warm_up": warm_up, "annealing": 4}
    )
    drained = []
    for _ in range(4):
        feed_one(pipe)
        drained.append(pipe._stream._drained)
    assert drained == [step < warm_up for step in range(4)]


@pytest.mark.parametrize(
    ("schedule", "balance"),
    [
        ("pipedream", (3, 3)),
        ("pipedream", (2, 1, 1, 2)),
        # Its ops repeat only every few batches.
        ("hetpipe", (2, 2, 2)),
    ],
)
def test_all_times_of_the_window_are_there_after_every_batch(schedule, balance):
    """The last stages are ahead of the first ones with the batches that they have completed."""
    pipe = pipeline(schedule, balance=balance, micro_batches=1)
    for number, _ in enumerate(pipe.train(batches(24)), 1):
        window = pipe._stream.window()
        ops = [op for rows in window.values() for op, _ in rows if op.stage == len(balance) - 1]
        forwards = sum(op.kind is Kind.F for op in ops)
        assert forwards >= min(number, pipe._stream.schedule.batches)
        for rank, rows in window.items():
            marks = pipe._assembly.interpreters[rank].marks
            assert all(op in marks for _, op in rows), rank


def test_emptying_a_stream_drops_the_losses_that_have_not_come(monkeypatch):
    """Those of a failed batch would be taken for the losses of the batches after it."""
    pipe = pipeline()
    stream = stream_of(pipe)
    calls = []
    monkeypatch.setattr(stream._losses, "clear", lambda: calls.append("losses"))
    monkeypatch.setattr(Interpreter, "forget", lambda self: calls.append(self.rank))
    feed_one(pipe)
    stream.empty()
    assert sorted(calls, key=str) == [0, 1, 2, "losses"]
    assert stream._drained
    assert not stream.ready


@pytest.mark.parametrize("part", ["feed", "flush"])
def test_a_stream_that_fails_anywhere_is_over_until_it_is_emptied(part, monkeypatch):
    """Its stages have had different updates."""
    pipe = pipeline()
    stream = stream_of(pipe)
    feed_one(pipe)

    def fail(job):
        raise RuntimeError("planted")

    run = stream.world.run
    monkeypatch.setattr(stream.world, "run", fail)
    with pytest.raises(RuntimeError, match="planted"):
        feed_one(pipe) if part == "feed" else stream.flush()
    monkeypatch.setattr(stream.world, "run", run)
    for call in (stream.flush, lambda: stream.feed(None)):
        with pytest.raises(RunError, match="cannot go on after a batch that failed"):
            call()
    stream.empty()
    stream.weights.restart()
    assert len(list(pipe.train(batches(4)))) == 4
    assert pipe.timeline().ranks == 3


def test_a_flush_brings_every_stage_to_its_newest_version_and_copies_to_one():
    """First the versions of a rank, then the average over copies, then its sends."""
    pipe = pipeline("hetpipe")
    feed_one(pipe)
    stream = pipe._stream
    log = []
    for rank, by_stage in stream.weights.by_rank.items():
        for weights in by_stage.values():
            weights.drain = lambda rank=rank: log.append((rank, "drain"))
        for group in stream.assembly.wave_replicas[rank].values():
            group.share_weights = lambda rank=rank: log.append((rank, "share"))
        interpreter = stream.interpreters[rank]
        interpreter.finish = lambda rank=rank: log.append((rank, "finish"))
    stream.flush()
    for rank in stream.interpreters:
        stages = len(stream.interpreters[rank].stages)
        names = [name for other, name in log if other == rank]
        assert names == ["drain"] * stages + ["share"] * stages + ["finish"]


def test_times_and_memory_are_those_since_the_pipeline_was_filled_again():
    """A batch that was evaluated in between, or an earlier epoch, is no part of them."""
    pipe = pipeline()
    list(pipe.train(batches(9)))
    interpreters = pipe._assembly.interpreters
    for interpreter in interpreters.values():
        interpreter.activation_meter.take(10**6)
        interpreter.activation_meter.give(10**6)
    list(pipe.train(batches(2)))
    for interpreter in interpreters.values():
        assert interpreter.activation_meter.peak < 10**6
        assert {op.micro_batch for op in interpreter.marks if op.kind is not Kind.U} == {0, 1}


def test_emptying_a_stream_completes_the_batches_in_flight():
    """Their updates are part of the weights, as after a flush."""
    pipe, other = pipeline(), pipeline()
    for _ in range(2):
        feed_one(pipe)
        feed_one(other)
    pipe._stream.empty()
    other.flush()
    for name, value in other.state_dict().items():
        assert torch.equal(pipe.state_dict()[name], value)


def test_losses_of_a_batch_are_expected_before_any_rank_runs(monkeypatch):
    """Other processes may send them at once."""
    pipe = pipeline()
    stream = stream_of(pipe)
    log = []
    run = stream.world.run
    monkeypatch.setattr(stream._losses, "expect", lambda *args: log.append(args))
    monkeypatch.setattr(stream.world, "run", lambda job: log.append("run") or run(job))
    x, y = batches(1)[0]
    for number in range(2):
        batch = pipe._batch(x, y, training=True, call="train_batch")
        stream.feed(batch)
        assert log[-2:] == [(number, batch), "run"]


def test_losses_on_devices_are_exchanged_there(monkeypatch):
    """For the schedule of one period."""
    pipe = pipeline()
    monkeypatch.setattr(streaming, "device_losses", lambda world: "on devices")
    monkeypatch.setattr(streaming, "DeviceStreamLosses", lambda *args: args)
    stream = make_stream(pipe._assembly)
    losses, schedule = stream._losses
    assert losses == "on devices"
    assert schedule.batches == stream.increments.period.batches
