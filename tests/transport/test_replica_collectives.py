"""Collective operations of replicas: a lost peer is told from a failure of this rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from penstock.transport.replica_collectives import ReplicaCollectives
from penstock.transport.transport import TransportLost

#: What gloo says when the process of another rank has ended.
CLOSED = "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"


@pytest.mark.parametrize(
    ("error", "closed", "kind"),
    [
        (RuntimeError(CLOSED), False, TransportLost),
        (RuntimeError("Invalid scalar type"), False, RuntimeError),
        (RuntimeError("Invalid scalar type"), True, TransportLost),
    ],
    ids=["peer", "this rank", "links closed meanwhile"],
)
def test_an_operation_that_cannot_start_says_whose_failure_it_is(monkeypatch, error, closed, kind):
    """Other ranks report a lost rank; the failure of an operation is reported by its own."""
    wire = SimpleNamespace(lost=False)
    collectives = ReplicaCollectives(wire, first=None, second=None, count=2)

    def fail(*args, **kwargs):
        wire.lost = closed
        raise error

    monkeypatch.setattr(dist, "all_reduce", fail)
    with pytest.raises(kind, match=r"peer|scalar type"):
        collectives.all_reduce(torch.ones(1))


def test_no_operation_starts_when_the_links_are_closed(monkeypatch):
    """The group may be gone."""
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: pytest.fail("started"))
    collectives = ReplicaCollectives(SimpleNamespace(lost=True), None, None, count=2)
    with pytest.raises(TransportLost, match="the run was stopped"):
        collectives.all_reduce(torch.ones(1))
