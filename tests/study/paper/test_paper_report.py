"""`penstock study paper`: the cells, and every number of the report derived again from records by
formulas that are written down here a second time.
"""

from __future__ import annotations

import math
import random
import statistics

import pytest

from penstock.study.catalogue import study_entry
from penstock.study.paper import fit_quality, simulated
from penstock.study.paper.cells import all_cells, paper_cells, template
from penstock.study.paper.published import STEPS, published_cells
from penstock.study.records import Outcome, Record
from penstock.study.settings import Settings


@pytest.fixture(autouse=True)
def quick_simulation(monkeypatch):
    """A simulation that needs no fit: seconds by a formula."""

    def seconds(cell):
        return 100.0 * cell.micro_batches + cell.gpus

    for module in ("layout", "simulation", "fit_quality"):
        monkeypatch.setattr(f"penstock.study.paper.{module}.simulated_seconds", seconds)
    host = simulated.Host(1e-4, 0.1, 1e-3), ()
    monkeypatch.setattr("penstock.study.paper.simulation.fit_host", lambda: host)
    engine = simulated.Engine(1e-4, 1e-3), ()
    monkeypatch.setattr("penstock.study.paper.simulation.fit_engine", lambda: engine)


@pytest.fixture
def two_cores(monkeypatch):
    """A machine of two cores, whatever this one has."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})


@pytest.fixture
def records(two_cores):
    """Made-up records of all cells: DeepSpeed missing on 8 devices, one system failing."""
    numbers = random.Random(7)
    records = []
    for cell in all_cells(Settings()):
        if cell.system == "deepspeed" and cell.stages == 8:
            records.append(Record(cell, "missing", "not installed: no module deepspeed"))
            continue
        if cell.system == "fsdp2":
            records.append(Record(cell, "failed", "rank 0: something"))
            continue
        seconds = tuple(numbers.uniform(0.1, 0.2) * cell.stages for _ in range(3))
        losses = tuple(numbers.uniform(3, 4) for _ in range(3))
        notes = {"data_parallel_size": 1} if cell.system == "deepspeed" else {}
        extra = {"ranks": cell.stages, "lengths": [10, 9], "steps_per_unit": 1, "notes": notes}
        records.append(Record(cell, "ok", "", Outcome(seconds, losses, (5, 7), extra=extra)))
    return records


@pytest.fixture
def tables(records):
    """The tables of the report, by name."""
    report = study_entry("paper").study().report(Settings(), records)
    tables_by_name = {}
    for section in report.pages[0].sections:
        for block in section.blocks:
            if hasattr(block, "rows"):
                tables_by_name[block.name] = block
    return tables_by_name


def test_the_papers_56_cells_are_all_there():
    """Two libraries by two balances on four numbers of devices at three numbers of micro-batches,
    and eight of DeepSpeed.
    """
    assert len(published_cells()) == 56
    cells = paper_cells(template(Settings(scale="full")))
    assert len(set(cells)) == 56
    assert {cell.epochs for cell in cells} == {25}
    assert {cell.batch for cell in cells} == {128}
    assert {dict(cell.model_options)["head"] for cell in cells} == {"torchvision"}
    assert all("width" not in dict(cell.model_options) for cell in cells)
    repetitions = [cell.repetition for cell in all_cells(Settings(scale="full"))]
    assert set(repetitions) == set(range(10))


def test_at_the_small_scale_only_what_means_something_is_repeated(two_cores):
    """More stages than cores: one run, and the row says that its time means nothing."""
    counts = {}
    for cell in all_cells(Settings()):
        counts[cell.group] = counts.get(cell.group, 0) + 1
    assert {counts[cell] for cell in counts if cell.stages <= 2} == {3}
    assert {counts[cell] for cell in counts if cell.stages > 2} == {1}
    assert {counts[cell] for cell in counts} >= {1, 3}


def step_of(record):
    """The middle one of three steps."""
    return sorted(record.outcome.seconds)[1]


def runs_of(records, system, **fields):
    """The records of a system with some fields that ended."""
    chosen = []
    for record in records:
        matches = all(getattr(record.cell, name) == value for name, value in fields.items())
        if record.cell.system == system and matches and record.status == "ok":
            chosen.append(record)
    return chosen


def test_every_number_of_the_56_rows_is_that_of_the_records(tables, records):
    """Means, intervals, speed-ups, efficiencies and ratios, computed a second time."""
    t_of_two_degrees = 4.302652729911275
    rows = tables["cells"].rows
    assert len(rows) == 56
    for published, row in zip(published_cells(), rows, strict=True):
        fields = {"micro_batches": published.micro_batches, "balance": published.balance}
        runs = runs_of(records, published.library, stages=published.gpus, **fields)
        first = runs_of(records, published.library, stages=2, **fields)
        ours = runs_of(
            records,
            "penstock",
            schedule="1f1b",
            balance="time",
            stages=published.gpus,
            micro_batches=published.micro_batches,
        )
        assert row[:5] == (
            published.micro_batches,
            published.gpus,
            published.library,
            published.balance,
            len(runs),
        )
        assert row[7] == pytest.approx(published.seconds / (25 * 50_000 / 128))
        if not runs:
            assert row[5] is None
            assert row[-1] == "missing: not installed: no module deepspeed"
            continue
        steps = [step_of(run) for run in runs]
        mean = sum(steps) / len(steps)
        losses = [run.outcome.losses[2] for run in runs]
        assert row[5] == pytest.approx(mean)
        assert row[8] == pytest.approx(sum(losses) / len(losses))
        if len(steps) == 3:
            error = statistics.stdev(steps) / math.sqrt(3)
            assert row[6] == pytest.approx(t_of_two_degrees * error)
            assert "mean nothing" not in row[-1]
        else:
            assert row[6] is None
            assert "times mean nothing" in row[-1]
        speed_up = statistics.fmean(map(step_of, first)) / mean
        assert row[11] == pytest.approx(speed_up)
        assert row[13] == pytest.approx(speed_up * 2 / published.gpus)
        assert row[14] == pytest.approx(mean / statistics.fmean(map(step_of, ours)))
        assert row[16] == 7


def test_the_layout_tables_have_the_papers_numbers_and_ours_times_the_steps(tables, records):
    """Per number of devices a row of the paper, one of the simulation and one of this machine."""
    for number, columns in ((2, 14), (3, 18)):
        table = tables[f"table-{number}"]
        assert len(table.columns) == columns
        assert len(table.rows) == 12
        titles = [column.title for column in table.columns]
        for paper, simulation, here in zip(*[iter(table.rows)] * 3, strict=True):
            gpus = paper[0]
            for cell in published_cells():
                if cell.table != number or cell.gpus != gpus:
                    continue
                name = f"{cell.library} {cell.balance}" + f" M={cell.micro_batches}" * (number == 3)
                at = titles.index(f"{name}: loss")
                assert paper[at : at + 2] == (cell.loss, cell.seconds)
                assert simulation[at : at + 2] == (None, 100.0 * cell.micro_batches + gpus)
                runs = runs_of(
                    records,
                    cell.library,
                    stages=gpus,
                    micro_batches=cell.micro_batches,
                    balance=cell.balance,
                )
                if runs:
                    assert here[at + 1] == pytest.approx(
                        statistics.fmean(map(step_of, runs)) * STEPS
                    )
                else:
                    assert here[at] is None
            assert ("mean nothing" in here[1]) == (gpus > 2)


def test_the_summary_says_what_is_missing_and_what_deepspeed_reports(records):
    """The reader learns first what the report does not know."""
    page = study_entry("paper").study().report(Settings(), records).pages[0]
    assert "2 x deepspeed missing" in page.summary[0]
    assert "6 x fsdp2 failed" in page.summary[0]
    assert "data-parallel size of 1" in page.summary[1]
    assert "digits" in page.sections[0].blocks[0].caption


def test_a_report_without_any_record_is_a_report(two_cores):
    """A study that was stopped at once."""
    page = study_entry("paper").study().report(Settings(), []).pages[0]
    assert "0 of" in page.summary[0]


def test_near_copies_are_one_point():
    """48 cells of two libraries are 12 points, of which 4 are fitted."""
    points = fit_quality.distinct_points()
    assert len(points) == 12
    assert sum(point.fitted for point in points) == 4
    one = next(point for point in points if (point.micro_batches, point.gpus) == (16, 2))
    seconds = [2424, 2436, 2360, 2386]
    assert one.published_s == pytest.approx(math.prod(seconds) ** 0.25)
    assert one.spread == pytest.approx(2436 / 2360 - 1)


def test_r_squared_is_one_less_the_residual_over_the_variance():
    """Of logarithms; negative if the mean is better; none without variance."""
    assert fit_quality.r_squared([1.0, 10.0], [1.0, 10.0]) == 1.0
    assert fit_quality.r_squared([1.0, 10.0], [10.0, 1.0]) == pytest.approx(-3.0)
    assert fit_quality.r_squared([5.0, 5.0], [5.0, 5.0]) is None
