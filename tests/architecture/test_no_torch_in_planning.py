"""Planning needs no torch: every module above the line is imported in a process where torch cannot
be.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from tests.time_limits import HANG_S

SOURCE = Path(__file__).parents[2] / "src"


def planning_rooms() -> list[str]:
    """The rooms above the line, read from the rule that keeps their order."""
    path = Path(__file__).with_name("test_imports.py")
    values = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and node.targets[0].id in ("ORDER", "FIRST_WITH_TORCH"):
            values[node.targets[0].id] = ast.literal_eval(node.value)
    order = values["ORDER"]
    return order[: order.index(values["FIRST_WITH_TORCH"])]


SCRIPT = """
import importlib, pkgutil, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torchvision"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, NoTorch())
sys.path.insert(0, sys.argv[1])
import penstock

found = [m.name for m in pkgutil.walk_packages(penstock.__path__, "penstock.") if m.name.split(".")[1] in sys.argv[2].split(",")]
for name in found:
    importlib.import_module(name)
assert "torch" not in sys.modules
from penstock.schedule.catalogue import schedule, schedules
for name in schedules():
    pass
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.verify.verify import verify
verify(schedule("1f1b", 4, 8))
print(simulate_schedule(schedule("1f1b", 4, 8), Costs()).makespan, len(found))
"""


def test_the_planning_half_imports_and_answers_without_torch():
    """`penstock simulate` on a laptop, or on a login node, has no torch to import, and no seconds
    to spare for it.
    """
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(SOURCE), ",".join(planning_rooms())],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    makespan, count = result.stdout.split()
    assert makespan == "33.0"
    assert int(count) >= 20
