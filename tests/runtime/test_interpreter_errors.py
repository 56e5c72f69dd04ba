"""Errors in the ops and transfers of a rank: what they name, and what is dropped."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.runtime.scripted import (
    ALONE,
    PAIR,
    Fails,
    Ranks,
    Recorder,
    batch,
    failing,
    ignore,
    interpreter_of,
    replica_group,
    value,
)
from torch import nn

import penstock as ps
from penstock.batches.in_flight import BatchesInFlight
from penstock.errors import DeadlineExceeded, NonFinite, OutOfMemory, PeerFailed, StageFailed
from penstock.runtime.interpreter import RunContext
from penstock.schedule.lower import Direction, Message, Transfer
from penstock.schedule.op import Kind, Op
from penstock.transport.transport import TransportLost, TransportTimeout


class FailsOnce(nn.Module):
    """A layer that raises for negative input."""

    def forward(self, x):
        """Return the input."""
        if bool((x < 0).any()):
            raise ValueError("negative")
        return x


def test_a_failed_batch_leaves_no_values_behind():
    """Two stages of a rank pass values to each other: they would stay in memory, and could be
    taken for those of the next batch.
    """
    pipe = ps.Pipeline(
        nn.Sequential(nn.Identity(), FailsOnce(), nn.Linear(4, 4), nn.Linear(4, 4)),
        balance=(1, 1, 1, 1),
        schedule=ps.Schedule.parse(
            "0F0 0F1 1F0 1F1 1B0 0B0 1B1 0B1 1U1 0U1\n2F0 3F0 3B0 2B0 2F1 3F1 3B1 2B1 3U1 2U1"
        ),
        loss=nn.functional.mse_loss,
        executor="threads",
        device="cpu",
    )
    good, bad = torch.ones(4, 4), torch.tensor([[-1.0], [1.0], [1.0], [1.0]]).expand(4, 4)
    expected = float(pipe.eval_batch(good, good))
    with pytest.raises(StageFailed, match="negative"):
        pipe.train_batch(bad, bad)
    for interpreter in pipe._assembly.interpreters.values():
        assert not interpreter._values
        assert not interpreter._arrivals
    assert float(pipe.eval_batch(good, good)) == expected


def test_a_failure_names_the_step_in_which_it_happened():
    """So that the batch can be found among those of an epoch."""
    pipe = ps.Pipeline(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), FailsOnce()),
        balance=(1, 2),
        schedule="1f1b",
        micro_batches=2,
        loss=nn.functional.mse_loss,
        executor="threads",
        device="cpu",
    )
    x = torch.ones(4, 4)
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.fill_(0.1)
    for _ in range(2):
        pipe.train_batch(x, x)
    with pytest.raises(StageFailed, match="negative") as failure:
        pipe.train_batch(-10 * x, x)
    assert failure.value.step == 2


def test_a_failed_op_names_rank_stage_op_and_step_and_all_is_dropped():
    """The error that is shown has the failure as its cause."""
    ranks = Ranks("0F0 1F0 1B0 0B0")
    interpreter, log = ranks.interpreters[0], ranks.logs[0]
    interpreter.replicas = {stage: replica_group(log, stage) for stage in range(2)}
    error = Fails("too hot")
    interpreter.stages[1].backward = failing(error)
    interpreter._stored_activations[0, 0] = value("E", 0, 0)
    with pytest.raises(StageFailed, match=r"^rank 0 \(stage 1\) failed in 1B0 of step 9: ") as e:
        interpreter.play(ranks.programs[0], batch(1, step=9))
    assert (e.value.rank, e.value.stage, e.value.op, e.value.step) == (0, 1, "1B0", 9)
    assert e.value.cause == "Fails: too hot"
    assert e.value.__cause__ is error
    assert not interpreter._values
    assert not interpreter._arrivals
    assert not interpreter._stored_activations
    forgets = [("forget", 0), ("forget", 1), ("replicas 0.forget",), ("replicas 1.forget",)]
    assert log[-4:] == forgets
    assert ranks.board.current[0][0] == "is at 1B0"


def test_a_failed_update_names_its_op():
    """An optimizer is code of the stage, as its layers are."""
    interpreter, program, _ = interpreter_of("0F0 0B0 0U1")
    interpreter.stages[0].update = SimpleNamespace(step=failing(Fails("no state")))
    text = r"^rank 0 \(stage 0\) failed in 0U1 of step 4: Fails: no state"
    with pytest.raises(StageFailed, match=text):
        interpreter.play(program, batch(1, step=4))


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        NonFinite(0, 0, "0F0", 0, "NaN", 0),
        PeerFailed(0, "the other replicas", "rank 1 ran away"),
        DeadlineExceeded(0, "the other replicas", 9.0, ()),
    ],
)
def test_some_errors_of_an_op_are_raised_as_they_are(error):
    """An interrupt is no failure of the stage, and the others name their cause themselves."""
    interpreter, program, log = interpreter_of(ALONE)
    interpreter.stages[0].forward = failing(error)
    with pytest.raises(type(error)) as e:
        interpreter.play(program, batch(2))
    assert e.value is error
    assert e.value.__cause__ is None
    assert log == [("forget", 0)]


def test_an_error_outside_of_an_op_is_not_blamed_on_a_stage():
    """Such as a message of another version; also after an op that has failed."""
    ranks = Ranks(PAIR)
    interpreter = ranks.interpreters[0]
    forward = interpreter.stages[0].forward
    interpreter.stages[0].forward = failing(Fails("once"))
    with pytest.raises(StageFailed):
        interpreter.play(ranks.programs[0], batch(1))
    interpreter.stages[0].forward = forward
    refused = ValueError("refused")
    for links in ({"post": failing(refused)}, {"send": failing(refused), "post": ignore}):
        interpreter.transport = SimpleNamespace(**links)
        with pytest.raises(ValueError, match="refused") as e:
            interpreter.play(ranks.programs[0], batch(1))
        assert e.value is refused


def test_a_message_that_does_not_come_is_named_by_the_op_that_makes_it():
    """And with how long this rank has waited, and what the others do."""
    ranks = Ranks(PAIR, deadline_s=0.0)
    ranks.board.for_rank(0).doing("is at 0F0")
    with pytest.raises(DeadlineExceeded) as e:
        ranks.interpreters[1].play(ranks.programs[1], batch(1))
    assert (e.value.rank, e.value.waited_for) == (1, "0F0")
    assert 0 <= e.value.seconds < 30
    assert e.value.other_ranks == ("rank 0 is at 0F0 since 0 s",)
    assert ranks.board.current[1][0] == "waits for 0F0"
    assert ranks.logs[1] == [("forget", 1)]


@pytest.mark.parametrize("method", ["send", "post"])
@pytest.mark.parametrize("error", [TransportLost("gone"), TransportTimeout("late")])
def test_a_link_that_breaks_names_the_peer(method, error):
    """Of a send the receiver, of a posted receive the sender."""
    ranks = Ranks(PAIR)
    ranks.board.fail("rank 1 ran away")
    interpreter = ranks.interpreters[0]
    interpreter._waits_since = -1e9  # an earlier wait
    links = {"send": ignore, "post": ignore, method: failing(error)}
    interpreter.transport = SimpleNamespace(**links)
    kind = PeerFailed if isinstance(error, TransportLost) else DeadlineExceeded
    with pytest.raises(kind) as e:
        interpreter.play(ranks.programs[0], batch(1))
    assert (e.value.rank, e.value.waited_for) == (0, "rank 1")
    if kind is PeerFailed:
        assert e.value.reason == "rank 1 ran away"
    else:
        assert 0 <= e.value.seconds < 30
    interpreter._waits_since, interpreter._waits_for = -1e9, 7
    message = Message(Kind.F, 0, 0)
    actions = [Op.parse("0F0"), Transfer(Direction.SEND, message, 1)]
    if method == "post":
        actions = [Transfer(Direction.RECV, message, 1)]
    with pytest.raises(kind) as e:
        interpreter.run_actions(actions, RunContext(BatchesInFlight.alone(batch(1))))
    assert e.value.waited_for == "rank 1"
    assert kind is PeerFailed or 0 <= e.value.seconds < 30


@pytest.mark.parametrize("text", ["gloo/transport: Connection closed by peer", "bad shape"])
def test_a_lost_collective_of_shared_layers_is_the_failure_of_another_process(text):
    """Any other RuntimeError of a stage with shared layers is its own."""
    interpreter, program, log = interpreter_of("0F0 0B0")
    interpreter.board.fail("rank 1 ran away")
    interpreter.parallel = {0: Recorder(log, "parallel", begin=None, reduce=None, end=None)}
    interpreter.stages[0].backward = failing(RuntimeError(text))
    lost = "gloo" in text
    with pytest.raises(PeerFailed if lost else StageFailed) as e:
        interpreter.play(program, batch(1))
    if lost:
        assert e.value.waited_for == "the processes that share its layers"
    interpreter.stages[0].backward = failing(ValueError(text))
    with pytest.raises(StageFailed):
        interpreter.play(program, batch(1))
    interpreter.stages[0].backward = failing(RuntimeError(text))
    interpreter.parallel = {}
    with pytest.raises(StageFailed):
        interpreter.play(program, batch(1))


def test_an_op_without_memory_reports_what_is_held_before_it_is_dropped():
    """The activations in flight, the peak and the prediction."""
    interpreter, program, _ = interpreter_of("0F0 0B0")
    stage = interpreter.stages[0]
    interpreter.predicted_bytes = 5000

    def forward(*args):
        interpreter.activation_meter.take(3072)
        interpreter.activation_meter.give(1024)

    stage.forward, stage.backward = forward, failing(MemoryError())
    stage.forget = interpreter.activation_meter.begin
    with pytest.raises(OutOfMemory, match=r"0B0 of step 0.*held 2\.0 KiB of act") as e:
        interpreter.play(program, batch(1))
    assert (e.value.held_bytes, e.value.predicted_bytes) == (3072, 5000)


def test_sends_that_do_not_leave_end_the_batch():
    """At its end, and when a stream releases what has left; what is held is dropped at the end."""
    interpreter, program, log = interpreter_of("0F0 0B0")
    released = []
    interpreter.transport = SimpleNamespace(drain=bool, release=released.append)
    interpreter.release(12)
    assert released == [12]
    late = failing(TransportTimeout())
    interpreter.transport = SimpleNamespace(drain=late, release=late)
    for leave in (lambda: interpreter.release(1), interpreter.finish):
        with pytest.raises(DeadlineExceeded) as e:
            leave()
        assert e.value.waited_for == "its sends to leave"
    log.clear()
    with pytest.raises(DeadlineExceeded):
        interpreter.play(program, batch(1))
    assert log[-1] == ("forget", 0)


def test_a_loss_that_cannot_leave_is_a_failure_of_the_link():
    """The rank that collects the losses of a stream may be gone."""
    interpreter, _, _ = interpreter_of(ALONE, loss="a loss")
    context = RunContext(BatchesInFlight.alone(batch(2)), on_loss=failing(TransportLost("gone")))
    with pytest.raises(PeerFailed) as e:
        interpreter.run_actions([Op.parse("0F0")], context)
    assert e.value.waited_for == "its loss to leave"


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("reason", [None, "rank 1 ran away"])
def test_garbage_of_a_failed_rank_is_blamed_on_that_rank_only_on_a_device(device, reason):
    """An aborted message arrives as garbage there; on the CPU no message does."""
    ranks = Ranks(PAIR)
    interpreter = ranks.interpreters[0]
    stage = interpreter.stages[0]
    stage.device = torch.device(device)
    error = NonFinite(0, 0, "0U1", 0, "NaN", None)
    calls = []

    def before_update(*args, **options):
        calls.append((*args, options))
        raise error

    interpreter.finite = SimpleNamespace(before_update=before_update)
    interpreter.board = SimpleNamespace(failure=lambda patience_s: reason)
    interpreter.guard = type(interpreter.guard)(0, interpreter.board)
    blamed = device != "cpu" and reason is not None
    with pytest.raises(PeerFailed if blamed else NonFinite) as e:
        interpreter._check_gradients(interpreter.finite, Op.parse("0U1"), RunContext(None))
    if blamed:
        assert e.value.reason == reason
        assert e.value.__cause__ is error
        assert e.value.waited_for == "gradients for 0U1"
    with pytest.raises((PeerFailed, NonFinite)):
        interpreter._check_gradients(
            interpreter.finite, Op.parse("0U1"), RunContext(None, weights={0: object()})
        )
    assert calls == [
        (stage, Op.parse("0U1"), {"streaming": False}),
        (stage, Op.parse("0U1"), {"streaming": True}),
    ]


def test_an_op_of_a_stream_without_memory_counts_the_versions_of_its_weights():
    """They are what a stream holds beside a synchronous schedule."""
    interpreter, _, _ = interpreter_of("0F0 0B0")
    interpreter.stages[0].forward = failing(MemoryError())
    rule = SimpleNamespace(before_forward=ignore, held_bytes=lambda: 2048, more_optimizers=list)
    batches = BatchesInFlight(1)
    batches.add(2, batch(1, step=2))
    context = RunContext(batches, weights={0: rule})
    with pytest.raises(OutOfMemory, match="0F2 of step 2") as e:
        interpreter.run_actions([Op.parse("0F2")], context)
    assert e.value.held_bytes == 2048


def test_an_interrupt_while_sends_leave_drops_what_is_held():
    """A notebook may go on with the next batch."""
    interpreter, program, log = interpreter_of("0F0 0B0")
    interpreter.transport = SimpleNamespace(drain=failing(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        interpreter.play(program, batch(1))
    assert log[-1] == ("forget", 0)


def test_an_op_whose_input_is_not_received_does_not_run():
    """A program without the receive is wrong; the op would compute with nothing."""
    ranks = Ranks(PAIR)
    context = RunContext(BatchesInFlight.alone(batch(1)))
    with pytest.raises(AssertionError):
        ranks.interpreters[1].run_actions([Op.parse("1F0")], context)
    assert ranks.logs[1] == [("forget", 1)]
