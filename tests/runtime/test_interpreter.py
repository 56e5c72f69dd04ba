"""The interpreter of programs: in a pipeline, and op by op with stages that only record what they are
asked for.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from tests.runtime.scripted import Ranks, Recorder, batch, contents, replica_group, value
from torch import nn

import penstock as ps
from penstock.batches.in_flight import BatchesInFlight
from penstock.errors import DeadlineExceeded, NonFinite, OutOfMemory, PeerFailed, StageFailed
from penstock.runtime.interpreter import _MAX_PROGRAMS, Interpreter, RunContext
from penstock.schedule.lower import Direction, Message, Transfer
from penstock.schedule.op import Kind, Op
from penstock.transport.in_process import MemoryTransport
from penstock.transport.transport import TransportLost, TransportTimeout

#: One stage on one rank, with two micro-batches.
ALONE = "0F0 0F1 0B0 0B1 0U1"

#: Two ranks with a stage each.
PAIR = "0F0 0B0 0U1\n1F0 1B0 1U1"


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


def test_a_program_ends_when_its_messages_have_left(monkeypatch):
    """The buffers of a send may be changed only then; over gloo it may still be under way."""
    drained = []
    monkeypatch.setattr(MemoryTransport, "drain", lambda self: drained.append(self.rank))
    pipe = ps.Pipeline(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        balance=(1, 1),
        schedule="gpipe",
        micro_batches=2,
        loss=nn.functional.mse_loss,
        executor="threads",
        device="cpu",
    )
    x = torch.ones(4, 4)
    drained.clear()
    pipe.train_batch(x, x)
    assert set(drained) == {0, 1}


def test_a_cached_program_is_not_used_for_another_one_at_the_same_address():
    """Python gives the id of a freed program to a new one, which must run its own steps."""
    torch.manual_seed(0)
    pipe = ps.Pipeline(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        balance=(1, 1),
        schedule="gpipe",
        micro_batches=2,
        loss=nn.functional.mse_loss,
        executor="threads",
        device="cpu",
    )
    x = torch.randn(4, 4)
    expected = float(pipe.eval_batch(x, x))
    for interpreter in pipe._assembly.interpreters.values():
        assert interpreter._programs
        for key in interpreter._programs:
            interpreter._programs[key] = (), ()
    assert float(pipe.eval_batch(x, x)) == expected


class RecordedWeights:
    """A weight rule that records what it is told."""

    def __init__(self) -> None:
        self.calls = []

    def before_backward(self, number):
        """Note that a backward begins."""
        self.calls.append(("before", number))

    def finished(self, number):
        """Note that a micro-batch reads no version any more."""
        self.calls.append(("finished", number))


def test_a_weight_version_is_in_use_until_b_or_w_and_not_only_until_i():
    """W reads the graph of the forward: its version must not be stepped in place before."""
    weights = RecordedWeights()
    stage = SimpleNamespace(**{name: lambda *_: None for name in ("input_grad", "weight_grad")})
    rank = SimpleNamespace(stages={0: stage}, finite=None)
    context = RunContext(None, weights={0: weights})
    for text in ("0I3", "0W3"):
        Interpreter._compute(rank, Op.parse(text), (None, 3), None, context)
    assert weights.calls == [("before", 3), ("before", 3), ("finished", 3)]


def interpreter_of(text, **options):
    """Return the only interpreter of a schedule of one rank, its program and its log."""
    ranks = Ranks(text, **options)
    return ranks.interpreters[0], ranks.programs[0], ranks.logs[0]


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize(
    ("name", "stages", "micro_batches"),
    [
        ("gpipe", 3, 4),
        ("1f1b", 4, 5),
        ("interleaved", 4, 4),
        ("zb-h1", 3, 4),
        ("zb-v", 4, 4),
        ("chimera", 4, 4),
        ("bpipe", 4, 5),
        ("dualpipe-v", 4, 4),
    ],
)
def test_every_op_gets_the_value_of_its_neighbour(name, stages, micro_batches, ahead):
    """Of the same micro-batch, of this batch, and none where there is no neighbour; nothing is held
    afterwards.
    """
    schedule = ps.schedule(name, stages=stages, micro_batches=micro_batches)
    ranks = Ranks(schedule, ahead=ahead)
    for step in range(2):
        for log in ranks.logs:
            log.clear()
        ranks.play(batch(micro_batches, step))
        runs = Counter()
        for entry in (entry for log in ranks.logs for entry in log if entry[0] in "FBIWEL"):
            kind, stage, number, arrived = entry
            expected = {
                "F": ("F", stage - 1, number, step) if stage else None,
                "B": ("B", stage + 1, number, step) if stage < schedule.stages - 1 else None,
                "I": ("B", stage + 1, number, step) if stage < schedule.stages - 1 else None,
                "L": ("E", stage, number, step),
            }.get(kind)
            assert arrived == expected, entry
            runs[kind, stage, number] += 1
        ops = Counter(
            (op.kind.value, op.stage, op.micro_batch)
            for rank, program in enumerate(schedule.programs)
            for op in program
            if op.kind is not Kind.U
            and (op.kind not in (Kind.E, Kind.L) or rank in schedule.ranks_of_stage[op.stage])
        )
        assert runs == ops
        for rank, interpreter in enumerate(ranks.interpreters):
            assert not interpreter._values
            assert not interpreter._arrivals
            assert not interpreter._stored_activations
            assert interpreter.activation_meter.now == 0
            assert list(interpreter.marks) == list(schedule.programs[rank])
            assert ranks.board.current[rank][0] == "is between batches"
        assert not ranks.exchange._payloads


def test_marks_are_start_and_end_of_each_op_in_order():
    """The timeline reads them; an op ends before the next begins."""
    interpreter, program, _ = interpreter_of(ALONE)
    interpreter.play(program, batch(2))
    seconds = interpreter.seconds([op for op in program if isinstance(op, Op)])
    times = [time for pair in seconds for time in pair]
    assert times == sorted(times)
    assert len(seconds) == 5
    interpreter.play(program[:1], batch(2))
    assert list(interpreter.marks) == [program[0]], "marks of an earlier batch stay"


def test_a_batch_begins_with_an_empty_meter_and_no_transfers():
    """Peak memory and the timeline are those of one batch."""
    ranks = Ranks(PAIR)
    ranks.interpreters[0].activation_meter.take(100)
    ranks.play(batch(1))
    assert ranks.interpreters[0].activation_meter.peak == 0
    forward = Message(Kind.F, 0, 0)
    peer, size, arrived_s = ranks.interpreters[0].transfers.sent(forward)
    assert (peer, size) == (1, 32)
    assert arrived_s >= ranks.interpreters[0].seconds([Op.parse("0F0")])[0][1]
    begun_s = ranks.interpreters[1].transfers.wait_start(forward)
    assert begun_s <= ranks.interpreters[1].seconds([Op.parse("1F0")])[0][0]
    assert ranks.interpreters[0].transfers.wait_start(forward) is None
    ranks.interpreters[0].begin()
    assert ranks.interpreters[0].transfers.sent(forward) is None


def test_the_next_part_of_a_stream_keeps_marks_and_memory():
    """Only the clock begins anew with every part; a part has no end of its own."""
    interpreter, _, log = interpreter_of(ALONE)
    begun = []
    interpreter.clock.begin = lambda: begun.append(1)
    context = RunContext(BatchesInFlight.alone(batch(2)))
    interpreter.activation_meter.take(8)
    interpreter.run_actions([Op.parse("0F0")], context)
    interpreter.run_actions([Op.parse("0B0")], context)
    assert [str(op) for op in interpreter.marks] == ["0F0", "0B0"]
    assert (len(begun), interpreter.activation_meter.now) == (2, 8)
    assert [entry[:3] for entry in log] == [("F", 0, 0), ("B", 0, 0)]


def test_a_small_batch_of_a_stream_runs_and_sends_only_its_micro_batches():
    """A stream's program has the ops of a whole batch; those that are missing send nothing."""
    ranks = Ranks("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3\n1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3", ahead=1)
    batches = BatchesInFlight(2)
    batches.add(0, batch(1, step=5))
    batches.add(1, batch(2, step=6))
    context = RunContext(batches)
    forwards = [
        [action for action in program if getattr(action, "kind", None) is Kind.F or
         (isinstance(action, Transfer) and action.message.kind is Kind.F)]
        for program in ranks.programs
    ]  # fmt: skip
    for rank, actions in enumerate(forwards):
        ranks.interpreters[rank].run_actions(actions, context)
    assert ranks.logs[0] == [("F", 0, number, None) for number in (0, 0, 1)]
    arrived = [("F", 0, 0, 5), ("F", 0, 0, 6), ("F", 0, 1, 6)]
    assert [entry[3] for entry in ranks.logs[1]] == arrived
    for interpreter in ranks.interpreters:
        assert not interpreter._values
        assert not interpreter._arrivals
    assert not ranks.exchange._payloads


