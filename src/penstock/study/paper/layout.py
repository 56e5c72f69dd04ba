"""Tables 2 and 3 in the paper's layout, and all cells with intervals and tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from penstock.report.document import Column, Table, Value
from penstock.study.cell import Cell
from penstock.study.intervals import half_width_of, mean_of
from penstock.study.paper.cells import Template, paper_cell
from penstock.study.paper.measured import Measurements, p_value, ratio
from penstock.study.paper.published import GPUS, STEPS, PublishedCell, published_cells
from penstock.study.paper.simulated import simulated_seconds
from penstock.study.records import Record

SOURCE = ("records.jsonl",)
#: Library, balance and micro-batches: a column of the paper's tables.
Combination = tuple[str, str, int]


def _combinations(table: int) -> list[Combination]:
    """Return the columns of one of the paper's tables."""
    combinations: dict[Combination, None] = {}
    for cell in published_cells():
        if cell.table == table:
            combinations[cell.library, cell.balance, cell.micro_batches] = None
    order = ("torchgpipe", "fairscale", "deepspeed")
    return sorted(combinations, key=lambda key: (order.index(key[0]), key[1] != "size", key[2]))


def layout_table(
    table: int, common: Template, measurements: Measurements, data: str, method: str
) -> Table:
    """Return table 2 or 3 as the paper has it: per number of devices the losses and times here, in
    the paper, and simulated.

    Args:
        table: 2 or 3.
        common: of the cells here.
        measurements: of the cells here.
        data: description of the data, for the caption.
        method: how the time of 25 epochs here was measured, for the caption.
    """
    columns = [Column("devices", "number", 0), Column("source")]
    combinations = _combinations(table)
    for library, balance, micro_batches in combinations:
        name = f"{library} {balance}"
        if table == 3:
            name += f" M={micro_batches}"
        columns += [
            Column(f"{name}: loss", "number", 2, "training loss"),
            Column(f"{name}: time", "seconds", about="of 25 epochs"),
        ]
    rows: list[tuple[Value, ...]] = []
    for gpus in GPUS:
        cells = [_published(table, combination, gpus) for combination in combinations]
        rows.append((gpus, "paper, A100", *_flat((cell.loss, cell.seconds) for cell in cells)))
        rows.append(
            (gpus, "simulated A100", *_flat((None, simulated_seconds(cell)) for cell in cells))
        )
        measured_pairs: list[tuple[Value, Value]] = []
        for cell in cells:
            measured = measurements.of(paper_cell(common, cell))
            step, loss = measured.step, measured.loss
            measured_pairs.append((mean_of(loss), _product(mean_of(step), STEPS)))
        meaning = "" if gpus <= measurements.cores else " (times mean nothing)"
        rows.append((gpus, f"here{meaning}", *_flat(measured_pairs)))
    micro = "M = 16" if table == 2 else "M = 1 and 8"
    return Table(
        f"table-{table}",
        f"Table {table} of the paper: loss and time, {micro}",
        tuple(columns),
        tuple(rows),
        f"Paper: CIFAR-100 on A100. Here: {data}; {method}. Rows with more devices than the "
        f"{measurements.cores} cores of this machine have processes that share cores: their times "
        "mean nothing.",
        SOURCE,
    )


def _flat(pairs: Iterable[tuple[Value, Value]]) -> list[Value]:
    """Return the values of pairs, one after the other."""
    values: list[Value] = []
    for pair in pairs:
        values += pair
    return values


def _product(value: float | None, factor: float) -> float | None:
    """Return a value times a factor, or None without the value."""
    return None if value is None else value * factor


def _published(table: int, combination: Combination, gpus: int) -> PublishedCell:
    """Return a cell of the paper."""
    for cell in published_cells():
        key = (cell.library, cell.balance, cell.micro_batches)
        if cell.table == table and key == combination and cell.gpus == gpus:
            return cell
    raise KeyError(combination)


DETAIL_COLUMNS = (
    Column("M", "number", 0, "micro-batches per batch; the paper's chunks"),
    Column("devices", "number", 0),
    Column("library"),
    Column("balance"),
    Column("runs", "number", 0, "repetitions that ended"),
    Column("time/step", "seconds", about="mean over repetitions"),
    Column("± time", "seconds", about="half of the 95 % interval of the mean (t-distribution)"),
    Column("paper's time/step", "seconds", about="25 epochs over 9,766 steps"),
    Column("loss", "number", 3, "mean over repetitions of the last training loss"),
    Column("± loss", "number", 3, "half of the 95 % interval of the mean (t-distribution)"),
    Column("paper's loss", "number", 2),
    Column("speed-up", "number", 2, "over 2 devices with the same library, balance and M"),
    Column("paper's speed-up", "number", 2, "over 2 devices, in the paper"),
    Column("efficiency", "percent", 0, "speed-up over devices / 2"),
    Column("to Penstock", "number", 2, "time over that of Penstock's 1F1B, same M, cut by time"),
    Column("p", "number", 3, "Welch's t-test that the two times are equal"),
    Column("peak", "bytes", about="largest peak memory of a rank, above its imports"),
    Column("note"),
)


