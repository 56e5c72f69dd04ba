"""Penstock beside its peers: `penstock study libraries`, with its results kept here.

Runs the study (README.md says how it measures and how peers are installed), then writes
results.json and figure.png from its records. All flags but those below are the study's.

    python benchmarks/peers/run.py                  # 2 comparisons
    python benchmarks/peers/run.py --scale full     # 16 comparisons
    python benchmarks/peers/run.py --draw           # only print and draw what results.json holds
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.cli.main import status
from penstock.study.in_turn import REFERENCE
from penstock.study.ratios import quartiles, ratios
from penstock.study.records import Record, Records
from penstock.study.run_study import machine_facts
from penstock.study.runner import comparison
from penstock.study.settings import Settings
from penstock.study.studies.libraries import STUDY, Libraries
from report import picture, table

HERE = Path(__file__).parent


def results_of(records: Sequence[Record], machine: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of results.json: a cell per comparison, with all its systems."""
    groups: dict[Any, list[Record]] = {}
    versions: dict[str, dict[str, str]] = {}
    for record in records:
        groups.setdefault(comparison(record.cell), []).append(record)
        versions[record.cell.system] = record.outcome.extra.get("versions", {})
    cells = [_cell(group) for group in groups.values()]
    return {"machine": dict(machine), "versions": versions, "cells": cells}


def _cell(records: Sequence[Record]) -> dict[str, Any]:
    """Return one comparison."""
    cell = records[0].cell
    reference = next(
        (record for record in records if (record.cell.system, record.cell.schedule) == REFERENCE),
        None,
    )
    pairs: list[list[float]] = []
    lengths: dict[str, list[int]] = {}
    for record in records:
        extra = record.outcome.extra
        if record.cell.system == "bound":
            pairs = list(extra.get("bounds", {}).values())
        if record.cell.system == "bound" and record.ok:
            lengths = {"lengths": extra["lengths"], "halves": extra["halves"]}
    alone, together = (
        statistics.median(pair[index] for pair in pairs) if pairs else None for index in (0, 1)
    )
    systems = {}
    for record in records:
        if record.cell.system != "bound":
            systems[record.cell.system_label] = _row(record, reference, (alone, together))
    return {
        "workload": cell.model,
        "stages": cell.stages,
        "micro_batches": cell.micro_batches,
        "lengths": lengths.get("lengths", []),
        "lengths_of_halves": lengths.get("halves", []),
        "bound_ms": {"alone": _ms(alone), "together": _ms(together)},
        "systems": systems,
    }


def _row(
    record: Record, reference: Record | None, bounds: tuple[float | None, float | None]
) -> dict[str, Any]:
    """Return one system of a comparison."""
    outcome = record.outcome
    if not outcome.seconds:
        return {"note": f"{record.status}: {record.reason}"}
    step = statistics.median(outcome.seconds)
    row: dict[str, Any] = {
        "step_ms": _ms(step),
        "step_ms_by_round": [_ms(seconds) for seconds in outcome.seconds],
        "peak_bytes_by_process": list(outcome.peak_bytes),
        "gradient_error": outcome.extra.get("gradient_error"),
        "idle_cpu_s": round(outcome.extra.get("idle_s", 0.0), 3),
    }
    spread = quartiles(ratios(record, reference)) if reference is not None else None
    if spread is not None:
        row["ratio"] = {
            "lower_quartile": round(spread.low, 3),
            "median": round(spread.median, 3),
            "upper_quartile": round(spread.high, 3),
        }
    if bounds[0] and bounds[1]:
        row["efficiency"] = {
            "alone": round(bounds[0] / step, 3),
            "together": round(bounds[1] / step, 3),
        }
    if record.reason:
        row["note"] = record.reason
    return row


def _ms(seconds: float | None) -> float | None:
    """Return milliseconds to microseconds."""
    return None if seconds is None else round(seconds * 1e3, 3)


def main() -> None:
    """Run the study, print its tables, and write results.json and figure.png."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", action="store_true", help="only print and draw the results")
    parser.add_argument("--scale", choices=("small", "full"), default="small")
    parser.add_argument("--out", type=Path, default=Path("runs/libraries"), help="records")
    parser.add_argument("--results", type=Path, default=HERE / "results.json")
    arguments, flags = parser.parse_known_args()
    drawn = arguments.results.with_name("figure.png")
    if not arguments.draw:
        words = ["study", STUDY, "--scale", arguments.scale, "--out", str(arguments.out), *flags]
        code = status(words)
        if code:
            sys.exit(code)
        records = Records(arguments.out, STUDY, machine_facts())
        finished = records.of(Libraries().cells(Settings(arguments.scale)))
        results = results_of(finished, records.machine)
        arguments.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    cells = json.loads(arguments.results.read_text(encoding="utf-8"))["cells"]
    print(*map(table, cells), sep="\n\n")
    picture(cells, drawn)


if __name__ == "__main__":
    main()
