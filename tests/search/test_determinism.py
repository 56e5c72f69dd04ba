"""The same question has the same plan in another process."""

import os
import subprocess
import sys

PROGRAM = """
import penstock as ps
from penstock.profile.profile import Profile

profile = Profile.load("docs/funnel.profile.json")
cluster = ps.cluster("2xV100+2xP100-PCIe3-1GbE")
print(ps.plan({"V100": profile, "P100": profile}, cluster, batch=10, budget_s=1))
"""


def planned(hash_seed: str, threads: str) -> str:
    """Return the text of the plan that a new process makes."""
    environment = {
        **os.environ,
        "PYTHONHASHSEED": hash_seed,
        "OMP_NUM_THREADS": threads,
        "NUMBA_NUM_THREADS": threads,
    }
    command = [sys.executable, "-c", PROGRAM]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return finished.stdout


def test_neither_the_hash_seed_nor_the_number_of_threads_changes_the_plan():
    """The order of a set would differ by the seed; devices of two kinds on two hosts, and a batch
    that most numbers of micro-batches do not divide, so that all steps of the search take part.
    """
    first = planned("1", "1")
    assert "candidates, best first" in first
    assert planned("2", "2") == first