def test_receives_are_posted_first_and_sends_follow_the_op():
    """A message arrives while the op computes; forms go with the micro-batch."""
    ranks = Ranks("0F0 0F1\n1F0 1F1\n2F0 2F1")
    interpreter, log = ranks.interpreters[1], ranks.logs[1]
    transport = Recorder(log, "transport", send=7, drain=None)
    arrival = Recorder(log, "arrival", wait=value("F", 0, 1))
    transport.post = lambda *args: log.append(("post", *args)) or arrival
    interpreter.transport = transport
    received, sent = Message(Kind.F, 0, 1), Message(Kind.F, 1, 1)
    actions = [
        Transfer(Direction.RECV, received, 4),
        Op.parse("1F1"),
        Transfer(Direction.SEND, sent, 5),
    ]
    interpreter.run_actions(actions, RunContext(BatchesInFlight.alone(batch(2))))
    sends = [entry for entry in log if entry[0] == "transport.send"]
    assert log[0] == ("post", 4, received, "form 1")
    assert [entry[0] for entry in log] == ["post", "arrival.wait", "F", "transport.send"]
    assert (sends[0][1], sends[0][2], sends[0][4]) == (5, sent, "form 1")
    assert contents(sends[0][3]) == ("F", 1, 1, 0)
    assert interpreter.transfers.sent(sent)[:2] == (5, 7)


