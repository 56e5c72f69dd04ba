"""Variables of a rank that `launch` starts: those of torchrun on one host."""

from __future__ import annotations

from penstock.ranks.processes.rank_variables import rank_variables


def test_all_ranks_are_on_this_host_and_meet_at_its_loopback_address():
    """Programs for torchrun read each of them, as text."""
    assert rank_variables(2, 4, 6123) == {
        "RANK": "2",
        "LOCAL_RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "6123",
    }
