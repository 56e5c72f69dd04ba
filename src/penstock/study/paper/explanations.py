"""The paper's two explanations as two comparisons: one process against one process per stage, and
balance by time against balance by size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.report.document import Column, Table, Value
from penstock.study.cell import Cell
from penstock.study.intervals import half_width_of, mean_of
from penstock.study.paper.cells import Template, balance_pairs, one_process_pairs, paper_cells
from penstock.study.paper.measured import Measured, Measurements, p_value, ratio

#: A difference with a smaller p-value is called significant.
SIGNIFICANT = 0.05

_PAIR_COLUMNS = (
    Column("devices", "number", 0),
    Column("system"),
    Column("first, time/step", "seconds"),
    Column("± first", "seconds", about="half of the 95 % interval of the mean (t-distribution)"),
    Column("second, time/step", "seconds"),
    Column("± second", "seconds", about="half of the 95 % interval of the mean (t-distribution)"),
    Column("second / first", "number", 3),
    Column("p", "number", 3, "Welch's t-test that the two times are equal"),
    Column("cuts", about="layers per stage of both"),
    Column("note"),
)


@dataclass(frozen=True)
class Explained:
    """A comparison: its table, and its conclusion in a sentence."""

    table: Table
    conclusion: str


def one_process(common: Template, measurements: Measurements) -> Explained:
    """Compare one process for all stages with one process per stage."""
    pairs = one_process_pairs(common)
    table = _pair_table(
        "one-process",
        "One process for all stages (first) against one process per stage (second)",
        pairs,
        measurements,
        "Both are Penstock's GPipe on the same cut without recomputation; neither has any data "
        "parallelism.",
    )
    sentences = _pair_sentences(
        pairs,
        measurements,
        lambda first: (
            f"On {first.stages} devices one process per stage takes {{ratio:.2f}} times as long as "
            "one process for all stages, on the same cut"
        ),
    )
    return Explained(table, " ".join([_data_parallel_sentence(common, measurements), *sentences]))


def balance(common: Template, measurements: Measurements) -> Explained:
    """Compare balance by size with balance by time."""
    pairs = balance_pairs(common)
    table = _pair_table(
        "balance",
        "Balance by size (first) against balance by time (second), M = 16",
        pairs,
        measurements,
        "All else is equal. Where both methods make the same cut, a difference is noise.",
    )
    sentences = _pair_sentences(
        pairs,
        measurements,
        lambda first: (
            f"{_name(first)} on {first.stages} devices takes by time {{ratio:.2f}} times as long "
            "as by size"
        ),
    )
    return Explained(table, " ".join(sentences))


def _pair_sentences(
    pairs: Sequence[tuple[Cell, Cell]],
    measurements: Measurements,
    text_of: Callable[[Cell], str],
) -> list[str]:
    """Return a sentence per pair whose times mean something.

    Args:
        pairs: the cells to compare.
        measurements: of all cells.
        text_of: the text for the first cell of a pair, with a place for the ratio.
    """
    return [
        _sentence(measurements.of(first), measurements.of(second), text_of(first))
        for first, second in pairs
        if measurements.is_meaningful(first)
    ]


def _pair_table(
    name: str,
    title: str,
    pairs: Sequence[tuple[Cell, Cell]],
    measurements: Measurements,
    caption: str,
) -> Table:
    """Return a table with a row per pair: both steps, their ratio, and its significance."""
    rows: list[tuple[Value, ...]] = []
    for first_cell, second_cell in pairs:
        first, second = measurements.of(first_cell), measurements.of(second_cell)
        notes = dict.fromkeys([measurements.note(first_cell), measurements.note(second_cell)])
        cuts = dict.fromkeys([_cut(first), _cut(second)])
        rows.append(
            (
                first_cell.stages,
                _name(first_cell),
                mean_of(first.step),
                half_width_of(first.step),
                mean_of(second.step),
                half_width_of(second.step),
                ratio(second, first),
                p_value(first, second),
                " and ".join(text for text in cuts if text),
                "; ".join(note for note in notes if note),
            )
        )
    return Table(name, title, _PAIR_COLUMNS, tuple(rows), caption, ("records.jsonl",))


def _name(cell: Cell) -> str:
    """Return the system of a pair; the two of `one_process_pairs` are Penstock's."""
    return cell.system.removesuffix("-pipe")


def _cut(measured: Measured) -> str:
    """Return the cut of the first run that has one, such as 5-4-4."""
    for record in measured.records:
        lengths = record.outcome.extra.get("lengths")
        if lengths:
            return "-".join(map(str, lengths))
    return ""


def _sentence(first: Measured, second: Measured, text: str) -> str:
    """Return the conclusion about a pair."""
    value = ratio(second, first)
    if value is None:
        return f"{first.cell.system} against {second.cell.system}: not measured."
    p = p_value(first, second)
    if p is None:
        verdict = "one run: no test"
    elif p < SIGNIFICANT:
        verdict = f"a significant difference, p = {p:.2g}"
    else:
        verdict = f"no significant difference, p = {p:.2g}"
    return f"{text.format(ratio=value)} ({verdict})."


def _data_parallel_sentence(common: Template, measurements: Measurements) -> str:
    """Return what DeepSpeed itself says of its data parallelism."""
    sizes = set()
    runs = 0
    for cell in paper_cells(common):
        if cell.system != "deepspeed":
            continue
        for record in measurements.of(cell).records:
            notes = record.outcome.extra.get("notes", {})
            if "data_parallel_size" in notes:
                sizes.add(int(notes["data_parallel_size"]))
                runs += 1
    if not runs:
        return "DeepSpeed did not run here, so its data parallelism was not observed."
    if sizes == {1}:
        return (
            f"DeepSpeed reports a data-parallel size of 1 in all of its {runs} runs: it adds no "
            "data parallelism to a pipeline by itself."
        )
    return f"DeepSpeed reports data-parallel sizes of {', '.join(map(str, sorted(sizes)))}."
