"""`penstock study libraries`: what is a library, and for which systems the bound holds."""

from __future__ import annotations

import pytest
from tests.study.studies.records import column, made_up, tables

from penstock.peers.measuring import bound_seconds
from penstock.search.schedules import schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.study.settings import Settings
from penstock.study.studies.libraries import Libraries

#: Seconds of a step; all other systems take one second.
SECONDS = {"bound": 0.5, "floor-memory": 0.6, "torch": 0.8}


@pytest.fixture(scope="module")
def report():
    """The report on made-up records of the comparison of the MLP."""
    settings = Settings(repetitions=1)
    cells = [cell for cell in Libraries().cells(settings) if cell.model == "mlp"]

    def seconds(cell):
        return SECONDS.get(cell.system, 1.0)

    def rounds(cell):
        return {"rounds": {"0": [seconds(cell)]}}

    return Libraries().report(settings, made_up(cells, seconds, extra=rounds))


def test_a_pipeline_written_by_hand_is_not_the_fastest_library(report):
    """The floors say what a pipeline cannot leave out; no user can train with them."""
    libraries = column(tables(report)["comparison-1-best"], "library")
    assert libraries[0] == "torch"
    assert not {"floor-gloo", "floor-memory", "floor-memory-1f1b", "bound"} & set(libraries)
    assert report.pages[0].summary[0].startswith("Fastest: torch ")


def test_the_bound_stands_beside_the_systems_for_which_it_holds(report):
    """One process per stage and whole backwards; its share is bound / step."""
    table = tables(report)["comparison-1-1-stages"]
    share_of = dict(zip(column(table, "system"), column(table, "of bound"), strict=True))
    bounded = {name for name, share in share_of.items() if share is not None}
    assert bounded == {
        "penstock 1f1b",
        "penstock gpipe",
        "penstock eager-1f1b",
        "torch 1f1b",
        "torch gpipe",
        "deepspeed 1f1b",
        "floor-gloo",
        "floor-memory",
        "floor-memory-1f1b",
    }
    assert share_of["penstock 1f1b"] == pytest.approx(0.5)
    assert share_of["torch gpipe"] == pytest.approx(0.625)
    two_stages = tables(report)["comparison-1-2-stages"]
    assert set(column(two_stages, "of bound")) == {None}


def test_a_split_backward_is_faster_than_the_bound_of_whole_ones():
    """2 stages, 4 micro-batches, f = 0.25 and b = 0.5: 1F1B takes the bound, ZB-H1 less."""
    bound_s = bound_seconds([(1.0, 2.0, 0.0)] * 2, micro_batches=4, cores=2)
    seconds = {}
    for name in ("1f1b", "zb-h1"):
        costs = Costs(forward=0.25, backward=0.5, input_grad=0.25, weight_grad=0.25)
        seconds[name] = simulate_schedule(schedule(name, 2, 4), costs).makespan
    assert seconds["1f1b"] == pytest.approx(bound_s)
    assert seconds["zb-h1"] < bound_s
