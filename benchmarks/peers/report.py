"""The results of `penstock study libraries` as tables and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: What others are compared with.
OURS = "penstock 1f1b"
#: In the picture, by library.
COLOURS = {
    "penstock": "#c8102e",
    "torch": "#ee7f2d",
    "torchgpipe": "#8a6fb0",
    "fairscale": "#4878a8",
    "deepspeed": "#2f9e8f",
    "ddp": "#b08d57",
    "fsdp2": "#8a6a33",
    "plain": "#707070",
    "floor": "#3a3a3a",
}
OTHER_COLOUR = "#707070"

#: Ticks of narrow and of wide ranges.
FINE = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.4, 1.6, 2, 2.5, 3)
COARSE = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)


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
    """Draw a panel per cell: systems from the fastest down, with median and quartiles of the ratio
    to ours, and a colour per library.
    """
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    panels = [(cell, ratios) for cell in cells if (ratios := _ratios(cell))]
    if not panels:
        return
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    height = 1.0 + 0.19 * max(len(ratios) for _, ratios in panels)
    figure, axes = plt.subplots(
        rows, columns, figsize=(4.3 * columns, height * rows), squeeze=False, layout="constrained"
    )
    for axis, (cell, ratios) in zip(axes.flat, panels, strict=False):
        _draw_panel(axis, ratios)
        axis.set_title(
            f"{cell['workload']}, {cell['stages']} ranks, {cell['micro_batches']} micro-batches",
            loc="left",
            fontsize=9,
        )
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    figure.supxlabel("time of a step, in terms of Penstock 1F1B (less is faster)", fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _ratios(cell: Mapping[str, Any]) -> list[tuple[str, Mapping[str, float]]]:
    """Return the systems of a cell that have a ratio to ours, the fastest first."""
    ratios = [(name, row["ratio"]) for name, row in cell["systems"].items() if "ratio" in row]
    return sorted(ratios, key=lambda pair: pair[1]["median"])


def _draw_panel(axis: Any, ratios: Sequence[tuple[str, Mapping[str, float]]]) -> None:
    """Draw the systems of one cell."""
    for place, (name, ratio) in enumerate(ratios):
        colour = COLOURS.get(_library(name), OTHER_COLOUR)
        quartiles = (ratio["lower_quartile"], ratio["upper_quartile"])
        axis.plot(quartiles, (place, place), color=colour, linewidth=3, alpha=0.4)
        axis.plot(ratio["median"], place, "o", color=colour, markersize=4)
    low = min(ratio["lower_quartile"] for _, ratio in ratios)
    high = max(ratio["upper_quartile"] for _, ratio in ratios)
    axis.set_xscale("log", base=2)
    axis.minorticks_off()
    ticks = [tick for tick in (COARSE if high > 5 * low else FINE) if low < tick < high]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.axvline(1, color=COLOURS["penstock"], linewidth=0.8)
    axis.set_yticks(range(len(ratios)), [name for name, _ in ratios])
    for label, (name, _) in zip(axis.get_yticklabels(), ratios, strict=True):
        label.set_color(COLOURS.get(_library(name), OTHER_COLOUR))
    axis.invert_yaxis()
    axis.grid(axis="x", color="#dddddd", linewidth=0.5)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=7)


def _library(name: str) -> str:
    """Return the library of a system; both floors are one, and ps.Pipe is Penstock's."""
    return name.split(maxsplit=1)[0].split("-", maxsplit=1)[0]
