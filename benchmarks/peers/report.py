"""The results of `penstock study libraries` as tables and as a picture."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: What others are compared with.
OURS = "penstock 1f1b"
#: In the picture, by the first word of a system's name.
COLOURS = {
    "penstock": "#c8102e",
    "torch": "#ee7f2d",
    "torchgpipe": "#8a6fb0",
    "fairscale": "#4878a8",
    "deepspeed": "#2f9e8f",
    "ddp": "#b08d57",
    "plain": "#8c8c8c",
    "floor": "#3a3a3a",
}

FINE = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.4, 1.6, 1.8, 2, 2.2, 2.5, 3)
COARSE = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 10, 20, 50)


def table(cell: Mapping[str, Any]) -> str:
    """One cell, the fastest first."""
    bound = cell["bound_ms"]
    head = f"{cell['workload']}, {cell['stages']} ranks, {cell['micro_batches']} micro-batches, cut {cell['lengths']}"
    if bound["alone"]:
        head += f"; bound {bound['alone']:.2f} ms by ops alone, {bound['together']:.2f} ms by ops together"
    lines = [
        head,
        (
            f"  {'':24}{'ms/step':>10}{'to ours':>9}{'spread':>15}{'of bound':>10}{'together':>10}"
            f"{'MiB/rank':>10}{'MiB in all':>12}{'gradients':>11}"
        ),
    ]
    done = {name: row for name, row in cell["systems"].items() if "step_ms" in row}
    for name, row in sorted(done.items(), key=lambda pair: pair[1]["step_ms"]):
        lines.append(_system_line(name, row))
    lines += [
        f"  {name:24}{row['note']}" for name, row in cell["systems"].items() if name not in done
    ]
    return "\n".join(lines)


def _system_line(name: str, row: Mapping[str, Any]) -> str:
    """Return a system's line of the table."""
    ratio, efficiency = row.get("ratio"), row.get("efficiency")
    peaks = [peak / 2**20 for peak in row["peak_bytes_by_process"]]
    median = f"{ratio['median']:.2f}" if ratio else "-"
    spread = ""
    if ratio and name != OURS:
        spread = f"{ratio['lower_quartile']:.2f} - {ratio['upper_quartile']:.2f}"
    alone = f"{efficiency['alone']:.1%}" if efficiency else "-"
    together = f"{efficiency['together']:.1%}" if efficiency else "-"
    error = f"{row['gradient_error']:.0e}" if "gradient_error" in row else "-"
    note = f"  {row['note']}" if "note" in row else ""
    return (
        f"  {name:24}{row['step_ms']:>10.2f}{median:>9}{spread:>15}{alone:>10}{together:>10}"
        f"{max(peaks):>10.0f}{sum(peaks):>12.0f}{error:>11}{note}"
    )


def picture(cells: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A row of bars for each cell: times of a step in terms of ours, a panel for each workload."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    panels = {
        name: list(rows)
        for name, rows in itertools.groupby(cells, key=lambda cell: cell["workload"])
    }
    names = _compared_systems(cells)
    if not names:
        return
    figure, axes = plt.subplots(
        len(panels),
        1,
        figsize=(max(8.0, 1.0 + 2.0 * max(map(len, panels.values()))), 3.0 * len(panels) + 1),
        squeeze=False,
        layout="constrained",
    )
    for axis, (workload, rows) in zip(axes[:, 0], panels.items(), strict=True):
        for name in names:
            _draw_bars(axis, rows, name, names)
        _format_axis(axis, rows, names)
        axis.set_title(workload, loc="left", fontsize=10)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _compared_systems(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the systems that have a ratio to ours in some cell, in the order of `COLOURS`."""
    names: dict[str, None] = {}
    for cell in cells:
        for name, row in cell["systems"].items():
            if "ratio" in row and name != OURS:
                names[name] = None
    return sorted(names, key=_peer_place)


def _ratios(rows: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, Mapping[str, float]]]:
    """Return a system's ratios to ours with the index of their row."""
    return [
        (index, row["systems"][name]["ratio"])
        for index, row in enumerate(rows)
        if "ratio" in row["systems"].get(name, {})
    ]


def _draw_bars(
    axis: Any, rows: Sequence[Mapping[str, Any]], name: str, names: Sequence[str]
) -> None:
    """Draw the bars of one system, from 1 to its median ratio, with the quartiles."""
    width = 0.86 / len(names)
    offset = (names.index(name) - (len(names) - 1) / 2) * width
    ratios = _ratios(rows, name)
    xs = [index + offset for index, _ in ratios]
    medians = [ratio["median"] for _, ratio in ratios]
    spread = [
        [ratio["median"] - ratio["lower_quartile"] for _, ratio in ratios],
        [ratio["upper_quartile"] - ratio["median"] for _, ratio in ratios],
    ]
    colour, hatch, shade = _style(name, names)
    axis.bar(
        xs,
        [median - 1 for median in medians],
        width,
        bottom=1,
        color=colour,
        alpha=shade,
        hatch=hatch,
        label=name,
        edgecolor="white",
        linewidth=0.3,
    )
    if ratios:
        axis.errorbar(xs, medians, yerr=spread, fmt="none", ecolor="black", elinewidth=0.6)


def _format_axis(axis: Any, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Set scale, limits, ticks and labels of a panel."""
    axis.set_yscale("log", base=2)
    axis.minorticks_off()
    ratios = [ratio for name in names for _, ratio in _ratios(rows, name)]
    bottom = 0.92 * min([0.85, *(ratio["lower_quartile"] for ratio in ratios)])
    top = 1.08 * max([1.3, *(ratio["upper_quartile"] for ratio in ratios)])
    ticks = [tick for tick in (COARSE if top > 5 * bottom else FINE) if bottom < tick < top]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_ylim(bottom, top)
    axis.axhline(1, color=COLOURS["penstock"], linewidth=1)
    axis.set_xticks(
        range(len(rows)), [f"{row['stages']} ranks, M = {row['micro_batches']}" for row in rows]
    )
    axis.set_xlim(-0.5, len(rows) - 0.5)
    axis.grid(axis="y", color="#dddddd", linewidth=0.5)
    axis.set_axisbelow(True)
    axis.set_ylabel("step, in terms of\nPenstock 1F1B", fontsize=8)
    axis.tick_params(labelsize=8)


def _peer(name: str) -> str:
    """Return the library of a system; both floors are one."""
    peer = name.split(maxsplit=1)[0].rstrip(",:")
    return "floor" if peer.startswith("floor") else peer


def _peer_place(name: str) -> int:
    return list(COLOURS).index(_peer(name)) if _peer(name) in COLOURS else len(COLOURS)


def _style(name: str, names: Sequence[str]) -> tuple[str, str, float]:
    """A colour for the peer; its systems differ by shade and hatching."""
    peer = _peer(name)
    place = [candidate for candidate in names if _peer(candidate) == peer].index(name)
    return COLOURS.get(peer, "#999999"), ("", "////", "....")[place % 3], (1.0, 0.8, 0.6)[place % 3]
