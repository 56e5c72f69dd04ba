"""Where ranks run: threads or processes, their links, and refusals."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from penstock.errors import PlanError, RunError, SettingError
from penstock.option import MAX_DEADLINE_S
from penstock.ranks import make_world
from penstock.ranks.make_world import Place, in_threads, world_of
from penstock.ranks.settings.run_config import RunConfig
from penstock.schedule.catalogue import schedule
from penstock.schedule.lower import Link
from penstock.schedule.replicas import pipelines
from penstock.weights.catalogue import weight_rule


def config(case_schedule, **facts):
    """A configuration of a schedule."""
    return RunConfig(
        (1,) * case_schedule.stages, case_schedule, "never", weight_rule("flush"), **facts
    )


def test_a_place_has_the_device_of_the_caller_or_none(monkeypatch):
    """Also where it is a text."""
    place = Place.of("threads", "cpu", 3.0, None)
    assert place == Place("threads", torch.device("cpu"), 3.0, None)
    assert Place.of(None, None, 3.0, None).device is None
    monkeypatch.setattr(make_world.PipelineMesh, "of", lambda mesh: ("place in", mesh))
    assert Place.of(None, None, 3.0, "mesh").mesh == ("place in", "mesh")


@pytest.mark.parametrize("executor", [None, "threads", "processes"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("is_started", [False, True])
@pytest.mark.parametrize("mesh", [None, "mesh"])
def test_ranks_are_threads_if_asked_for_or_if_there_is_one_without_processes(
    monkeypatch, executor, ranks, is_started, mesh
):
    """All combinations."""
    monkeypatch.setattr(make_world, "started", lambda: is_started)
    expected = executor == "threads"
    if executor is None and ranks == 1 and not is_started and mesh is None:
        expected = True
    place = Place(executor, None, 1.0, mesh)
    assert in_threads(SimpleNamespace(ranks=ranks), place) is expected


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, MAX_DEADLINE_S * 1.001, float("nan")])
def test_limits_that_are_no_seconds_and_unknown_executors_are_refused(deadline_s):
    """The longest one is allowed."""
    ranks = SimpleNamespace(ranks=2)
    with pytest.raises(SettingError, match=rf"deadline_s is above 0 and .*, not {deadline_s}"):
        in_threads(ranks, Place("threads", None, deadline_s))
    assert in_threads(ranks, Place("threads", None, MAX_DEADLINE_S))
    with pytest.raises(SettingError, match="executor is 'processes' or 'threads', not 'gpu'"):
        in_threads(ranks, Place("gpu", None, 1.0))


@pytest.fixture
def parts(monkeypatch):
    """What a world is made of, without processes."""
    parts = SimpleNamespace(ranks=2, shared=[], idle=[], joined=[])
    monkeypatch.setattr(make_world, "DistributedWorld", lambda *given: ("processes", *given))
    monkeypatch.setattr(make_world, "ThreadWorld", lambda *given: ("threads", *given))
    monkeypatch.setattr(make_world, "local_device", lambda device, user: (device, user))
    monkeypatch.setattr(make_world, "shared_tensors", lambda *given: parts.shared)
    monkeypatch.setattr(make_world, "announce_idle_ranks", lambda *given: parts.idle.append(given))
    monkeypatch.setattr(make_world, "join", lambda s: parts.joined.append(s) or parts.ranks)
    monkeypatch.setattr(make_world, "started", lambda: False)
    monkeypatch.setattr(make_world.dist, "get_rank", lambda: 0)
    return parts


def test_threads_have_one_device_of_this_process(parts):
    """The plan's devices count only where the caller leaves both open."""
    setting = config(schedule("1f1b", 2, 2), devices=(0, 3), cluster_ranks=4)
    device = torch.device("cpu")
    world = world_of(setting, None, Place("threads", device, 5.0))
    user = "each rank is a thread of this process and"
    assert world == ("threads", 2, (device, user), 5.0)
    assert world_of(setting, None, Place("threads", None, 5.0))[0] == "threads"
    several = config(schedule("interleaved", 4, 4))  # stages on two ranks
    assert world_of(several, None, Place("threads", device, 5.0))[1] == 2
    single = config(schedule("1f1b", 1, 2), devices=(3,), cluster_ranks=4)
    message = "the plan is for device 3 of its cluster, and .* start the process there$"
    with pytest.raises(PlanError, match=message):
        world_of(single, None, Place(None, None, 5.0))
    assert world_of(single, None, Place(None, device, 5.0))[0] == "threads"
    assert parts.joined == []


