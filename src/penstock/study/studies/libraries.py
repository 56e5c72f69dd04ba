"""`penstock study libraries`: Penstock beside its peers, at equal work, in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.peers.catalogue import system, systems
from penstock.peers.measuring import BOUND
from penstock.report.document import (
    Chart,
    Column,
    Page,
    Report,
    Section,
    Table,
    Text,
    Value,
)
from penstock.search.schedules import schedules
from penstock.study.catalogue import register
from penstock.study.cell import Cell, Options, options
from penstock.study.in_turn import REFERENCE
from penstock.study.ratios import Quartiles, quartiles, ratios
from penstock.study.records import Record
from penstock.study.runner import comparison
from penstock.study.settings import Settings
from penstock.study.tables import bars, typical_seconds

STUDY = "libraries"
#: Options of systems that are compared besides the defaults.
VARIANTS: dict[str, tuple[Options, ...]] = {
    "torchgpipe": (options(checkpoint="never"), options(checkpoint="always")),
    "fairscale": (options(checkpoint="never"), options(checkpoint="always")),
    "penstock-pipe": (options(checkpoint="never"), options(checkpoint="always")),
    "ddp": ((), options(accumulate=True)),
}
#: Pipelines written by hand without checks: what a pipeline cannot leave out. They are in the
#: tables, but are no libraries.
_FLOORS = ("floor-gloo", "floor-memory", "floor-memory-1f1b")
#: Systems that are compared as equals, by stages per rank.
_CLASSES = {
    1: "One stage per rank",
    2: "Two stages per rank",
    0: "Own division of the work",
}
_ROUNDS = {"small": 3, "full": 5}


@dataclass(frozen=True)
class Workload:
    """A model and a batch, with the numbers of micro-batches to compare."""

    model: str
    model_options: Options
    batch: int
    micro_batches: tuple[int, ...]
    momentum: float


WORKLOADS = (
    Workload("mlp", options(layers=8, hidden=64, features=64, classes=64), 64, (16,), 0.0),
    Workload(
        "gpt",
        options(layers=12, width=256, heads=4, tokens=128, vocabulary=512),
        32,
        (4, 8, 16),
        0.9,
    ),
    Workload("vgg19", options(classes=100, image=32, dropout=0.0), 128, (1, 4, 8, 16), 0.9),
)
#: Model and micro-batches on 2 ranks at the small scale.
_SMALL = {("mlp", 16), ("gpt", 8)}


@register(
    STUDY,
    about="Which library and schedule is fastest at equal work, and what do they need in memory?",
    in_turn=True,
    limit_s=120.0,
)
class Libraries:
    """All systems on equal cuts, taking steps in turn; equal with equal and best with best."""

    def cells(self, settings: Settings) -> list[Cell]:
        """Return a cell per system, schedule and option, for each model, batch and cut."""
        cells = []
        for workload in WORKLOADS:
            for stages in (2, 4):
                for micro_batches in workload.micro_batches:
                    small = stages == 2 and (workload.model, micro_batches) in _SMALL
                    if settings.scale == "full" or small:
                        base = _base(workload, stages, micro_batches, settings)
                        cells += _entrants(base)
        return cells

    def report(self, settings: Settings, records: Sequence[Record]) -> Report:
        """Return a page per comparison."""
        groups: dict[Cell, list[Record]] = {}
        for record in records:
            groups.setdefault(comparison(record.cell), []).append(record)
        pages = []
        for number, (cell, group) in enumerate(groups.items(), start=1):
            pages.append(_page(number, cell, group, settings))
        return Report("Libraries at equal work", tuple(pages))


def _base(workload: Workload, stages: int, micro_batches: int, settings: Settings) -> Cell:
    """Return what the cells of a comparison have in common. `steps` is the number of rounds."""
    return Cell(
        STUDY,
        stages=stages,
        micro_batches=micro_batches,
        balance="bottleneck",
        model=workload.model,
        model_options=workload.model_options,
        data=settings.data or "random",
        batch=workload.batch,
        steps=settings.repetitions or _ROUNDS[settings.scale],
        options=options(momentum=workload.momentum),
    )


def _entrants(base: Cell) -> list[Cell]:
    """Return the cells of a comparison, the reference first."""
    cells = []
    for name, entrant in systems().items():
        for schedule in entrant.schedules or ("",):
            for variant in VARIANTS.get(name, ((),)):
                more = options(dict(variant), **dict(base.options))
                cells.append(replace(base, system=name, schedule=schedule, options=more))
    # False sorts first, and the order of all others stays.
    cells.sort(key=lambda cell: (cell.system, cell.schedule) != REFERENCE)
    return cells


def _page(number: int, cell: Cell, records: Sequence[Record], settings: Settings) -> Page:
    """Return the page of one comparison: best with best, and equal with equal."""
    reference = _reference(records)
    tables = []
    for stages_per_rank, title in _CLASSES.items():
        chosen = [record for record in records if _stages_per_rank(record.cell) == stages_per_rank]
        name = f"comparison-{number}-{stages_per_rank}-stages"
        tables.append(_table(name, title, chosen, reference, records))
    best = _best_table(f"comparison-{number}-best", records, reference)
    sections = (
        Section("Best with best", (best, _chart(number, records, reference))),
        Section("Equal with equal", (Text(_EQUAL), *tables)),
    )
    title = f"{cell.model}, {cell.stages} ranks, {cell.micro_batches} micro-batches"
    command = f"penstock study libraries --scale {settings.scale}"
    return Page(f"comparison-{number}", title, sections, command, _summary(records, reference))


_EQUAL = (
    "Model, initial weights, batch, loss, optimizer, number of ranks, one thread per rank and the "
    "cut are equal. Before a system is timed, the gradients of all its parameters are compared "
    "with plain training's. Systems take steps in turn in each round; a ratio is that of the same "
    "round."
)


def _reference(records: Sequence[Record]) -> Record | None:
    """Return the record that others are compared with, if it has times."""
    for record in records:
        if (record.cell.system, record.cell.schedule) == REFERENCE and record.ok:
            return record
    return None


def _stages_per_rank(cell: Cell) -> int:
    """Return how many stages a rank of the cell's system has."""
    return system(cell.system).stages_per_rank(cell.schedule)


