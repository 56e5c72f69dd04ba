"""The messages of measured timelines."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.event import Event, MeasuredMemory
from penstock.idle import idle_intervals, idle_seconds, link_traffic
from penstock.ranks.clock import HostClock
from penstock.runtime import measured_timeline as module
from penstock.runtime.measured_timeline import _NO_PEER, _events, _OpRow, measured_timeline
from penstock.runtime.transfer_record import TransferRecord
from penstock.schedule.lower import Message
from penstock.schedule.op import Kind, Op

WIDTH, ROWS = 32, 4

GIGABYTE = 10**9


def train(schedule, stages, batches, **options):
    """Train a chain of equal layers; return the measured timeline."""
    torch.manual_seed(0)
    model = [nn.Linear(WIDTH, WIDTH) for _ in range(stages)]
    pipe = ps.Pipeline(
        model,
        loss=nn.functional.mse_loss,
        balance=[1] * stages,
        schedule=schedule,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        deadline_s=60,
        **options,
    )
    x = torch.randn(4 * ROWS, WIDTH)
    assert len([*pipe.train([(x, x)] * batches)]) == batches
    return pipe.timeline()


def transfers_of(timeline):
    """Return what is sent: op, sender and receiver."""
    return sorted(
        (str(event.op), event.rank, event.to_rank)
        for event in timeline.events
        if event.to_rank is not None
    )


def check(timeline, expected):
    """Compare the transfers of a timeline with those of a simulation; return their total size."""
    assert transfers_of(timeline) == transfers_of(expected)
    ends = {(event.rank, event.op): event.end for event in timeline.compute}
    for event in timeline.events:
        if event.to_rank is not None:
            assert event.bytes >= ROWS * WIDTH * 4
            assert event.start == ends[event.rank, event.op] <= event.end
    for busy, row in zip(timeline.busy, idle_seconds(timeline), strict=True):
        idle = row.neighbour + row.link + row.rest
        assert busy + idle == pytest.approx(timeline.makespan)
    for interval in idle_intervals(timeline):
        if interval.transfer is not None:
            assert interval.transfer.to_rank == interval.rank
    total = sum(link.bytes for link in link_traffic(timeline))
    assert total == sum(event.bytes for event in timeline.events)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "bpipe", "zb-v"])
def test_the_messages_of_a_step_are_those_of_the_simulation(schedule):
    """Activations, gradients, and activations that a partner stores, with their bytes. What a rank
    gives to its own next stage is no message.
    """
    stages = 4
    programs = ps.schedule(schedule, stages, 4)
    timeline = train(programs, stages, 2, executor="threads")
    check(timeline, ps.simulate(programs, ps.Costs()))


def test_interleaved_stages_send_to_a_rank_that_has_sent_to_them():
    """A message is the op of its stage, not of its rank."""
    programs = ps.schedule("interleaved", 4, 4, chunks=2)
    timeline = train(programs, 4, 1, executor="threads")
    check(timeline, ps.simulate(programs, ps.Costs()))


def test_messages_of_a_stream_are_numbered_as_its_ops():
    """The timeline of an asynchronous schedule starts at micro-batch 0, whatever has run before."""
    programs = ps.schedule("pipedream-2bw", 3, 4)
    timeline = train(programs, 3, 12, executor="threads")
    ops = {(event.rank, str(event.op)) for event in timeline.compute}
    sent = transfers_of(timeline)
    assert len(sent) == len(set(sent)) > 0
    for op, rank, to_rank in sent:
        assert (rank, op) in ops
        assert (to_rank, f"{to_rank}{op[1:]}") in ops
    forwards = sum(event.op.kind is Kind.F and event.rank < 2 for event in timeline.compute)
    assert sum(op[1] == "F" for op, _, _ in sent) == forwards


def test_an_event_of_an_op_has_no_wait_unless_it_was_measured():
    """A wait of 0 s would say that the message was there."""
    assert Event(0, (Kind.F, 0, 0), 0.0, 1.0).wait_s is None


def test_a_record_keeps_the_last_messages():
    """The memory of a stream does not grow."""
    record = TransferRecord(HostClock(), arrives_at_once=bool)
    messages = [Message(Kind.F, 0, number) for number in range(5)]
    for message in messages:
        record.begin_wait(message, 0.0)
        record.end_send(message, 1, 10)
    record.keep(2)
    assert [record.wait_start(message) is not None for message in messages] == [False] * 3 + [
        True
    ] * 2
    assert [record.sent(message) is not None for message in messages] == [False] * 3 + [True] * 2
    record.clear()
    assert record.sent(messages[-1]) is None
    assert record.wait_start(None) is record.sent(None) is None


def test_a_message_neither_ends_before_it_begins_nor_after_it_was_taken():
    """Clocks of hosts agree only to an error; where the sender does not know of the arrival, it is
    when the receiver begins.
    """
    schedule = ps.Schedule.parse("0F0 0B0 0U1\n1F0 1B0 1U1")
    forward, backward = Op(Kind.F, 0, 0), Op(Kind.F, 1, 0)
    for arrived, start, wait_start, end, wait in (
        (5.0, 7.0, 4.0, 5.0, 3.0),
        (9.0, 7.0, 7.5, 7.0, 0.0),
        (math.nan, 7.0, math.nan, 7.0, None),
        (1.0, 7.0, 7.0, 3.0, 0.0),
        (math.nan, 2.0, 1.5, 3.0, 0.5),
    ):
        sent = _OpRow(0.0, 3.0, math.nan, arrived, 1.0, 64.0)
        taken = _OpRow(start, 8.0, wait_start, math.nan, _NO_PEER, 0.0)
        events = list(_events({0: [(forward, sent)], 1: [(backward, taken)]}, schedule.stages))
        message = Event(0, forward, 3.0, end, 64, 1)
        assert events == [
            Event(0, forward, 0.0, 3.0),
            message,
            Event(1, backward, start, 8.0, wait_s=wait),
        ]
    # A message whose receiver has not begun is not shown.
    assert list(_events({0: [(forward, sent)], 1: []}, 2)) == [Event(0, forward, 0.0, 3.0)]


class Rank:
    """A rank whose ops, messages and memory are given: an op lasts from its place to 0.5 later."""

    def __init__(self, rank, ops, stages):
        self.rank, self.stage_count = rank, stages
        self.times = {op: (10.0 * rank + place, 10.0 * rank + place + 0.5) for place, op in ops}
        self.waits, self.sends = {}, {}
        self.transfers = SimpleNamespace(wait_start=self.waits.get, sent=self.sends.get)

    def seconds(self, ops):
        """Return the times of some ops."""
        return [self.times[op] for op in ops]

    def peak_bytes(self, weights):
        """Return a number of bytes that differs by rank, and counts the rules."""
        return GIGABYTE * (self.rank + 1) + 1 + len(weights)


def two_processes(monkeypatch, local_rank):
    """Return the timeline on the process of one of two ranks, and what it sends.

    The clock of rank 1 is 100 s ahead. Ops were run as those of the third micro-batch.
    """
    run_ops = {0: ["0F2", "0B2"], 1: ["1F2", "1B2", "1U3"]}
    rows = {
        rank: [(Op.parse(f"{text[:2]}{int(text[2]) - 2}"), Op.parse(text)) for text in texts]
        for rank, texts in run_ops.items()
    }
    monkeypatch.setattr(module, "device_peaks", lambda device: (device + 70, device + 80))
    ahead_s = [0.0, 100.0]

    def table(rank):
        """Return what a rank contributes."""
        interpreter = Rank(rank, list(enumerate(op for _, op in rows[rank])), 2)
        if rank == 0:
            interpreter.sends[Message(Kind.F, 0, 2)] = SimpleNamespace(
                peer=1, bytes=64, arrived_s=None
            )
            interpreter.times[rows[0][1][1]] = 4.0, 4.5
        else:
            interpreter.times = {
                op: (start + 91.0, end + 91.0) for op, (start, end) in interpreter.times.items()
            }
            interpreter.waits[Message(Kind.F, 0, 2)] = 100.25
            interpreter.sends[Message(Kind.B, 1, 2)] = SimpleNamespace(
                peer=0, bytes=32, arrived_s=102.75
            )
        gathered = {}
        world = SimpleNamespace(
            size=2,
            to_first_clock=lambda: lambda seconds: seconds - ahead_s[rank],
            buffer_bytes=lambda rank: 500 + rank,
            device=lambda rank: rank,
            gather=lambda local, forms: gathered.update(local) or {},
            broadcast=lambda value, source, form: torch.zeros(form.shape, dtype=torch.float64),
        )
        schedule = SimpleNamespace(stages=2, name="mine")
        measured_timeline(world, schedule, {rank: interpreter}, rows, {1: {0: "rule", 1: "rule"}})
        return gathered[rank], world, interpreter, schedule

    tables = {rank: table(rank) for rank in range(2)}
    whole = {rank: tables[rank][0] for rank in range(2)}
    joined = torch.cat([whole[0][0], whole[1][0]])
    _, world, interpreter, schedule = tables[local_rank]

    def gather(local, forms):
        ((rank, (row,)),) = local.items()
        assert (rank, row.dtype) == (local_rank, torch.float64)
        for rank, (form,) in forms.items():
            assert (form.shape, form.dtype) == (tuple(whole[rank][0].shape), "float64")
        return {} if local_rank else whole

    def broadcast(value, source, form):
        assert (source, form.shape, form.dtype) == (0, (7, 6), "float64")
        if local_rank:
            assert value is None
        else:
            torch.testing.assert_close(value, joined, equal_nan=True)
        return joined

    world.gather, world.broadcast = gather, broadcast
    return measured_timeline(
        world, schedule, {local_rank: interpreter}, rows, {1: {0: "rule", 1: "rule"}}
    )


@pytest.mark.parametrize("local_rank", [0, 1])
def test_all_processes_have_the_times_of_all_ranks_on_the_clock_of_rank_0(monkeypatch, local_rank):
    """Ops, waits and arrivals, with the bytes of messages and the memory of every rank."""
    timeline = two_processes(monkeypatch, local_rank)
    assert (timeline.ranks, timeline.stages, timeline.source) == (2, 2, "measured")
    assert timeline.title == "mine"
    assert timeline.peak_memory == (GIGABYTE + 1, 2 * GIGABYTE + 3)
    assert timeline.measured_memory == (MeasuredMemory(500, 70, 80), MeasuredMemory(501, 71, 81))
    assert sorted(timeline.events, key=lambda event: (event.rank, event.start, event.end)) == [
        Event(0, Op.parse("0F0"), 0.0, 0.5),
        Event(0, Op.parse("0F0"), 0.5, 1.0, 64, 1),
        Event(0, Op.parse("0B0"), 4.0, 4.5),
        Event(1, Op.parse("1F0"), 1.0, 1.5, wait_s=0.75),
        Event(1, Op.parse("1B0"), 2.0, 2.5),
        Event(1, Op.parse("1B0"), 2.5, 2.75, 32, 0),
        Event(1, Op.parse("1U1"), 3.0, 3.5),
    ]
