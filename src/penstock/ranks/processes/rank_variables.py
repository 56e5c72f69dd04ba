"""Environment variables by which the ranks of one host find each other."""

from __future__ import annotations


def rank_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank of a job on this host alone.

    Args:
        rank: of the process.
        ranks: processes of the job.
        port: where torch's init_process_group of rank 0 listens, on the loopback address.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
