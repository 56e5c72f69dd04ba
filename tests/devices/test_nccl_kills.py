"""A rank that is killed over what NCCL demands (see `nccl_like`), at each op of its program."""

from __future__ import annotations

import itertools

import pytest
from tests.devices.nccl_jobs import KILLED_MICRO_BATCHES, be_killed

from penstock.errors import RankDied
from penstock.ranks.processes.launch import launch

OPS = [
    *itertools.product("FB", range(1, KILLED_MICRO_BATCHES + 1)),
    ("U", 1),
]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("kind", "call"), OPS)
def test_a_rank_that_is_killed_at_any_op_ends_the_run_and_is_named(rank, kind, call):
    """The other rank waits for a message under NCCL, which has no end of a connection to notice."""
    message = rf"^rank {rank} \(pid \d+\) was killed by SIGKILL; rank {1 - rank} stopped$"
    with pytest.raises(RankDied, match=message):
        launch(be_killed, 2, rank, kind, call, threads=1)
