"""Bytes of sends that torch has nothing to do for, and of those that fail."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from penstock.errors import RunError
from penstock.schedule.lower import Message
from penstock.schedule.op import Kind
from penstock.transport.distributed import DistributedTransport
from penstock.transport.payload import Payload
from penstock.transport.wire import Wire

MESSAGE = Message(Kind.F, 0, 0)


def transport():
    """The transport of rank 0 of 2, of which no message leaves."""
    return DistributedTransport(
        Wire(0, torch.device("cpu"), dist.HashStore(), 5.0, "shared", [0, 1])
    )


def test_a_send_without_work_holds_no_memory(monkeypatch):
    """torch returns none to a process outside of the group; nothing would give the bytes back."""
    monkeypatch.setattr(dist, "isend", lambda *_, **__: None)
    sender = transport()
    assert sender.send(1, MESSAGE, Payload.of(torch.ones(3)), "s") == 12
    sender.drain()
    assert (sender.wire.buffers.now, sender.wire.buffers.peak) == (0, 0)


def test_a_send_that_cannot_begin_holds_no_memory(monkeypatch):
    """The run may go on without it."""

    def fail(*_, **__):
        raise RuntimeError("bad dtype")

    monkeypatch.setattr(dist, "isend", fail)
    sender = transport()
    with pytest.raises(RunError, match="could not be sent to rank 1"):
        sender.send(1, MESSAGE, Payload.of(torch.ones(3)), "s")
    assert sender.wire.buffers.now == 0
