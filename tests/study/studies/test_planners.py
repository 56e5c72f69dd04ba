"""`penstock study planners`: plans of all planners, by one simulator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.study.studies.records import column, made_up, tables

from penstock.search.catalogue import PLANNERS
from penstock.study.settings import Settings
from penstock.study.studies.planners import Planners, measure


def test_every_planner_meets_every_model_and_cluster():
    """A planner that is left out cannot be chosen."""
    cells = Planners().cells(Settings())
    cases = {(cell.option("workload"), cell.option("cluster")) for cell in cells}
    assert len(cells) == len(cases) * len(PLANNERS.entries())


def test_a_cell_has_the_time_and_memory_of_the_plan():
    """The same as planning by hand."""
    import torch

    import penstock as ps
    from penstock.zoo.catalogue import model

    cell = next(cell for cell in Planners().cells(Settings()) if cell.system == "gpipe")
    cell = replace(cell, model="mlp", model_options=(), batch=64)
    outcome = _measured_mlp(cell)
    network = model("mlp", device="meta")
    profile = ps.analytic(network, torch.empty(1, 64, device="meta"), "V100", batch=64)
    plan = ps.plan(profile, ps.cluster("4xV100-10GbE"), 64, planner="gpipe")
    assert outcome.seconds == (plan.predicted.step_s,)
    assert outcome.peak_bytes == plan.predicted.peak_memory


def _measured_mlp(cell):
    """The outcome of a cell whose model is an MLP instead of a network of images."""
    from penstock.study.studies import planners

    with pytest.MonkeyPatch.context() as patch:
        import torch

        import penstock as ps
        from penstock.zoo.catalogue import model

        patch.setattr(
            planners,
            "_profile",
            lambda cell, device: ps.analytic(
                model("mlp", device="meta"),
                torch.empty(1, 64, device="meta"),
                device,
                batch=cell.batch,
            ),
        )
        return measure(cell, Path())


def test_the_overview_relates_each_planner_to_the_fastest():
    """Empty where a planner has no plan, with its reason below."""
    cells = [
        cell
        for cell in Planners().cells(Settings())
        if cell.system in ("auto", "dapple", "data-parallel")
    ]
    seconds = {"auto": 2.0, "dapple": 3.0, "data-parallel": None}
    records = made_up(
        cells,
        lambda cell: seconds[cell.system],
        peak_bytes=lambda _: 2**30,
        extra=lambda _: {
            "schedule": "1f1b",
            "stages": 2,
            "ranks": 4,
            "micro_batches": 8,
            "recompute": "never",
            "bubble_ratio": 0.1,
            "planning_s": 1.0,
        },
    )
    report = Planners().report(Settings(), records)
    overview = tables(report)["planners"]
    assert column(overview, "planner") == ["auto", "dapple", "data-parallel"]
    assert overview.rows[0][1:] == (1.0,) * (len(overview.columns) - 1)
    assert overview.rows[1][1:] == (1.5,) * (len(overview.columns) - 1)
    assert set(overview.rows[2][1:]) == {None}
    workload, cluster = cells[0].option("workload"), cells[0].option("cluster")
    assert f"{workload} on {cluster}: the plan of auto is the fastest." in report.pages[0].summary
    notes = column(tables(report)[f"{workload}-on-{cluster}".lower()], "note")
    assert notes[-1] == "failed: no memory"