def test_a_batch_is_compared_while_its_message_is_on_the_way():
    """The checksum costs time, which the wait would take anyway; it is computed on request only.

    So is the part of the first forward that needs no input.
    """
    ranks = Ranks("0F0\n1F0")
    log = ranks.logs[1]
    message, op = ranks.programs[1]
    for pending in (None, object()):
        one = batch(1)
        one.pending_check = pending
        one.checksum = lambda: log.append(("checksum",))
        log.clear()
        arrival = Recorder(log, "arrival", wait=value("F", 0, 0))
        ranks.interpreters[1].transport = SimpleNamespace(
            post=lambda *args, arrival=arrival: arrival
        )
        ranks.interpreters[1].run_actions([message, op], RunContext(BatchesInFlight.alone(one)))
        names = [entry[0] for entry in log]
        assert names == (["checksum", "prepare"] if pending else []) + ["arrival.wait", "F"]


def test_gradients_of_replicas_are_watched_before_the_last_backward_and_summed_after_it():
    """Hooks of the last backward see complete gradients; the sum starts once values have left."""
    ranks = Ranks("0F0 0F1 0B0 0B1 0U1\n1F0 1F1 1B0 1B1 1U1")
    interpreter, log = ranks.interpreters[1], ranks.logs[1]
    interpreter.replicas = {1: replica_group(log, 1)}
    transport = interpreter.transport

    def send(*args):
        log.append(("send", args[1].micro_batch))
        return transport.__class__.send(transport, *args)

    interpreter.transport = SimpleNamespace(
        send=send, post=transport.post, drain=transport.drain, arrives_at_once=bool
    )
    ranks.play(batch(2))
    names = [entry[0] for entry in log if entry[0] not in ("F", "replicas 1.poll")]
    assert names == [
        "B",
        "send",
        "replicas 1.watch",
        "B",
        "send",
        "replicas 1.start",
        "replicas 1.all_reduce",
        "step",
        "replicas 1.send_updates",
        "replicas 1.receive_updates",
    ]
    assert ("replicas 1.all_reduce", ("updates", True)) in log


