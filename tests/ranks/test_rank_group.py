"""Groups of the processes of pipelines in a job, without process groups."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from penstock.errors import RunError, SettingError
from penstock.ranks import rank_group
from penstock.ranks.rank_group import RankGroup
from penstock.schedule.lower import Link


@pytest.fixture
def torch_groups(monkeypatch):
    """The groups that torch was asked for, in order."""
    made = []

    def new_group(*given, **more):
        made.append((given, more))
        return f"group {len(made)}"

    monkeypatch.setattr(rank_group.dist, "new_group", new_group)
    monkeypatch.setattr(rank_group.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(rank_group, "join", lambda seconds: 3)
    return made


def job_of(rank, size, answers):
    """A job in which processes have sent these answers."""
    sent = []

    def exchange(value):
        sent.append(value)
        return [{**value, **answer} for answer in answers]

    return SimpleNamespace(rank=rank, size=size, deadline_s=7.0, exchange=exchange, sent=sent)


def test_the_whole_job_is_one_group_in_its_own_order(torch_groups):
    """A group of gloo, whatever the default backend."""
    group = RankGroup.whole_job(7.0)
    assert (group.ranks, group.rank, group.shared) == ((0, 1, 2), 1, "group 1")
    assert torch_groups == [((), {"backend": "gloo", "timeout": timedelta(seconds=7.0)})]
    assert (group.size, group.has_whole_job, group.job) == (3, True, None)


def test_all_processes_make_the_groups_of_all_pipelines_in_one_order(torch_groups, monkeypatch):
    """Ranks of a pipeline are in its own order, which is not that of the job."""
    monkeypatch.setattr(rank_group, "assign_device", lambda device: ("assigned", device))
    pipelines = [[3, 0], [2, 1], [2, 1], [3, 0]]
    for rank, members, place in ((0, (3, 0), 1), (1, (2, 1), 1), (2, (2, 1), 0), (3, (3, 0), 0)):
        torch_groups.clear()
        job = job_of(rank, 4, [{"ranks": members} for members in pipelines])
        group = RankGroup.of_pipeline(members, job, "cpu")
        assert (group.ranks, group.rank, group.job) == (members, place, job)
        assert group.assignment == ("assigned", "cpu")
        assert group.shared == ("group 1" if members == (2, 1) else "group 2")
        timeout = timedelta(seconds=7.0)
        assert torch_groups == [(([2, 1], timeout, "gloo"), {}), (([3, 0], timeout, "gloo"), {})]
        assert job.sent == [{"ranks": list(members)}]
        assert (group.size, group.has_whole_job) == (2, False)


@pytest.mark.parametrize("part", ["assign_device", "new_group"])
def test_a_rank_that_is_lost_while_groups_are_made_is_an_error_of_the_run(
    torch_groups, monkeypatch, part
):
    """torch's own error names neither the rank nor what it did."""

    def refuse(*_):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(rank_group, "assign_device", lambda device: "assigned")
    monkeypatch.setattr(rank_group if part == "assign_device" else rank_group.dist, part, refuse)
    with pytest.raises(RunError, match="could not connect to the other ranks: Connection closed"):
        RankGroup.of_pipeline([0], job_of(0, 1, [{"ranks": [0]}]), None)


@pytest.mark.parametrize(
    "pipelines", [[[0, 1], [0, 1], [1, 2]], [[0, 1], [0, 1], [0, 1]], [[0], [1]]]
)
def test_pipelines_that_share_or_leave_out_processes_are_refused(torch_groups, pipelines):
    """The message has all of them, and the number of processes."""
    job = job_of(0, 3, [{"ranks": members} for members in pipelines])
    with pytest.raises(SettingError, match="every one of its 3 processes must be in exactly one"):
        RankGroup.of_pipeline(pipelines[0], job, None)
    assert torch_groups == []


def test_pipelines_have_stores_of_their_own(monkeypatch):
    """By the rank of their first process; a single pipeline needs no name."""
    store = HashStore()
    module = rank_group.dist.distributed_c10d
    monkeypatch.setattr(module, "_get_default_store", lambda: store)
    job = job_of(0, 4, [])
    RankGroup((3, 0), 1, "shared", job).store("a").set("k", "1")
    RankGroup((2, 1), 1, "shared", job).store("a").set("k", "2")
    RankGroup((0, 1), 1, "shared").store("a").set("k", "3")
    keys = ("a/pipeline-3/k", "a/pipeline-2/k", "a/k")
    assert [store.get(key) for key in keys] == [b"1", b"2", b"3"]
    assert RankGroup((3, 0), 1, "shared", job_of(0, 2, [])).has_whole_job


def test_an_exchange_is_between_the_ranks_of_the_pipeline(monkeypatch):
    """With the number of the exchange in its keys."""
    monkeypatch.setattr(rank_group, "SettingsExchange", lambda *given: given)
    monkeypatch.setattr(RankGroup, "store", lambda self, prefix: prefix)
    job = job_of(0, 4, [])
    group = RankGroup((3, 0, 1), 1, "shared", job)
    assert group.settings_exchange(5, 9.0) == ("penstock/settings/5", 1, 3, 9.0, job)


def test_a_device_is_chosen_once_among_all_processes_of_the_job(monkeypatch):
    """One pipeline that has them all chooses by itself, in its own group."""
    given = []
    monkeypatch.setattr(rank_group, "assign_device", lambda *args: given.append(args) or "new")
    assert RankGroup((0, 1), 0, "shared", None, "before").device("cpu") == "before"
    assert given == []
    assert RankGroup((0, 1), 0, "shared").device("cpu") == "new"
    assert given == [("cpu", "shared")]


@pytest.mark.parametrize("alone", [False, True])
def test_communicators_of_all_pipelines_are_made_in_one_order(monkeypatch, alone):
    """Each rank gets its own, by the links of its pipeline."""
    made, common = [], []

    def make(keys, rank, device, barrier_group):
        made.append((keys, rank, device, barrier_group))
        return {key: f"{key[0].source}-{key[0].target}" for key in keys if rank in key[0]}

    monkeypatch.setattr(rank_group, "make_communicators", make)
    monkeypatch.setattr(
        rank_group,
        "make_common_communicator",
        lambda device, members: common.append(members) or f"all of {members}",
    )
    keys = [(Link(0, 1), False), (Link(1, 0), True)]
    device = torch.device("cuda:0")
    other = {"keys": [[2, 1, 0], [1, 2, 1]], "ranks": [2, 1]}
    job = None if alone else job_of(0, 4, [{}, other, other, {}])
    members = (0, 1) if alone else (3, 0)
    groups, everyone = RankGroup(members, 1, "shared", job).communicators(keys, device)
    rows = [[3, 0, 0], [0, 3, 1]]
    expected = [(Link(0, 3), True), (Link(1, 2), True), (Link(2, 1), False), (Link(3, 0), False)]
    if alone:
        expected = [(Link(0, 1), False), (Link(1, 0), True)]
        assert groups == {keys[0]: "0-1", keys[1]: "1-0"}
    else:
        assert job.sent == [{"keys": rows, "ranks": [3, 0]}]
        assert groups == {keys[0]: "3-0", keys[1]: "0-3"}
    assert made == [(expected, members[1], device, "shared")]
    assert common == ([(0, 1)] if alone else [(2, 1), (3, 0)])
    assert everyone == f"all of {members}"
