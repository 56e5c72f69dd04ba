"""What the world of a process is made of: its links, board and groups, in which order."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from penstock.ranks import process_world as module
from penstock.ranks.process_world import DistributedWorld
from penstock.schedule.lower import Link
from penstock.transport.communicators import communicator_keys

LINKS, COPIES = [Link(0, 1), Link(1, 0)], [Link(1, 2)]
REPLICAS = {0: (0, 1), 2: (1, 2)}


@pytest.fixture
def build(monkeypatch):
    """Build the world of rank 1 of 3, whose parts note what they are made of."""
    log = []

    def note(name, result=None):
        def call(*given, **more):
            log.append((name, given, more))
            return result

        return call

    def build(*, transport="host memory", device="cpu", whole_job=True, on_host=True, near=()):
        log.clear()

        def communicators(keys, device):
            log.append(("keys", keys))
            return {keys[0]: "group"}, SimpleNamespace()

        group = SimpleNamespace(
            size=3,
            rank=1,
            shared="shared",
            ranks=(4, 6, 5),
            has_whole_job=whole_job,
            store=lambda prefix: f"store {prefix.rpartition('/')[0]}",
            device=lambda wanted: SimpleNamespace(device=device, transport=transport),
            communicators=communicators,
        )

        class Near:
            """Links through shared memory."""

            def __init__(self, *given):
                log.append(("near", given, {}))

            connect = staticmethod(note("connect"))
            connects = staticmethod(lambda ranks: set(ranks) <= set(near))

        clocks = SimpleNamespace(measure=note("measure"))
        monkeypatch.setattr(module, "SameHostTransport", Near)
        monkeypatch.setattr(module, "route", note("route", "transport"))
        monkeypatch.setattr(module, "all_on_host", note("all_on_host", on_host))
        monkeypatch.setattr(
            module, "make_replica_collectives", note("collectives", {0: "collectives"})
        )
        monkeypatch.setattr(module, "StoreBoard", note("board", "board"))
        monkeypatch.setattr(module, "ComparedCalls", note("calls", "calls"))
        monkeypatch.setattr(module, "ClockOffsets", note("clocks", clocks))
        monkeypatch.setattr(module.atexit, "register", note("atexit"))
        world = DistributedWorld(None, 7.0, LINKS, COPIES, REPLICAS, group)
        return world, {name: (given, more) for name, given, *more in log}

    return SimpleNamespace(world=build, log=log)


def test_a_world_on_the_cpu_has_no_communicators(build):
    """Its messages go through host memory; clocks are measured last, when all links are there."""
    world, parts = build.world()
    assert (world.size, world.local_ranks, world.device(1)) == (3, (1,), torch.device("cpu"))
    assert (world.receives_on_device, world.collectives) == (False, None)
    assert "keys" not in parts
    assert parts["near"][0] == (1, 7.0, torch.device("cpu"))
    assert parts["connect"] == (("store penstock", 3), [{"willing": True}])
    _, far, others = parts["route"][0]
    assert others == 2
    assert far.wire is world._wire
    assert (world._wire.rank, world._wire.ranks, world._wire.shared) == (1, (4, 6, 5), "shared")
    assert (world._wire.deadline_s, world._wire.everyone) == (7.0, None)
    store, rank, size, on_failure, late = parts["board"][0]
    assert (store, rank, size, on_failure, late) == ("store penstock", 1, 3, world._stop, None)
    assert parts["calls"][0] == ("store penstock", "board", 1, 3, 7.0)
    assert parts["clocks"][0] == (1, (4, 6, 5), "shared", world._wait)
    assert parts["atexit"][0] == (world.close,)
    assert build.log[-1][0] == "measure"
    assert world.transport(1) == "transport"


def test_ranks_with_a_card_each_have_communicators_and_watch_their_device(build):
    """Shared memory is not used then."""
    world, parts = build.world(transport="nccl", device="meta", on_host=False)
    assert parts["keys"][0] == communicator_keys(LINKS, COPIES)
    assert world.receives_on_device
    assert world.collectives is not None
    assert world._wire.groups == {communicator_keys(LINKS, COPIES)[0]: "group"}
    assert parts["connect"][1] == [{"willing": False}]
    assert parts["board"][0][4] == world._late
    assert not world.has_replica_collectives


@pytest.mark.parametrize(
    ("whole_job", "on_host", "near", "remote"),
    [
        (True, True, (), {0: (0, 1), 2: (1, 2)}),
        (True, True, (0, 1), {2: (1, 2)}),
        (True, True, (0, 1, 2), {}),
        (False, True, (), None),
        (True, False, (), None),
    ],
)
def test_only_replicas_on_several_hosts_have_groups(build, whole_job, on_host, near, remote):
    """Of one of several pipelines none has, since torch makes groups in all processes of a job."""
    world, parts = build.world(whole_job=whole_job, on_host=on_host, near=near)
    assert world.has_replica_collectives is bool(remote)
    if remote is None:
        assert "collectives" not in parts
        assert world.replica_collectives(0) is None
        return
    assert parts["collectives"][0] == (world._wire, remote)
    assert world.replica_collectives(0) == "collectives"


def test_worlds_have_stores_of_their_own_and_the_whole_job_by_default(build, monkeypatch):
    """A second pipeline must not read what the first one has written."""
    prefixes = []
    groups = []

    def whole_job(deadline_s):
        groups.append(deadline_s)
        raise ValueError

    monkeypatch.setattr(module.RankGroup, "whole_job", whole_job)
    with pytest.raises(ValueError):  # noqa: PT011
        DistributedWorld(None, 7.0, LINKS)
    assert groups == [7.0]
    group = SimpleNamespace(size=1, rank=0, shared="s")

    def store(prefix):
        prefixes.append(prefix)
        raise KeyError

    group.store = store
    for _ in range(2):
        with pytest.raises(KeyError):
            DistributedWorld(None, 7.0, LINKS, group=group)
    first, second = (int(prefix.removeprefix("penstock/")) for prefix in prefixes)
    assert second == first + 1
