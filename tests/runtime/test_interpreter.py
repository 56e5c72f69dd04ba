"""The interpreter of programs: in a pipeline, and op by op with stages that only record what they are
asked for.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
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
    contents,
    failing,
    interpreter_of,
    replica_group,
    value,
)
from torch import nn

import penstock as ps
from penstock.batches.in_flight import BatchesInFlight
from penstock.errors import StageFailed
from penstock.runtime.interpreter import _MAX_PROGRAMS, Interpreter, RunContext
from penstock.schedule.lower import Direction, Message, Transfer
from penstock.schedule.op import Kind, Op
from penstock.transport.in_process import MemoryTransport


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
    interpreter.run_actions(actions, RunContext(BatchesInFlight.alone(batch(3))))
    sends = [entry for entry in log if entry[0] == "transport.send"]
    assert log[0] == ("post", 4, received, "form 1")
    assert [entry[0] for entry in log] == ["post", "arrival.wait", "F", "transport.send"]
    assert (sends[0][1], sends[0][2], sends[0][4]) == (5, sent, "form 1")
    assert contents(sends[0][3]) == ("F", 1, 1, 0)
    assert interpreter.transfers.sent(sent)[:2] == (5, 7)


def test_a_batch_is_compared_while_its_message_is_on_the_way():
    """The checksum costs time, which the wait would take anyway; it is computed on request only.

    So is the part of the first forward that needs no input, of the stage that has received it.
    """
    ranks = Ranks("1F0\n0F0 2F0")
    log = ranks.logs[1]
    message, op = Transfer(Direction.RECV, Message(Kind.F, 1, 0), 0), Op.parse("2F0")
    for pending in (None, object()):
        one = batch(1)
        one.pending_check = pending
        one.checksum = lambda: log.append(("checksum",))
        log.clear()
        arrival = Recorder(log, "arrival", wait=value("F", 1, 0))
        ranks.interpreters[1].transport = SimpleNamespace(
            post=lambda *args, arrival=arrival: arrival
        )
        ranks.interpreters[1].run_actions([message, op], RunContext(BatchesInFlight.alone(one)))
        names = [entry[0] for entry in log]
        assert names == (["checksum", "prepare"] if pending else []) + ["arrival.wait", "F"]
        assert (("prepare", 2, 0) in log) == (pending is not None)


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
    # Also where the weights are updated after the program, see `GlobalStep`.
    interpreter.run_actions([Op.parse("0F0")], replace(context, updates=False))
    assert [entry[0] for entry in log] == with_loss
    log.clear()
    interpreter.stages[0].loss = None
    interpreter.run_actions([Op.parse("0F0")], context)
    assert [entry[0] for entry in log] == ["F"]
    interpreter.stages[0].loss, interpreter.finite = "a loss", None
    interpreter.run_actions([Op.parse("0F0")], RunContext(BatchesInFlight.alone(one)))


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


def test_layers_that_processes_share_end_only_after_a_whole_program():
    """Those of all stages. A program that fails leaves what its collectives still read."""
    interpreter, program, log = interpreter_of("0F0 1F0 1B0 0B0")
    interpreter.parallel = {
        stage: Recorder(log, f"parallel {stage}", begin=None, end=None) for stage in range(2)
    }
    begins = ["parallel 0.begin", "parallel 1.begin"]
    interpreter.play(program, batch(1))
    ends = ["parallel 0.end", "parallel 1.end"]
    assert [entry[0] for entry in log] == [*begins, "F", "F", "B", "B", *ends]
    log.clear()
    interpreter.stages[1].backward = failing(Fails("once"))
    with pytest.raises(StageFailed):
        interpreter.play(program, batch(1))
    assert [entry[0] for entry in log] == [*begins, "F", "F", "forget", "forget"]


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