def detail_table(common: Template, measurements: Measurements) -> Table:
    """Return a row for each of the paper's 56 cells."""
    rows = [_detail_row(cell, common, measurements) for cell in published_cells()]
    return Table(
        "cells",
        "The paper's 56 cells, with intervals and tests",
        DETAIL_COLUMNS,
        tuple(rows),
        "A small p (below 0.05) means that the difference to Penstock is unlikely to be chance; "
        "with 56 comparisons about three are below 0.05 by chance alone.",
        SOURCE,
    )


def _detail_row(
    published: PublishedCell, common: Template, measurements: Measurements
) -> tuple[Value, ...]:
    """Return the measurements of a published cell beside its published figures."""
    cell = paper_cell(common, published)
    measured = measurements.of(cell)
    first = measurements.of(replace(cell, stages=GPUS[0]))
    reference = measurements.of(
        common.cell("penstock", "1f1b", cell.stages, cell.micro_batches, "time")
    )
    two_devices = replace(published, gpus=GPUS[0])
    published_first = next(other for other in published_cells() if _same(other, two_devices))
    step, loss = measured.step, measured.loss
    speed_up = ratio(first, measured)
    return (
        published.micro_batches,
        published.gpus,
        published.library,
        published.balance,
        len(measured.steps),
        mean_of(step),
        half_width_of(step),
        published.seconds / STEPS,
        mean_of(loss),
        half_width_of(loss),
        published.loss,
        speed_up,
        published_first.seconds / published.seconds,
        _product(speed_up, GPUS[0] / published.gpus),
        ratio(measured, reference),
        p_value(measured, reference),
        max(measured.peaks, default=None),
        measurements.note(cell),
    )


def _same(first: PublishedCell, second: PublishedCell) -> bool:
    """Whether two published cells differ at most in their results."""
    return str(first) == str(second)


OTHER_COLUMNS = (
    Column("devices", "number", 0),
    Column("M", "number", 0),
    Column("system"),
    Column("balance"),
    Column("cut", about="layers per stage"),
    Column("runs", "number", 0),
    Column("time/step", "seconds"),
    Column("±", "seconds", about="half of the 95 % interval of the mean (t-distribution)"),
    Column("loss", "number", 3),
    Column("to plain", "number", 2, "speed-up over plain training in one process with one thread"),
    Column("efficiency", "percent", 0, "speed-up over plain training per rank"),
    Column("to Penstock", "number", 2, "time over that of Penstock's 1F1B, same M, cut by time"),
    Column("p", "number", 3, "Welch's t-test that the two times are equal"),
    Column("peak", "bytes", about="largest peak memory of a rank, above its imports"),
    Column("note"),
)


def other_table(cells: Sequence[Cell], common: Template, measurements: Measurements) -> Table:
    """Return a row for each cell of other systems."""
    plain = measurements.of(common.cell("plain"))
    rows: list[tuple[Value, ...]] = []
    for cell in cells:
        measured = measurements.of(cell)
        reference = measurements.of(
            common.cell("penstock", "1f1b", cell.stages, cell.micro_batches, "time")
        )
        step, loss = measured.step, measured.loss
        speed_up = ratio(plain, measured)
        lengths, ranks = _cut_and_ranks(measured.records)
        rows.append(
            (
                cell.stages,
                cell.micro_batches,
                cell.system_label,
                cell.balance,
                lengths,
                len(measured.steps),
                mean_of(step),
                half_width_of(step),
                mean_of(loss),
                speed_up,
                speed_up / ranks if speed_up and ranks else None,
                ratio(measured, reference),
                p_value(measured, reference),
                max(measured.peaks, default=None),
                measurements.note(cell),
            )
        )
    return Table(
        "systems",
        "Other systems on the same numbers of devices and micro-batches",
        OTHER_COLUMNS,
        tuple(rows),
        "Model, initial weights, batches, loss, optimizer and cut are equal; `auto`, DDP, FSDP2 "
        "and plain training have their own division. M has no effect on the last three.",
        SOURCE,
    )


def _cut_and_ranks(records: Sequence[Record]) -> tuple[str, int | None]:
    """Return the cut as a text and the number of ranks of the first run that ended."""
    for record in records:
        extra = record.outcome.extra
        if "ranks" in extra:
            return "-".join(map(str, extra["lengths"])), int(extra["ranks"])
    return "", None