def test_sums_of_all_stages_go_on_before_every_op_once_its_input_has_come():
    """Their second round would else begin at the update, and run beside nothing."""
    ranks = Ranks("0F0 1F0 1B0 0B0 1U1 0U1")
    interpreter, log = ranks.interpreters[0], ranks.logs[0]
    interpreter.replicas = {stage: replica_group(log, stage) for stage in range(2)}
    ranks.play(batch(1))
    before_ops = []
    for index, entry in enumerate(log):
        if entry[0] in ("F", "B"):
            names = [earlier[0] for earlier in log[:index] if not earlier[0].endswith(".watch")]
            before_ops.append(names[-2:])
    assert before_ops == [["replicas 0.poll", "replicas 1.poll"]] * 4


def test_the_parts_of_an_update_have_an_order():
    """Shared layers complete gradients, these are checked, summed over replicas, and applied. Their
    weights are freed when all messages have left.
    """
    interpreter, program, log = interpreter_of("0F0 0B0 0U1")
    interpreter.transport = SimpleNamespace(drain=lambda: log.append(("drain",)))
    interpreter.parallel = {0: Recorder(log, "parallel", begin=None, reduce=None, end=None)}
    interpreter.replicas = {0: replica_group(log, 0)}
    interpreter.finite = Recorder(
        log, "finite", before_update=None, after_backward=None, after_loss=None
    )
    interpreter.play(program, batch(1))
    order = [entry[0] for entry in log]
    assert order == [
        "parallel.begin",
        "replicas 0.poll",
        "F",
        "replicas 0.poll",
        "replicas 0.watch",
        "B",
        "finite.after_backward",
        "replicas 0.start",
        "parallel.reduce",
        "finite.before_update",
        "replicas 0.all_reduce",
        "step",
        "replicas 0.send_updates",
        "replicas 0.receive_updates",
        "drain",
        "parallel.end",
    ]
    log.clear()
    interpreter.play(program, batch(1), update=False)
    order_without = [entry[0] for entry in log]
    assert order_without == [
        name for name in order if name != "step" and not name.endswith("_updates")
    ]
    assert ("replicas 0.all_reduce", ("updates", False)) in log


def test_a_loss_is_checked_before_it_leaves_and_only_where_there_is_one():
    """Backwards are checked when they have written gradients of weights: I has not."""
    interpreter, _, log = interpreter_of("0F0 0B0 0F1 0I1 0W1", loss="a loss")
    interpreter.finite = Recorder(
        log, "finite", before_update=None, after_backward=None, after_loss=None
    )
    left = []
    one = batch(2)
    context = RunContext(
        BatchesInFlight.alone(one),
        on_loss=lambda batch: left.append(batch) or log.append(("left",)),
    )
    actions = [Op.parse(text) for text in ("0F0", "0B0", "0F1", "0I1", "0W1")]
    interpreter.run_actions(actions, context)
    names = [entry[0] for entry in log]
    with_loss = ["F", "finite.after_loss", "left"]
    assert names == [
        *with_loss, "B", "finite.after_backward", *with_loss, "I", "W", "finite.after_backward",
    ]  # fmt: skip
    assert left == [one, one]
    log.clear()
    interpreter.stages[0].loss = None
    interpreter.run_actions([Op.parse("0F0")], context)
    assert [entry[0] for entry in log] == ["F"]
    interpreter.stages[0].loss, interpreter.finite = "a loss", None
    interpreter.run_actions([Op.parse("0F0")], RunContext(BatchesInFlight.alone(one)))


