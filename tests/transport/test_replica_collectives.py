"""Collective operations of replicas: their groups, and a lost peer is told from a failure of this
rank.
"""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from penstock.transport import replica_collectives
from penstock.transport.replica_collectives import (
    ReplicaCollectives,
    all_on_host,
    make_replica_collectives,
)
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


def test_each_round_has_its_group_and_nothing_waits_at_its_start(monkeypatch):
    """Pieces are exchanged in the first round and gathered in the second; a sum takes either."""
    sums, exchanges, waited = [], [], []
    work = SimpleNamespace(is_completed=lambda: True)

    class Exchanges:
        """Stands for `Exchanger`."""

        def __init__(self, group, deadline_s):
            self.name = group, deadline_s

        def start(self, received, sent):
            """Note the pieces."""
            rows = [[piece.tolist() for piece in pieces] for pieces in (received, sent)]
            exchanges.append((self.name, *rows))
            return work

    monkeypatch.setattr(replica_collectives, "Exchanger", Exchanges)
    monkeypatch.setattr(
        dist, "all_reduce", lambda *args, **options: sums.append((*args, options)) or work
    )
    wire = SimpleNamespace(lost=False, wait=waited.append, deadline_s=5.0)
    collectives = ReplicaCollectives(wire, "first", "second", count=2)
    collectives.all_reduce("sum")
    collectives.all_reduce("sum", second=True)
    assert sums == [("sum", {"group": name, "async_op": True}) for name in ("first", "second")]
    received, sent = torch.zeros(4, dtype=torch.uint8), torch.arange(4, dtype=torch.uint8)
    collectives.all_to_all(received, sent)
    collectives.all_gather(received, sent[:2])
    assert exchanges == [
        (("first", 5.0), [[0, 0], [0, 0]], [[0, 1], [2, 3]]),
        (("second", 5.0), [[0, 0], [0, 0]], [[0, 1], [0, 1]]),
    ]
    assert collectives.is_completed(work) is True
    collectives.wait(work)
    assert waited == [work]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_all_ranks_create_all_groups_in_the_order_of_the_stages(monkeypatch, rank):
    """Of processes of the job; a rank holds those that it is part of, and closes them at the end."""
    created = []

    def new_group(processes, timeout, backend):
        created.append((processes, timeout, backend))
        return f"group {len(created)}"

    monkeypatch.setattr(dist, "new_group", new_group)
    wire = SimpleNamespace(rank=rank, ranks=[7, 8, 9], deadline_s=5.0, replica_groups=[])
    collectives = make_replica_collectives(wire, {3: [0, 2], 1: [1, 0]})
    limit = timedelta(seconds=5)
    assert created == [([8, 7], limit, "gloo")] * 2 + [([7, 9], limit, "gloo")] * 2
    groups = {1: ("group 1", "group 2"), 3: ("group 3", "group 4")}
    stages = {0: [1, 3], 1: [1], 2: [3]}[rank]
    assert {
        stage: (entry.first, entry.second, entry.count) for stage, entry in collectives.items()
    } == {stage: (*groups[stage], 2) for stage in stages}
    assert wire.replica_groups == [group for stage in stages for group in groups[stage]]


@pytest.mark.parametrize(
    ("devices", "on_host"),
    [(["cpu", "cpu"], True), (["cpu", "cuda"], False), (["cuda"] * 2, False)],
)
def test_one_rank_with_a_device_is_enough_for_another_way(devices, on_host):
    """All must choose alike: every rank knows the device of every other."""
    store = dist.HashStore()
    answers = []
    for rank, device in enumerate(devices):
        store.set(f"device-type/{rank}", device)
    for rank, device in enumerate(devices):
        store.delete_key(f"device-type/{rank}")
        answers.append(all_on_host(store, rank, len(devices), SimpleNamespace(type=device)))
    assert answers == [on_host] * len(devices)
