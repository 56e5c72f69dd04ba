"""The names at the top are a contract; growth must be a visible change."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import penstock as ps

NAMES = [
    "Chain",
    "ChainError",
    "Checkpoints",
    "Cluster",
    "ClusterError",
    "Costs",
    "FileError",
    "MissingExtra",
    "Namespace",
    "Op",
    "PartitionError",
    "PenstockError",
    "Pipe",
    "Pipeline",
    "Plan",
    "PlanError",
    "Profile",
    "RunError",
    "Schedule",
    "ScheduleError",
    "SettingError",
    "Timeline",
    "UnknownName",
    "analytic",
    "chain",
    "cluster",
    "compare",
    "draw",
    "export",
    "launch",
    "load_weights",
    "partition",
    "plan",
    "pop",
    "profile",
    "save_weights",
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


def test_type_checkers_see_every_public_name_where_it_is_imported_from():
    """`ps.Plan` was once missing under TYPE_CHECKING, and was no type for mypy."""
    tree = ast.parse(Path(ps.__file__).read_text(encoding="utf-8"))
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            for statement in node.body:
                module = statement.module.removeprefix("penstock.")
                modules.update({name.asname: module for name in statement.names})
    assert modules == ps._MODULES


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
