"""Streams on the runtime: feeding, flushing, emptying, and what they hold."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.runtime.failing import Trap
from tests.runtime.streams import batches, pipeline

from penstock.errors import RunError, StageFailed
from penstock.runtime import streaming
from penstock.runtime.interpreter import Interpreter
from penstock.runtime.player import make_stream
from penstock.schedule.lower import output_message
from penstock.schedule.op import Kind


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


def test_the_timeline_has_the_sizes_of_the_batches_since_the_pipeline_was_filled_again():
    """A small batch ends the first epoch; those of the next one count from 0."""
    pipe = pipeline(micro_batches=4)
    for epoch in (batches(1, samples=2), batches(2)):
        for _ in pipe.train(epoch):
            pass
    forwards = [event for event in pipe.timeline().compute if event.op.kind is Kind.F]
    assert len([event for event in forwards if event.rank == 0]) == 2 * 4
    for _ in pipe.train([*batches(1), *batches(1, samples=2)]):
        pass
    forwards = [event for event in pipe.timeline().compute if event.op.kind is Kind.F]
    numbers = [event.op.micro_batch for event in forwards if event.rank == 0]
    assert sorted(numbers) == [0, 1, 2, 3, 4, 5], "a small batch has two micro-batches"


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
        batches_shown = pipe._stream.schedule.batches
        assert forwards >= min(number, batches_shown)
        # And no more than it takes to begin with a whole period.
        assert forwards < batches_shown + pipe._stream.increments.period.batches
        for rank, rows in window.items():
            interpreter = pipe._assembly.interpreters[rank]
            assert all(op in interpreter.marks for _, op in rows), rank
            sent = interpreter.transfers.sent
            messages = [output_message(op, len(balance)) for _, op in rows]
            assert all(sent(message) for message in messages if message is not None), rank


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
    for groups in stream.assembly.wave_replicas.values():
        # A rank may have several stages.
        groups[7] = SimpleNamespace()
    for rank, by_stage in stream.weights.by_rank.items():
        for weights in by_stage.values():
            weights.drain = lambda rank=rank: log.append((rank, "drain"))
        for group in stream.assembly.wave_replicas[rank].values():
            group.share_weights = lambda rank=rank: log.append((rank, "share"))
        interpreter = stream.interpreters[rank]
        interpreter.finish = lambda rank=rank: log.append((rank, "finish"))
    stream.flush()
    for rank in stream.interpreters:
        names = [name for other, name in log if other == rank]
        assert names == ["drain", "share", "share", "finish"]


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
