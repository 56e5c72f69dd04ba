"""The names at the top are a contract; growth must be a visible change."""

from __future__ import annotations

import importlib
import subprocess
import sys

import penstock as ps

NAMES = [
    "Costs",
    "Namespace",
    "Op",
    "PenstockError",
    "Pipe",
    "Pipeline",
    "Plan",
    "Profile",
    "Schedule",
    "ScheduleError",
    "Timeline",
    "analytic",
    "chain",
    "cluster",
    "compare",
    "draw",
    "export",
    "launch",
    "partition",
    "plan",
    "pop",
    "profile",
    "schedule",
    "schedules",
    "side_loss",
    "simulate",
    "simulate_many",
    "skippable",
    "stash",
    "verify",
    "verify_skippables",
]


def test_the_front_door_has_exactly_the_written_names():
    """Whoever adds a public name must say so here."""
    assert sorted(ps.__all__) == NAMES
    assert all(callable(getattr(ps, name)) for name in NAMES)


def test_functions_stay_functions_when_rooms_of_their_name_are_imported():
    """`penstock.schedule` is a function and a folder; importing from the folder must not hide the
    function.
    """
    for module in (
        "schedule.op",
        "profile.profile",
        "partition.catalogue",
        "draw.draw",
        "simulate.costs",
        "verify.verify",
        "plan.plan",
    ):
        importlib.import_module(f"penstock.{module}")
    assert ps.schedule("gpipe", stages=2, micro_batches=2).stages == 2
    assert all(callable(getattr(ps, name)) for name in NAMES)


def test_importing_penstock_loads_neither_torch_nor_numpy():
    """`import penstock` must cost next to nothing."""
    code = "import sys, penstock; raise SystemExit(any(name in sys.modules for name in ('torch', 'numpy', 'pydantic')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_name_is_an_attribute_error_that_lists_the_known():
    """The usual typo."""
    import pytest

    with pytest.raises(AttributeError, match="penstock has no 'Pipelin'"):
        _ = ps.Pipelin
