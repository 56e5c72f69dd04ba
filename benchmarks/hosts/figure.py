"""Draw the results of run.py: how many times as fast as DDP, by rate of the links.

python benchmarks/hosts/figure.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.report.chart import chart_svg
from penstock.report.document import Chart, Series

HERE = Path(__file__).parent
#: Label of every system, in the order of the legend.
LABELS = {
    "auto": "Penstock, auto",
    "hybrid": "Penstock, hybrid",
    "penstock-1f1b": "Penstock, 1F1B",
    "torch-1f1b": "torch, 1F1B",
    "fsdp2": "FSDP2",
    "ddp-fp16": "DDP, fp16 hook",
}


def chart_of(workload: str, hosts: int, cells: list[dict[str, Any]]) -> Chart:
    """Return the chart of a workload on a number of hosts."""
    lines = []
    for system, label in LABELS.items():
        rows = [cell for cell in cells if system in cell["systems"]]
        if rows:
            rates = tuple(float(cell["mbit"]) for cell in rows)
            ratios = tuple(cell["systems"][system]["times_ddp"] for cell in rows)
            lines.append(Series(label, rates, ratios))
    return Chart(
        f"{workload}-{hosts}-hosts",
        f"{workload}, {hosts} hosts",
        "link, Mbit/s",
        "times as fast as DDP",
        tuple(lines),
        log_x=True,
        log_y=True,
    )


def main() -> None:
    """Write one SVG per workload and number of hosts that has more than one cell."""
    cells = json.loads((HERE / "results.json").read_text())["cells"]
    for workload, hosts in sorted({(cell["workload"], cell["hosts"]) for cell in cells}):
        rows = [cell for cell in cells if (cell["workload"], cell["hosts"]) == (workload, hosts)]
        if len(rows) > 1:
            chart = chart_of(workload, hosts, rows)
            (HERE / f"{chart.name}.svg").write_text(chart_svg(chart))


if __name__ == "__main__":
    main()