def test_a_weight_rule_is_told_of_every_op_of_its_own_stage_and_updates_in_place_of_the_stage():
    """Also of the number in the stream, not the one in the batch."""
    ranks = Ranks("0F0 1F0 1B0 0B0 0U1 1U1")
    interpreter, log = ranks.interpreters[0], ranks.logs[0]
    names = ("before_forward", "before_backward", "finished", "update")
    rule = Recorder(log, "rule", **dict.fromkeys(names))
    batches = BatchesInFlight(1)
    batches.add(3, batch(1, step=3))
    context = RunContext(batches, weights={1: rule})
    actions = [Op.parse(text) for text in ("0F3", "1F3", "1B3", "0B3", "1U4", "0U4")]
    probed = []
    interpreter.finite = SimpleNamespace(
        after_backward=lambda stage, batch, number: probed.append((stage.index, number)),
        before_update=lambda *args, **options: probed.append((args[0].index, options)),
    )
    interpreter.run_actions(actions, context)
    # Messages on gradients have the number in the batch.
    assert probed == [(1, 0), (0, 0), (1, {"streaming": True}), (0, {"streaming": True})]
    assert [entry[:3] for entry in log] == [
        ("F", 0, 0),
        ("rule.before_forward", 3),
        ("F", 1, 0),
        ("rule.before_backward", 3),
        ("B", 1, 0),
        ("rule.finished", 3),
        ("B", 0, 0),
        ("rule.update", 4),
        ("step", 0),
    ]


def test_evicted_activations_count_on_the_rank_that_holds_them():
    """From the eviction until they go back, and not on their owner."""
    ranks = Ranks("0F0 0E0 0L0 0B0\n0E0 0L0 1F0 1B0", ahead=0)
    interpreter = ranks.interpreters[1]
    batches = RunContext(BatchesInFlight.alone(batch(1)))
    sender = ranks.interpreters[0]
    evict = Message(Kind.E, 0, 0)
    sender.run_actions(
        [Op.parse("0F0"), Op.parse("0E0"), Transfer(Direction.SEND, evict, 1)], batches
    )
    interpreter.run_actions([Transfer(Direction.RECV, evict, 0), Op.parse("0E0")], batches)
    assert (interpreter.activation_meter.now, sender.activation_meter.now) == (32, 0)
    assert contents(interpreter._stored_activations[0, 0]) == ("E", 0, 0, 0)
    load = Message(Kind.L, 0, 0)
    interpreter.run_actions([Op.parse("0L0"), Transfer(Direction.SEND, load, 0)], batches)
    assert (interpreter.activation_meter.now, interpreter._stored_activations) == (0, {})
    assert interpreter.activation_meter.peak == 32
    sender.run_actions([Transfer(Direction.RECV, load, 1), Op.parse("0L0")], batches)
    assert ranks.logs[0][-1] == ("L", 0, 0, ("E", 0, 0, 0))


class Fails(Exception):
    """A failure of a layer."""


def ignore(*args):
    """Return 0 bytes."""
    return 0


def failing(error):
    """Return a method that raises."""

    def fail(*args, **options):
        raise error

    return fail


def test_a_failed_op_names_rank_stage_op_and_step_and_all_is_dropped():
    """The error that is shown has the failure as its cause."""
    ranks = Ranks("0F0 1F0 1B0 0B0")
    interpreter, log = ranks.interpreters[0], ranks.logs[0]
    interpreter.replicas = {1: replica_group(log, 1)}
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
    assert log[-3:] == [("forget", 0), ("forget", 1), ("replicas 1.forget",)]
    assert ranks.board.current[0][0] == "is at 1B0"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), NonFinite(0, 0, "0F0", 0, "NaN", 0)])
def test_some_errors_of_an_op_are_raised_as_they_are(error):
    """An interrupt is no failure of the stage, and a NonFinite names its place itself."""
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
    for links in ({"send": failing(refused), "post": ignore}, {"post": failing(refused)}):
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