def _quartiles(record: Record, reference: Record | None) -> Quartiles | None:
    """Return the quartiles of a record's ratio to the reference."""
    return quartiles(ratios(record, reference)) if reference is not None else None


_COLUMNS = (
    Column("system"),
    Column("step", "seconds", about="median over rounds of the median step of a round"),
    Column("ratio", "number", 2, "time over that of Penstock's 1F1B in the same round, median"),
    Column("from", "number", 2, "first quartile of the ratio"),
    Column("to", "number", 2, "third quartile of the ratio"),
    Column(
        "of bound",
        "percent",
        0,
        "what no step can be faster than, over the step; where a rank has one stage of the cut and "
        "whole backwards",
    ),
    Column("rank", "bytes", about="largest peak memory of a process, above its imports"),
    Column("all ranks", "bytes", about="sum over processes"),
    Column("gradients", about="largest error of a gradient over the largest gradient"),
    Column("note"),
)


def _table(
    name: str,
    title: str,
    records: Sequence[Record],
    reference: Record | None,
    comparison_records: Sequence[Record],
) -> Table:
    """Return a row per system, the fastest first."""
    bound = _bound(comparison_records)
    rows = []
    for record in records:
        if record.cell.system != BOUND:
            rows.append(_row(record, reference, bound))
    # Rows without a time come last.
    rows.sort(key=lambda row: (row[1] is None, row[1] if isinstance(row[1], float) else 0.0))
    return Table(name, title, _COLUMNS, tuple(rows), "", ("records.jsonl",))


def _row(record: Record, reference: Record | None, bound: float | None) -> tuple[Value, ...]:
    """Return the row of a run, beside the reference and the bound."""
    outcome = record.outcome
    step = typical_seconds(record) if outcome.seconds else None
    spread = _quartiles(record, reference)
    error = outcome.extra.get("gradient_error")
    return (
        record.cell.system_label,
        step,
        spread.median if spread else None,
        spread.low if spread else None,
        spread.high if spread else None,
        bound / step if bound and step and _is_bounded(record.cell) else None,
        max(outcome.peak_bytes, default=None),
        sum(outcome.peak_bytes) if outcome.peak_bytes else None,
        f"{error:.0e}" if error is not None else "",
        "" if record.ok else f"{record.status}: {record.reason}",
    )


