"""Planning needs no torch."""

import subprocess
import sys


def test_planning_rooms_import_and_plan_without_torch():
    """A laptop without torch can plan for a cluster, and `penstock simulate` answers at once."""
    program = """
import sys
sys.modules["torch"] = None
from penstock.cluster.cluster import cluster
from penstock.search.catalogue import plan
from penstock.simulate.entry import simulate
from penstock.weights.catalogue import weight_rule
from penstock.profile.profile import LayerProfile, Profile, Timing
time = Timing((1,), (1.0,))
layers = tuple(LayerProfile(str(i), "L", time, time, time, time, 1, 1, 0, 1.0, 1.0) for i in range(2))
profile, two = Profile(layers, "f", 1.0, 4), cluster("2xV100-10GbE")
made = plan(profile, two, 4, max_replicas=1)
simulate(made, profile, two)
print(made.stages, weight_rule(made.weights).name)
"""
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (process.returncode, process.stdout.strip()) == (0, "2 flush"), process.stderr
