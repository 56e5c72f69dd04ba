"""`penstock study schedules`: all schedules and weight rules in real runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.study.studies.records import column, made_up, tables

from penstock.search.schedules import schedules
from penstock.study.settings import Settings
from penstock.study.studies.schedules import Schedules, measure
from penstock.weights.catalogue import WEIGHT_RULES


def test_every_schedule_from_numbers_and_every_rule_has_a_cell():
    """Those computed from costs and those for sliced sequences are other studies."""
    cells = Schedules().cells(Settings())
    expected = {
        name for name, facts in schedules().items() if not facts.needs_costs and not facts.causal
    }
    assert {cell.schedule for cell in cells} == expected
    assert {cell.weights for cell in cells} == set(WEIGHT_RULES.entries())


def test_two_synchronous_schedules_learn_the_same():
    """In two processes each, for two batches."""
    cells = {cell.schedule: cell for cell in Schedules().cells(Settings())}
    outcomes = [measure(replace(cells[name], steps=2), Path()) for name in ("gpipe", "interleaved")]
    assert outcomes[0].losses == pytest.approx(outcomes[1].losses, rel=1e-5)
    assert [len(outcome.peak_bytes) for outcome in outcomes] == [2, 2]
    assert [outcome.extra["stages"] for outcome in outcomes] == [2, 4]


def test_tables_are_sorted_by_time_and_failures_are_last():
    """Synchronous schedules apart from the others."""
    cells = Schedules().cells(Settings())
    seconds = {cell: float(place) for place, cell in enumerate(reversed(cells), start=1)}
    failing = next(cell for cell in cells if cell.schedule == "chimera")
    seconds[failing] = None
    records = made_up(cells, seconds.get, losses=lambda _: 3.0, extra=lambda _: {"stages": 2})
    report = Schedules().report(Settings(), records)
    table = tables(report)["synchronous"]
    assert column(table, "schedule")[-1] == "chimera"
    times = column(table, "batch")[:-1]
    assert times == sorted(times)
    assert column(table, "to the fastest")[:-1] == pytest.approx(
        [value / times[0] for value in times]
    )
    assert set(column(tables(report)["asynchronous"], "weight rule")) == set(
        WEIGHT_RULES.entries()
    ) - {"flush"}
    assert any("lie within 0.0e+00" in sentence for sentence in report.pages[0].summary)