def test_peak_memory_is_the_sum_of_all_that_a_rank_holds():
    """A tensor of two stages counts once, the newest of a rule's versions are the parameters."""
    ranks = Ranks("0F0 1F0 1B0 0B0")
    interpreter, log = ranks.interpreters[0], ranks.logs[0]
    tied, weight, other, buffer = (nn.Parameter(torch.zeros(size)) for size in (3, 5, 7, 11))
    optimizer = SimpleNamespace(state={weight: {"step": 1, "momentum_buffer": torch.ones(5)}})
    for index, tensors, trained, borrowed in (
        (0, [weight, tied, buffer], [weight, tied], []),
        (1, [other, tied], [other], [tied]),
    ):
        stage = interpreter.stages[index]
        stage.tensors = lambda tensors=tensors: tensors
        stage.update.parameters, stage.update.borrowed = trained, borrowed
    interpreter.stages[0].update.optimizer = optimizer
    interpreter.activation_meter.take(1000)
    interpreter.activation_meter.give(1000)
    weights, gradients, momentum = 4 * (3 + 5 + 7 + 11), 4 * (3 + 5 + 7), 4 * 5
    held = 1000 + weights + gradients + momentum
    assert interpreter.peak_bytes({}) == held
    interpreter.replicas = {0: replica_group(log, 0, 10_000), 1: replica_group(log, 1, 20_000)}
    interpreter.parallel = {1: SimpleNamespace(gathered_bytes=100_000)}
    assert interpreter.peak_bytes({}) == held + 130_000
    # Two versions of the stage's one parameter of 7 numbers.
    rule = SimpleNamespace(held_bytes=lambda: 2 * 28, more_optimizers=lambda: [optimizer])
    assert interpreter.peak_bytes({1: rule}) == held + 130_000 + 28 + momentum
    # A weight that the rank only uses has a gradient, too, which goes to the rank of its home.
    interpreter.replicas = interpreter.parallel = {}
    interpreter.stages[0].update.parameters = [weight]
    assert interpreter.peak_bytes({}) == held
    interpreter.stages[1].update.borrowed = []
    assert interpreter.peak_bytes({}) == held - 4 * 3


def test_programs_are_cached_by_identity_up_to_a_number():
    """Evaluation and small batches have others; a program that is thrown away must not be kept for
    ever.
    """
    interpreter, program, log = interpreter_of("0F0 0B0")
    programs = [list(program) for _ in range(_MAX_PROGRAMS + 2)]
    for copy in programs:
        interpreter.play(copy, batch(1))
        cached = interpreter._programs[id(copy)]
        assert cached[0] is copy
        interpreter.play(copy, batch(1))
        assert interpreter._programs[id(copy)] is cached
        assert len(interpreter._programs) <= _MAX_PROGRAMS
    assert len(log) == 2 * 2 * len(programs)


class CountingClock:
    """The clock of a device: its marks are numbers, and differ from the host's times."""

    def __init__(self):
        self.marks, self.begun = 0, 0

    def begin(self):
        """Count the batches."""
        self.begun += 1

    def mark(self):
        """Return the next number."""
        self.marks += 1
        return self.marks

    def seconds(self, mark):
        """Convert a mark."""
        return mark / 10


def test_ops_of_a_device_are_timed_by_its_own_clock():
    """The host runs ahead of it; every op has a mark before and one after it."""
    ranks = Ranks(ALONE)
    before = ranks.interpreters[0]
    clock = CountingClock()
    interpreter = Interpreter(
        0, before.stages, 1, before.transport, before.board, clock, {}, before.activation_meter
    )
    interpreter.play(ranks.programs[0], batch(2))
    assert clock.begun == 1
    assert list(interpreter.marks.values()) == [(n, n + 1) for n in range(1, 11, 2)]
    assert interpreter.seconds([Op.parse("0F1")]) == [(0.3, 0.4)]


def test_of_shared_layers_only_the_parts_of_this_process_count_as_memory():
    """Weights and gradients; the whole layers are on no process."""
    ranks = Ranks("0F0 0B0")
    interpreter = ranks.interpreters[0]
    stage = interpreter.stages[0]
    part = SimpleNamespace(elem=torch.zeros(3), nbytes=4 * 12)
    stage.tensors = lambda: [part]
    stage.update.parameters, stage.update.borrowed = [part], [part]
    assert interpreter.peak_bytes({}) == 4 * (3 + 3)


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


