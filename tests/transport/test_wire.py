"""The links of a rank: what waits raise, which transfer is overdue, and how links are closed."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from penstock.errors import RunError
from penstock.schedule.lower import Link, Message
from penstock.schedule.op import Kind
from penstock.transport import wire as wire_module
from penstock.transport.transport import TransportLost, TransportTimeout
from penstock.transport.wire import DeviceTransfer, Wire, is_lost

#: What gloo says when the process of another rank has ended.
CLOSED = "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"


class Time:
    """Stands for the module `time`: its clocks are set by hand, and a pause advances them."""

    def __init__(self, monkeypatch):
        self.now, self.pauses = 100.0, []
        monkeypatch.setattr(wire_module, "time", self)

    def monotonic(self):
        """Return the time."""
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds):
        """Advance the clock."""
        self.pauses.append(seconds)
        self.now += seconds


def make_wire(device="cpu", deadline_s=10.0, **fields):
    """Return the links of rank 1 of 3, whose processes are 4, 5 and 6 of the job."""
    fields = {"shared": "shared", "ranks": [4, 5, 6], **fields}
    return Wire(1, torch.device(device), HashStore(), deadline_s, **fields)


def transfer(text, completed=False):
    """Return a transfer of a device that records its waits, and may be set to be completed."""
    waits = []
    work = SimpleNamespace(done=completed, waits=waits)
    work.wait = lambda *args: waits.append(args)
    work.is_completed = lambda: work.done
    return DeviceTransfer(work, text)


def failing_work(clock, seconds, text):
    """Return an operation whose wait fails after some seconds."""

    def wait(limit):
        clock.now += seconds
        raise RuntimeError(text)

    return SimpleNamespace(wait=wait)


def test_messages_of_updates_have_communicators_of_their_own():
    """Their receives are in no order with the others; other links go through host memory."""
    link = Link(1, 2)
    wire = make_wire("meta", groups={(link, False): "program", (link, True): "update"})
    groups = {
        kind: wire.communicator(link, Message(kind, 0, 0)) for kind in (Kind.F, Kind.B, Kind.U)
    }
    assert groups == {Kind.F: "program", Kind.B: "program", Kind.U: "update"}
    assert wire.communicator(Link(2, 1), Message(Kind.F, 0, 0)) is None
    assert wire.copies_to_host
    assert not make_wire("cpu").copies_to_host


def test_a_host_waits_up_to_the_deadline_and_a_device_without_a_limit():
    """With a limit, torch would block the host until the transfer is over."""
    wire = make_wire(deadline_s=7.5)
    limits = []
    wire.wait(SimpleNamespace(wait=limits.append))
    assert limits == [timedelta(seconds=7.5)]
    of_device = transfer("0F1")
    wire.wait(of_device)
    assert of_device.work.waits == [()]


@pytest.mark.parametrize(
    ("seconds", "text", "lost", "kind"),
    [
        (10.0, "timed out", False, TransportTimeout),
        (9.5, "timed out", False, TransportTimeout),
        (10.0, CLOSED, False, TransportTimeout),
        (10.0, "timed out", True, TransportLost),
        (9.4, CLOSED, False, TransportLost),
        (9.4, "bad dtype", True, TransportLost),
        (9.4, "bad dtype", False, RuntimeError),
    ],
)
def test_a_wait_that_fails_says_whose_failure_it_is(monkeypatch, seconds, text, lost, kind):
    """Late, of another rank, or of this one; a run that was stopped is no timeout."""
    wire = make_wire(lost=lost)
    with pytest.raises(kind, match=r"timed out|Connection closed|bad dtype") as e:
        wire.wait(failing_work(Time(monkeypatch), seconds, text))
    assert type(e.value) is kind


def test_the_oldest_transfer_is_overdue_once_none_has_ended_for_the_deadline(monkeypatch):
    """The clock starts with the first that is awaited, and anew with each that ends."""
    clock, wire = Time(monkeypatch), make_wire(deadline_s=10.0)
    clock.now = 1000.0
    assert wire.late() is None
    first, second, third = transfer("first"), transfer("second"), transfer("third")
    wire.wait(first)
    clock.now = 1004.0
    wire.wait(second)  # does not restart the clock
    clock.now = 1009.5
    assert wire.late() is None
    clock.now = 1010.0
    assert wire.late() == "first"
    first.work.done = True
    assert wire.late() is None, "its end restarts the clock"
    clock.now = 1019.5
    assert wire.late() is None
    clock.now = 1020.0
    assert wire.late() == "second"
    second.work.done = True
    wire.wait(third)
    clock.now = 1029.5
    assert wire.late() is None
    clock.now = 1030.0
    assert wire.late() == "third"
    third.work.done = True
    assert wire.late() is None
    assert not wire._awaited


def test_transfers_that_are_over_are_not_held():
    """Each holds the tensors of its message."""
    wire = make_wire()
    for _ in range(10):
        wire.wait(transfer("done", completed=True))
    assert not wire._awaited
    pending = transfer("pending")
    wire.wait(pending)
    wire.wait(transfer("done", completed=True))
    assert len(wire._awaited) == 2, "only the oldest are looked at"


def test_the_store_is_asked_until_it_has_the_header(monkeypatch):
    """At growing intervals of at most 20 ms: pauses of a fixed length cost either time or work."""
    clock, wire = Time(monkeypatch), make_wire()

    def sleep(seconds):
        Time.sleep(clock, seconds)
        if len(clock.pauses) == 9:
            wire.store.set("name", "a header")

    clock.sleep = sleep
    assert wire.fetch("name") == "a header"
    assert clock.pauses == [0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.02, 0.02, 0.02]
    assert wire.fetch("name") == "a header"
    assert len(clock.pauses) == 9


def test_a_header_that_does_not_come_ends_at_the_deadline(monkeypatch):
    """Neither earlier nor much later; a stopped run ends at once."""
    clock, wire = Time(monkeypatch), make_wire(deadline_s=1.0)
    with pytest.raises(TransportTimeout, match=r"^name is not in the store$"):
        wire.fetch("name")
    assert 101.0 <= clock.now < 101.03
    wire.lost = True
    with pytest.raises(TransportLost, match="the run was stopped"):
        wire.fetch("name")
    wire.store = SimpleNamespace(check=lambda names: _raise(RuntimeError("Broken pipe")))
    with pytest.raises(TransportLost, match="Broken pipe"):
        wire.fetch("name")


def _raise(error):
    raise error


def test_all_links_are_closed_once(monkeypatch):
    """Those of the device, the one of all ranks, the shared one and those of replicas."""
    calls = []
    monkeypatch.setattr(
        wire_module, "abort_communicators", lambda groups: calls.append(list(groups))
    )
    monkeypatch.setattr(
        wire_module, "close_gloo_group", lambda group, rank: calls.append((group, rank))
    )
    groups = {(Link(0, 1), False): "a", (Link(1, 2), True): "b"}
    wire = make_wire(groups=groups, everyone="all", replica_groups=["first", "second"])
    wire.abort()
    assert wire.lost
    assert calls == [["a", "b", "all"], ("shared", 5), ("first", 5), ("second", 5)]
    wire.abort()
    assert len(calls) == 4
    alone = make_wire()
    alone.abort()
    assert calls[4:] == [[], ("shared", 5)]


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError(CLOSED), True),
        (RuntimeError("Connection reset by peer"), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (dist.DistBackendError("NCCL"), True),
        (dist.DistNetworkError("socket"), True),
        (RuntimeError("Invalid scalar type"), False),
        (RuntimeError("[gloo/transport/tcp/pair.cc:1] writev: Bad address"), False),
        (RunError("a failure of this rank"), False),
    ],
)
def test_lost_links_are_told_from_failures_of_this_rank(error, lost):
    """gloo has no exception class for them."""
    assert is_lost(error) is lost
