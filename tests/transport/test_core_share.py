"""Threads of a rank: its share of the cores that it may use."""

from __future__ import annotations

import os

import pytest

from penstock.transport import core_share
from penstock.transport.core_share import RankCores, count_threads, rank_cores


def ranks_on(kernel, cores, count):
    """Ranks that may all use the same cores."""
    return [RankCores(kernel, tuple(cores))] * count


@pytest.mark.parametrize(
    ("ranks", "threads"),
    [
        (ranks_on("a", range(8), 2), [4, 4]),
        (ranks_on("a", range(8), 3), [2, 2, 2]),
        (ranks_on("a", range(2), 4), [1, 1, 1, 1]),
        (ranks_on("a", range(4), 1) + ranks_on("b", range(4), 1), [4, 4]),
        (ranks_on("a", range(4), 1) + ranks_on("a", range(4, 8), 1), [4, 4]),
        (ranks_on("a", range(6), 1) + ranks_on("a", range(4, 6), 1), [5, 1]),
    ],
    ids=["halves", "rounded down", "at least one", "two machines", "containers apart", "overlap"],
)
def test_ranks_of_one_kernel_share_the_cores_that_both_may_use(ranks, threads):
    """Also where they are different hosts to the network."""
    assert [count_threads(ranks, rank, {}) for rank in range(len(ranks))] == threads


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "9"}, 4),
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "1"}, 1),
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}, 4),
        ({"OMP_NUM_THREADS": "2", "LOCAL_WORLD_SIZE": "2"}, 2),
        ({"OMP_NUM_THREADS": "4,2"}, 4),
        ({"OMP_NUM_THREADS": "0"}, 4),
    ],
)
def test_the_users_limit_holds_and_torchruns_own_does_not(environment, threads):
    """torchrun sets 1 for several ranks on a host, whatever the number of cores."""
    assert count_threads(ranks_on("a", range(8), 2), 1, environment) == threads


def test_a_rank_reports_the_cores_of_its_affinity():
    """Which a container or a batch system may have narrowed."""
    assert rank_cores().cores == tuple(sorted(os.sched_getaffinity(0)))


def test_a_system_without_affinities_has_all_of_its_cores(monkeypatch):
    """macOS; where not even their number is known, there is one."""

    def missing(_):
        raise AttributeError

    monkeypatch.setattr(core_share.os, "sched_getaffinity", missing)
    monkeypatch.setattr(core_share.os, "cpu_count", lambda: 3)
    monkeypatch.setattr(core_share, "host_identity", lambda: "kernel")
    assert rank_cores() == RankCores("kernel", (0, 1, 2))
    monkeypatch.setattr(core_share.os, "cpu_count", lambda: None)
    assert rank_cores().cores == (0,)


def test_thirds_of_three_cores_are_one():
    """Sums of fractions are exact: 3 times a third of a core must not be rounded down to 0."""
    for count in (3, 7, 9, 11):
        assert count_threads(ranks_on("a", range(count), count), 0, {}) == 1
    assert count_threads(ranks_on("a", range(6), 3), 2, {}) == 2