def test_layers_that_processes_share_end_only_after_a_whole_program():
    """A program that fails leaves what its collectives still read."""
    interpreter, program, log = interpreter_of("0F0 0B0")
    interpreter.parallel = {0: Recorder(log, "parallel", begin=None, reduce=None, end=None)}
    interpreter.stages[0].backward = failing(Fails("once"))
    with pytest.raises(StageFailed):
        interpreter.play(program, batch(1))
    names = [entry[0] for entry in log]
    assert names == ["parallel.begin", "F", "forget"]


def test_ops_of_a_stream_have_the_number_in_their_batch_and_rules_the_one_in_the_stream():
    """For values, losses, checks and messages: micro-batch 5 of batches of two is the second one."""
    ranks = Ranks("0F0 0I0 0W0 0U1", loss="a loss")
    interpreter, log = ranks.interpreters[0], ranks.logs[0]
    stage = interpreter.stages[0]
    batches = BatchesInFlight(2)
    one = batch(2, step=2)
    batches.add(2, one)
    checks = []
    interpreter.finite = SimpleNamespace(
        after_loss=lambda *args: checks.append(("loss", *args)),
        after_backward=lambda *args: checks.append(("gradients", *args)),
    )
    names = ("before_forward", "before_backward", "finished")
    rule = Recorder(log, "rule", **dict.fromkeys(names))
    ops = [Op.parse(text) for text in ("0F5", "0I5", "0W5")]
    interpreter.run_actions(ops, RunContext(batches, weights={0: rule}))
    assert checks == [("loss", stage, one, 1, ops[0]), ("gradients", stage, one, 1)]
    assert [entry[:3] for entry in log] == [
        ("rule.before_forward", 5),
        ("F", 0, 1),
        ("rule.before_backward", 5),
        ("I", 0, 1),
        ("rule.before_backward", 5),
        ("W", 0, 1),
        ("rule.finished", 5),
    ]


def test_the_status_of_a_rank_says_what_it_does_and_what_it_waits_for():
    """Messages of other ranks have it when they wait too long."""
    interpreter, program, log = interpreter_of("0F0 0B0 0U1")
    status = []

    def doing(text):
        status.append(text)
        return 0.0

    interpreter.board = SimpleNamespace(doing=doing)
    interpreter.replicas = {0: replica_group(log, 0)}
    interpreter.play(program, batch(1))
    assert status == [
        "is at 0F0",
        "is at 0B0",
        "is at 0U1",
        "waits for the other replicas at 0U1",
        "is between batches",
    ]


def test_an_interrupt_while_sends_leave_drops_what_is_held():
    """A notebook may go on with the next batch."""
    interpreter, program, log = interpreter_of("0F0 0B0")
    interpreter.transport = SimpleNamespace(drain=failing(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        interpreter.play(program, batch(1))
    assert log[-1] == ("forget", 0)


def test_a_part_of_a_stream_may_begin_with_the_sends_of_the_op_before_it():
    """And end with receives of the op after it."""
    ranks = Ranks("0F0 0F1\n1F0 1F1", ahead=0)
    batches = BatchesInFlight(2)
    batches.add(0, batch(2))
    context = RunContext(batches)
    message = Message(Kind.F, 0, 1)
    parts = [
        (0, [Op.parse("0F1")]),
        (0, [Transfer(Direction.SEND, message, 1), Op.parse("0F0")]),
        (1, [Transfer(Direction.RECV, message, 0)]),
        (1, [Op.parse("1F1")]),
    ]
    for rank, actions in parts:
        ranks.interpreters[rank].run_actions(actions, context)
    assert ranks.logs[1] == [("F", 1, 1, ("F", 0, 1, 0))]


def test_an_op_whose_input_is_not_received_does_not_run():
    """A program without the receive is wrong; the op would compute with nothing."""
    ranks = Ranks(PAIR)
    context = RunContext(BatchesInFlight.alone(batch(1)))
    with pytest.raises(AssertionError):
        ranks.interpreters[1].run_actions([Op.parse("1F0")], context)
    assert ranks.logs[1] == [("forget", 1)]