def test_processes_have_links_in_both_directions_and_between_copies(parts):
    """And between the ranks that hold one weight; a group of processes is taken as it is."""
    case_schedule = pipelines(schedule("1f1b", 2, 2), 2, 4)
    parts.ranks, parts.shared = 4, [SimpleNamespace(links={Link(0, 3)})]
    place = Place(None, None, 5.0)
    kind, device, deadline_s, links, sync_links, replicas, group = world_of(
        config(case_schedule), "model", place
    )
    assert (kind, device, deadline_s, group) == ("processes", None, 5.0, None)
    chain = {(0, 1), (2, 3)}
    assert {tuple(link) for link in links} == chain | {(b, a) for a, b in chain}
    copies = {(0, 2), (2, 0), (1, 3), (3, 1)}
    assert {tuple(link) for link in sync_links} == copies | {(0, 3)}
    assert replicas == {0: (0, 2), 1: (1, 3)}
    assert parts.joined == [5.0]
    group = SimpleNamespace(size=4, rank=3)
    assert world_of(config(case_schedule), "model", place, group)[-1] is group
    assert parts.joined == [5.0]
    assert [rank for _, rank in parts.idle] == [0, 3]


def test_three_copies_of_one_stage_have_links_between_any_two(parts):
    """A stage with one copy has none."""
    case_schedule = pipelines(schedule("1f1b", 1, 2), 3, 6)
    parts.ranks = 3
    _, _, _, links, sync_links, replicas, _ = world_of(
        config(case_schedule), "m", Place(None, None, 5.0)
    )
    assert links == set()
    assert {tuple(link) for link in sync_links} == set(itertools.permutations(range(3), 2))
    assert replicas == {0: (0, 1, 2)}
    parts.ranks = 2
    assert world_of(config(schedule("1f1b", 2, 2)), "m", Place(None, None, 5.0))[5] == {}


@pytest.mark.parametrize(
    ("needed", "ranks", "words"),
    [
        (2, 1, "the schedule is for 2 ranks and there is 1: start 2 processes"),
        (2, 3, "the schedule is for 2 ranks and there are 3: start 2 processes"),
        (1, 2, "the schedule is for 1 rank and there are 2: start 1 process (torchrun"),
    ],
)
def test_another_number_of_processes_is_refused_with_what_to_start(parts, needed, ranks, words):
    """Fewer may be threads of one process; of more, none may be idle."""
    parts.ranks = ranks
    with pytest.raises(PlanError) as raised:
        world_of(config(schedule("1f1b", needed, 2)), None, Place("processes", None, 5.0))
    text = str(raised.value)
    assert text.startswith(words)
    assert ("so that none is idle" in text) is (ranks > needed)
    assert ("executor='threads'" in text) is (ranks < needed)
    assert f"{ranks}" in text


@pytest.mark.parametrize("stages", [1, 3])
def test_another_dimension_of_a_mesh_is_refused_with_both_numbers(parts, stages):
    """By the ranks of one copy, whether the mesh has fewer or more of them."""
    parts.ranks = 2 * stages
    mesh = SimpleNamespace(stages=stages, copies=2)
    case_schedule = pipelines(schedule("1f1b", 2, 2), 2, 4)
    text = (
        f"the schedule is for 2 ranks, and the dimension 'pp' of the mesh has {stages}: make a "
        f"mesh with 2 there, or plan for {stages}$"
    )
    with pytest.raises(PlanError, match=text):
        world_of(config(case_schedule), None, Place(None, None, 5.0, mesh))


def test_a_plan_for_other_hosts_or_devices_is_refused_with_their_names(parts):
    """Hosts are named once each, in the plan's order."""
    case_schedule = schedule("1f1b", 2, 2)
    hosts = (("b", "fast"), ("a", "slow"), ("b", "fast"))
    with pytest.raises(
        PlanError, match=r"other hosts than those of this run \(hosts b, a\): start"
    ):
        world_of(config(case_schedule, cluster_devices=hosts), None, Place(None, None, 5.0))
    setting = config(case_schedule, devices=(0, 2), cluster_ranks=3, cluster_devices=hosts)
    with pytest.raises(PlanError) as raised:
        world_of(setting, None, Place(None, None, 5.0))
    text = str(raised.value)
    assert text.startswith("the plan is for devices 0, 2 of its cluster (hosts b, a), and this run")
    assert "start 3 processes there" in text
    assert "those devices alone, ps.plan(profile, cluster.on((0, 2)), …), and start one" in text
    assert text.endswith("one process on each, in this order")
    with pytest.raises(PlanError, match="the plan is for other hosts than those of this run"):
        world_of(replace(setting, devices=(0, 1)), None, Place(None, None, 5.0))
    whole = replace(setting, devices=(0, 1), cluster_devices=())
    assert world_of(whole, None, Place(None, None, 5.0))[0] == "processes"
    with pytest.raises(PlanError, match="devices 1, 0 of"):
        world_of(replace(whole, devices=(1, 0)), None, Place(None, None, 5.0))


def test_a_rank_that_is_lost_while_the_world_is_made_is_an_error_of_the_run(parts, monkeypatch):
    """torch's own error names neither the rank nor what it did."""

    def refuse(*_):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(make_world, "DistributedWorld", refuse)
    text = "could not connect to the other ranks: Connection closed"
    with pytest.raises(RunError, match=text):
        world_of(config(schedule("1f1b", 2, 2)), "model", Place(None, None, 5.0))
