"""`penstock study paper`: a published study of pipeline parallelism, run again."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.report.document import Chart, Facts, Page, Report, Section, Series, Text
from penstock.study.catalogue import register
from penstock.study.cell import Cell
from penstock.study.paper.cells import (
    LIBRARIES,
    MOST,
    Template,
    all_cells,
    other_cells,
    template,
)
from penstock.study.paper.explanations import Explained, balance, one_process
from penstock.study.paper.layout import detail_table, layout_table, other_table
from penstock.study.paper.measured import Measurements
from penstock.study.paper.published import GPUS, PARAMETERS, STEPS, published_cells
from penstock.study.paper.simulation import simulation_section
from penstock.study.records import Record
from penstock.study.settings import Settings

_SOURCE = (
    "Nunez, Romero-Sandi, Rojas, Meneses: A Study of Pipeline Parallelism in Deep Neural Networks, "
    "Revista Colombiana de Computacion 25(1), 2024, doi 10.29375/25392115.5056"
)


_BALANCES = "FairScale gets torchgpipe's. 19 layers, each with the ReLU, pool and dropout after it."


@register(
    "paper",
    about="Do torchgpipe, FairScale and DeepSpeed behave as a paper found, and what do others do?",
    limit_s=90.0,
)
class Paper:
    """The paper's 56 cells, other systems on the same cells, and its explanations tested."""

    def cells(self, settings: Settings) -> list[Cell]:
        """Return all cells."""
        return all_cells(settings)

    def report(self, settings: Settings, records: Sequence[Record]) -> Report:
        """Return the report."""
        common = template(settings)
        measurements = Measurements(records, common.cores)
        processes, balances = one_process(common, measurements), balance(common, measurements)
        method = f"time per step x {STEPS:,.0f} steps"
        data = _data_text(common)
        tables = [layout_table(number, common, measurements, data, method) for number in (2, 3)]
        sections = (
            Section("The paper's tables", (*tables, _chart(common, measurements))),
            Section("All cells", (detail_table(common, measurements),)),
            Section("Other systems", (other_table(other_cells(common), common, measurements),)),
            _explanations(processes, balances),
            simulation_section(),
        )
        summary = (
            _coverage(records, len(self.cells(settings))),
            processes.conclusion,
            balances.conclusion,
            _fastest(common, measurements),
        )
        command = f"penstock study paper --scale {settings.scale}"
        if settings.data:
            command += f" --data {settings.data}"
        page = Page("paper", "The paper's experiment, run here", sections, command, summary)
        return Report(
            "A study of pipeline parallelism, run again", (page,), _facts(settings, common)
        )


def _data_text(common: Template) -> str:
    """Return a description of the data and of the length of a run, for captions."""
    cell = common.base
    name = cell.data
    if name == "digits":
        name = "handwritten digits resized to 3 x 32 x 32 pixels instead of CIFAR-100"
    length = f"{cell.steps} steps" if cell.steps else f"{cell.epochs} epochs"
    width = dict(cell.model_options).get("width")
    model = "VGG-19" if width is None else f"VGG-19 with {width} instead of 64 channels"
    return f"{name}, {model}, {length} per run"


def _facts(settings: Settings, common: Template) -> Facts:
    """Return what holds for all runs."""
    libraries = ", ".join(
        f"{name} {schedule} {dict(more)}" for name, (schedule, more) in LIBRARIES.items()
    )
    return Facts(
        (
            ("source", _SOURCE),
            ("scale", settings.scale),
            ("data and length", _data_text(common)),
            ("parameters at full width", f"{PARAMETERS:,}"),
            ("batch", str(common.base.batch)),
            ("optimizer", "SGD, lr 0.01, momentum 0.9 (the paper says SGD)"),
            ("libraries", libraries),
            (
                "balances",
                f"by penstock.partition's methods of the same names, on one profile. {_BALANCES}",
            ),
            ("M", "micro-batches per batch, the paper's chunks"),
            (
                "statistics",
                (
                    "95 % intervals by Student's t over repetitions, Welch's test, computed by "
                    "Penstock"
                ),
            ),
        )
    )


def _explanations(processes: Explained, balances: Explained) -> Section:
    """Return the section on the paper's two explanations."""
    return Section(
        "The paper's explanations, tested",
        (
            Text(
                "The paper supposes that DeepSpeed scales because it adds data parallelism by "
                "itself. The other explanation is that it has one process per stage: the launches "
                "of all stages go on at once."
            ),
            processes.table,
            Text(processes.conclusion),
            Text("Does it matter whether stages are balanced by time or by size?"),
            balances.table,
            Text(balances.conclusion),
        ),
    )


def _chart(common: Template, measurements: Measurements) -> Chart:
    """Return times by devices, in the paper and here, at most micro-batches."""
    series = []
    for library, (schedule, more) in LIBRARIES.items():
        balance_name = "uniform" if library == "deepspeed" else "time"
        published = {}
        for cell in published_cells():
            if (cell.library, cell.balance, cell.micro_batches) == (library, balance_name, MOST):
                published[cell.gpus] = cell.seconds / STEPS
        x = tuple(float(gpus) for gpus in sorted(published))
        y = tuple(seconds for _, seconds in sorted(published.items()))
        series.append(Series(f"{library}, paper", x, y))
        seconds_of_gpus = {}
        for gpus in GPUS:
            measured = measurements.of(
                common.cell(library, schedule, gpus, MOST, balance_name, more)
            )
            if measured.step is not None:
                seconds_of_gpus[float(gpus)] = measured.step.mean
        if seconds_of_gpus:
            series.append(
                Series(f"{library}, here", tuple(seconds_of_gpus), tuple(seconds_of_gpus.values()))
            )
    return Chart(
        "times",
        "Seconds per step, M = 16",
        "devices",
        "seconds per step",
        tuple(series),
        log_y=True,
        caption="torchgpipe and FairScale balanced by time, DeepSpeed uniform. Beyond "
        f"{measurements.cores} devices the times here mean nothing.",
    )


def _coverage(records: Sequence[Record], total: int) -> str:
    """Return how many cells have a result, and why others have none."""
    ended = sum(record.ok for record in records)
    causes: dict[str, int] = {}
    for record in records:
        if not record.ok:
            cause = f"{record.cell.system} {record.status}"
            causes[cause] = causes.get(cause, 0) + 1
    text = f"{ended} of {total} runs have a result"
    if causes:
        text += ": " + ", ".join(f"{count} x {cause}" for cause, count in sorted(causes.items()))
    if len(records) < total:
        text += f"; {total - len(records)} have not run yet"
    return text + "."


def _fastest(common: Template, measurements: Measurements) -> str:
    """Return which system is fastest where times mean something."""
    candidates = []
    for cell in other_cells(common):
        measured = measurements.of(cell)
        if measured.step is not None and 1 < cell.stages <= measurements.cores:
            candidates.append((measured.step.mean, cell))
    if not candidates:
        return "No cell with more than one stage has as few stages as this machine has cores."
    seconds, cell = min(candidates, key=lambda pair: pair[0])
    return (
        f"Of the other systems on {cell.stages} devices, {cell.system_label} at M = "
        f"{cell.micro_batches} is fastest: {seconds * 1e3:.1f} ms a step."
    )