def _is_bounded(cell: Cell) -> bool:
    """Return whether the bound of `penstock.peers.measuring.bound_seconds` holds for a system.

    It is derived for one process per stage and whole backwards. A split backward lets a rank work
    while its gradient passes the stages before it; two stages on a rank have another cut, and
    several threads take less time for an op than the one with which ops are timed.
    """
    chosen = system(cell.system)
    if chosen.processes != "ranks" or chosen.stages_per_rank(cell.schedule) != 1:
        return False
    if not cell.schedule:
        return True
    facts = schedules().get(cell.schedule)
    return facts is not None and not facts.splits_backward


def _bound(records: Sequence[Record]) -> float | None:
    """Return the median bound of a comparison, from ops timed alone."""
    for record in records:
        if record.cell.system == BOUND and record.ok:
            return typical_seconds(record)
    return None


def _fastest(records: Sequence[Record]) -> dict[str, Record]:
    """Return the fastest record of each library, the fastest library first; floors and the bound
    are none.
    """
    fastest: dict[str, Record] = {}
    for record in records:
        name = record.cell.system
        if not record.ok or not record.outcome.seconds or name in (BOUND, *_FLOORS):
            continue
        best = fastest.get(name)
        if best is None or typical_seconds(record) < typical_seconds(best):
            fastest[name] = record
    return dict(sorted(fastest.items(), key=lambda pair: typical_seconds(pair[1])))


def _best_table(name: str, records: Sequence[Record], reference: Record | None) -> Table:
    """Return the fastest schedule of each library, over all and with one stage per rank."""
    rows: list[tuple[Value, ...]] = []
    one_stage = _fastest([record for record in records if _stages_per_rank(record.cell) == 1])
    for library, best in _fastest(records).items():
        spread = _quartiles(best, reference)
        equal = one_stage.get(library)
        equal_spread = _quartiles(equal, reference) if equal else None
        rows.append(
            (
                library,
                best.cell.system_label,
                typical_seconds(best),
                spread.median if spread else None,
                spread.low if spread else None,
                spread.high if spread else None,
                equal.cell.system_label if equal else "",
                equal_spread.median if equal_spread else None,
            )
        )
    columns = (
        Column("library"),
        Column("its fastest"),
        Column("step", "seconds"),
        Column("ratio", "number", 2, "time over that of Penstock's 1F1B in the same round, median"),
        Column("from", "number", 2, "first quartile"),
        Column("to", "number", 2, "third quartile"),
        Column("fastest with one stage per rank"),
        Column("its ratio", "number", 2),
    )
    return Table(name, "Fastest of each library", columns, tuple(rows), "", ("records.jsonl",))


def _chart(number: int, records: Sequence[Record], reference: Record | None) -> Chart:
    """Return a bar per library: the ratio of its fastest schedule with quartiles."""
    bar_rows = []
    for library, best in _fastest(records).items():
        spread = _quartiles(best, reference)
        if spread is not None:
            bar_rows.append((library, spread.median, spread.low, spread.high))
    series, categories = bars("ratio", bar_rows)
    return Chart(
        f"comparison-{number}-chart",
        "Step of each library's fastest schedule over that of Penstock's 1F1B",
        "library",
        "ratio, with quartiles",
        (series,),
        "bar",
        tuple(categories),
        caption="Below 1: faster than Penstock's 1F1B.",
    )


def _summary(records: Sequence[Record], reference: Record | None) -> tuple[str, ...]:
    """Return the conclusions of a comparison."""
    fastest = _fastest(records)
    sentences = []
    if fastest:
        library, best = next(iter(fastest.items()))
        spread = _quartiles(best, reference)
        ratio = f", {spread.median:.2f} of Penstock's 1F1B" if spread else ""
        sentences.append(f"Fastest: {best.cell.system_label} of {library}{ratio}.")
    missing = [
        record.cell.system_label for record in records if record.status in ("missing", "failed")
    ]
    if missing:
        sentences.append(f"Without a result: {', '.join(missing)}; the tables say why.")
    return tuple(sentences)
