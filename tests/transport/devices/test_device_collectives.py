"""Collectives of all ranks over a communicator that notes what is asked of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from penstock.errors import RunError
from penstock.transport.devices import device_collectives
from penstock.transport.devices.device_collectives import DeviceCollectives
from penstock.transport.transport import TransportLost
from penstock.transport.wire import DeviceTransfer


@pytest.fixture
def wire():
    """The links of rank 1 of a pipeline whose processes are ranks 4, 6 and 5 of the job."""
    wire = SimpleNamespace(
        everyone="everyone", ranks=(4, 6, 5), device=torch.device("meta"), rank=1, lost=False
    )
    wire.waited = []
    wire.wait = wire.waited.append
    return wire


@pytest.fixture
def calls(monkeypatch):
    """What torch.distributed is asked, and what it answers or raises."""
    calls = SimpleNamespace(notes=[], answer="work")

    def answer(*given, **more):
        calls.notes.append((*given, more))
        if isinstance(calls.answer, Exception):
            raise calls.answer
        return calls.answer

    monkeypatch.setattr(device_collectives.dist, "broadcast", answer)
    monkeypatch.setattr(device_collectives.dist, "all_reduce", answer)
    return calls


def test_a_broadcast_is_from_the_process_of_its_source_in_the_job(wire, calls):
    """And begins without a wait."""
    everyone = DeviceCollectives(wire)
    assert everyone.device is wire.device
    tensor = torch.zeros(2)
    transfer = everyone.broadcast(tensor, 2)
    assert transfer == DeviceTransfer("work", "the broadcast of rank 2")
    assert everyone.sum(tensor) == DeviceTransfer("work", "the sum over all ranks")
    more = {"group": "everyone", "async_op": True}
    assert calls.notes == [(tensor, 5, more), (tensor, more)]
    assert wire.waited == []
    everyone.wait(transfer)
    assert wire.waited == [transfer]


def test_an_operation_without_work_is_not_waited_for(wire, calls):
    """torch returns none to a process outside of the group."""
    calls.answer = None
    everyone = DeviceCollectives(wire)
    assert everyone.sum(torch.zeros(1)) is None
    everyone.wait(None)
    assert wire.waited == []


def test_a_closed_communicator_is_a_lost_link_and_other_errors_are_this_ranks_own(wire, calls):
    """Their message names rank and operation."""
    everyone = DeviceCollectives(wire)
    calls.answer = RuntimeError("no such dtype")
    with pytest.raises(RunError) as raised:
        everyone.broadcast(torch.zeros(1), 0)
    assert str(raised.value) == (
        "rank 1: the broadcast of rank 0 failed: RuntimeError: no such dtype"
    )
    assert raised.value.__cause__ is calls.answer
    wire.lost = True
    with pytest.raises(TransportLost, match="no such dtype"):
        everyone.sum(torch.zeros(1))
    wire.lost = False
    calls.answer = dist.DistBackendError("aborted")
    with pytest.raises(TransportLost, match="aborted"):
        everyone.sum(torch.zeros(1))
