"""`penstock study factors`: one factor at a time."""

from __future__ import annotations

import dataclasses

import pytest
from tests.study.studies.records import column, made_up, tables

from penstock.study.settings import Settings
from penstock.study.studies.factors import Factors


def test_cells_differ_from_the_base_in_one_factor():
    """Otherwise a difference of times has no cause."""
    cells = Factors().cells(Settings(repetitions=1))
    assert len(cells) == len(set(cells))
    base = next(
        cell
        for cell in cells
        if (cell.stages, cell.micro_batches, cell.balance) == (2, 8, "bottleneck")
        and dict(cell.model_options)["tokens"] == 64
        and dict(cell.model_options)["layers"] == 8
    )
    for cell in cells:
        if cell.balance == "10-2" or dict(cell.model_options)["layers"] == 10:
            continue  # the model of this factor has two more layers, for uneven cuts
        different = [
            field.name
            for field in dataclasses.fields(cell)
            if getattr(cell, field.name) != getattr(base, field.name)
        ]
        assert len(different) <= 1 or cell.stages == 1


def test_the_table_has_means_ratios_and_the_ideal_bubble():
    """Every number derives from the records."""
    cells = Factors().cells(Settings(repetitions=2))
    seconds = {1: 4.0, 2: 3.0, 4: 2.5, 8: 2.0, 16: 2.2}
    report = Factors().report(
        Settings(repetitions=2), made_up(cells, lambda cell: seconds[cell.micro_batches])
    )
    table = tables(report)["factor-micro-batches"]
    assert column(table, "value") == ["1", "2", "4", "8", "16"]
    assert column(table, "step") == pytest.approx([4.0, 3.0, 2.5, 2.0, 2.2])
    assert column(table, "to the fastest") == pytest.approx([2.0, 1.5, 1.25, 1.0, 1.1])
    assert column(table, "ideal bubble") == pytest.approx([1 / (m + 1) for m in (1, 2, 4, 8, 16)])
    assert "micro-batches: 8 is the fastest; 1 takes 2.00 times as long." in report.pages[0].summary


def test_the_text_of_a_factor_has_the_values_that_its_runs_have():
    """The model of which the balance varies has 10 blocks; the text used to say 8."""
    settings = Settings(repetitions=1)
    cells = Factors().cells(settings)
    uneven = next(cell for cell in cells if cell.balance == "10-2")
    assert dict(uneven.model_options)["layers"] == 10
    sections = Factors().report(settings, []).pages[0].sections
    text_of = {section.title: section.blocks[0].text for section in sections}
    assert text_of["Factor: balance"] == (
        "All else is equal: micro-batches 8, stages 2, depth 10, input 64."
    )
    assert text_of["Factor: stages"] == (
        "All else is equal: micro-batches 8, balance bottleneck, depth 8, input 64."
    )


def test_a_value_without_runs_says_so():
    """An unfinished study has a report, too."""
    report = Factors().report(Settings(repetitions=1), [])
    assert set(column(tables(report)["factor-stages"], "note")) == {"not run"}
