"""Draw the figures of a study: loss curves of each rule next to flush, and final metrics."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.draw.palette import BLACK, WHITE
from penstock.errors import MissingExtra
from penstock.store import write_file
from penstock.study.convergence.conclusion import Standing, metric_values
from penstock.study.convergence.experiment import BASELINE, Group
from penstock.study.convergence.report import rule_name
from penstock.study.convergence.results import Results
from penstock.study.convergence.tasks import study_task
from penstock.study.statistics import Spread, final_loss, smooth, window_length

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Colours of depths, from the palette of the drawings: the deeper, the darker. The last is used for
#: all further depths.
_DEPTH_COLOURS = ("#4f86c6", "#e99a1f", "#5b2a73", "#17744a", "#87101e")
_FLUSH_COLOUR, _FAILED_COLOUR, _GRID_COLOUR, _LABEL_COLOUR = (
    "#8b95a3",
    "#87101e",
    "#d3d8df",
    "#4a5563",
)
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    # Ids of clip paths depend on this; by default they are random.
    "svg.hashsalt": "penstock",
    "svg.fonttype": "none",
    "axes.edgecolor": "#5b6675",
    "text.color": BLACK,
    "axes.labelcolor": _LABEL_COLOUR,
    "xtick.color": _LABEL_COLOUR,
    "ytick.color": _LABEL_COLOUR,
    "axes.linewidth": 0.7,
}
#: Curves of flush, and the end of a run that was given up.
_DOTTED: dict[str, Any] = {"linestyle": (0, (1.2, 1.2))}
_CROSS: dict[str, Any] = {"linestyle": "", "marker": "x", "markeredgewidth": 1.8}
_DPI = 130
_PANELS_PER_ROW = 4

#: Returns the length of a batch on the x axis for a group; None leaves the group out.
Scale = Callable[[Group], float | None]


def draw_figures(results: Results, folder: Path) -> list[str]:
    """Draw all figures into a folder, each as PNG and SVG, and return the names of the PNGs.

    Raises:
        MissingExtra: Matplotlib is not installed.
        FileError: the folder cannot be written.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise MissingExtra("matplotlib", "draw", "the figures of a study") from error
    names = []
    with mpl.rc_context(_STYLE):  # type: ignore[arg-type]  # typed by the names that Matplotlib has
        for task in results.experiment.tasks:
            simulated = _time_scale(results, "simulated_s")
            measured = _time_scale(results, "measured_s")
            task_figures = {
                "samples": _curve_figure(results, task, "samples", _samples_per_batch),
                "simulated-time": _curve_figure(
                    results, task, "simulated seconds, one device per rank", simulated
                ),
                "measured-time": _curve_figure(
                    results, task, "measured seconds, one process per rank", measured
                ),
                "final": _final_figure(results, task),
            }
            for name, figure in task_figures.items():
                if figure is not None:
                    names.append(_save(figure, folder, f"{task}-{name}"))
    return names


def _samples_per_batch(group: Group) -> float:
    """Scale of the x axis in samples."""
    return float(study_task(group.task).settings.batch)


def _time_scale(results: Results, field: str) -> Scale:
    """Return the scale of the x axis in seconds, simulated or measured."""

    def seconds_per_batch(group: Group) -> float | None:
        """Return the time per batch of a group, if it is known."""
        throughput = results.throughputs.get(group)
        return None if throughput is None else getattr(throughput, field)

    return seconds_per_batch


def _save(figure: Figure, folder: Path, name: str) -> str:
    """Write a figure as PNG and SVG, and return the name of the PNG."""
    for suffix in ("png", "svg"):
        buffer = io.BytesIO()
        # No date and no version: the same results give the same bytes.
        figure.savefig(
            buffer,
            format=suffix,
            dpi=_DPI,
            facecolor=WHITE,
            metadata={"Software" if suffix == "png" else "Date": None},
        )
        write_file(folder / f"{name}.{suffix}", buffer.getvalue(), kind="figure")
    return f"{name}.png"


def _panel_grid(
    count: int, columns: int, size: tuple[float, float], **options: Any
) -> tuple[Figure, list[Axes]]:
    """Make a figure with a grid of `count` axes, without opening a window.

    Args:
        count: number of axes.
        columns: axes in a row of the grid.
        size: width and height of one panel in inches.
        options: further arguments of `Figure.subplots`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = -(-count // columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    # Not by pyplot, which would keep a reference to every figure.
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False, **options).ravel().tolist()
    for unused in grid[count:]:
        unused.set_axis_off()
    for axes in grid[:count]:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color=_GRID_COLOUR, linewidth=0.5)
        axes.set_axisbelow(True)
    return figure, grid[:count]


def _curve_figure(results: Results, task: str, label: str, scale: Scale) -> Figure | None:
    """Draw the training loss, one panel per rule with a curve per depth, next to flush's with the
    same optimizer. None if no rule has a scale.

    Args:
        results: of the study.
        task: name.
        label: of the x axis.
        scale: of the x axis.
    """
    groups = [group for group in results.of_task(task) if scale(group) is not None]
    panels = list(dict.fromkeys(group.method for group in groups if group.rule != BASELINE))
    if not panels:
        return None
    count = len(panels) + 1  # the last panel has the legend
    figure, grid = _panel_grid(count, min(_PANELS_PER_ROW, count), (2.6, 1.9), sharey=True)
    depths = sorted({group.stages for group in groups})
    colours = dict(zip(depths, _depth_colours(depths), strict=True))
    # On a time axis flush has a curve per depth; on a sample axis these coincide.
    flush_by_depth = len({scale(group) for group in groups}) > 1
    limits = _loss_limits(results, groups)
    for axes, (optimizer, rule) in zip(grid, panels, strict=False):
        axes.set_title(rule_name(results, optimizer, rule), fontweight="bold", loc="left")
        for group in groups:
            if group.method != (optimizer, rule):
                continue
            colour, flush_scale = colours[group.stages], scale(results.fastest[group])
            if flush_scale is not None and group.baseline in results.groups:
                flush_colour = colour if flush_by_depth else _FLUSH_COLOUR
                _draw_loss(axes, results, group.baseline, flush_scale, flush_colour)
            _draw_loss(axes, results, group, scale(group) or 0.0, colour)
        axes.set_ylim(*limits)
        axes.margins(x=0.02)
    figure.supxlabel(label, color=_LABEL_COLOUR, fontsize=8)
    _draw_legend(grid[-1], depths, flush_by_depth)
    title = f"{task}: training loss against {label}"
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=10)
    return figure


def _loss_limits(results: Results, groups: Sequence[Group]) -> tuple[float, float]:
    """Return the limits of the y axis that show all first and final losses."""
    first_losses = []
    final_losses = []
    for group in groups:
        for run in results.groups[group]:
            if run.losses:
                first_losses.append(run.losses[0])
                final_losses.append(final_loss(run.losses))
    highest, lowest = max(first_losses), min(final_losses)
    # An axis from 0 would press losses that fall little into its upper part.
    bottom = 0.0 if lowest < 0.3 * highest else 0.9 * lowest
    return bottom, 1.25 * highest


def _draw_loss(axes: Axes, results: Results, group: Group, per_batch: float, colour: str) -> None:
    """Draw the mean loss over the seeds in the band of their range, as far as all seeds go; a cross
    marks the end of a run that was given up.

    Args:
        axes: the panel.
        results: of the study.
        group: whose runs differ by their seeds only.
        per_batch: length of a batch on the x axis.
        colour: of curve, band and crosses.
    """
    runs = results.groups[group]
    window = window_length(runs[0].case.batches)
    curves = [smooth(run.losses, window) for run in runs]
    # `zip` ends with the shortest curve.
    spreads = [Spread(losses) for losses in zip(*curves, strict=False)]
    xs = [_window_end(index, window, per_batch) for index in range(len(spreads))]
    low, high = [spread.low for spread in spreads], [spread.high for spread in spreads]
    mean = [spread.mean for spread in spreads]
    is_flush = group.rule == BASELINE
    # The rule of the panel is drawn over flush.
    order = 2 if is_flush else 3
    line: dict[str, Any] = {"linewidth": 1.0, **_DOTTED} if is_flush else {"linewidth": 1.3}
    axes.fill_between(xs, low, high, color=colour, alpha=0.18, linewidth=0, zorder=order)
    axes.plot(xs, mean, color=colour, zorder=order, **line)
    for run, curve in zip(runs, curves, strict=True):
        if run.given_up is not None and curve:
            x = _window_end(len(curve) - 1, window, per_batch)
            # Below the top of the axis, which is 1.25 times the first loss: see `_loss_limits`.
            y = min(curve[-1], 1.2 * run.losses[0])
            axes.plot([x], [y], color=colour, markersize=6, zorder=5, **_CROSS)


def _window_end(index: int, window: int, per_batch: float) -> float:
    """Return the end of a window of `window` batches on the x axis."""
    return (index + 1) * window * per_batch


def _depth_colours(depths: Sequence[int]) -> list[str]:
    """Return a colour for each depth; the last ones share the last colour."""
    last = len(_DEPTH_COLOURS) - 1
    return [_DEPTH_COLOURS[min(index, last)] for index in range(len(depths))]


def _draw_legend(axes: Axes, depths: Sequence[int], flush_by_depth: bool) -> None:
    """Draw a legend in place of a panel; `flush_by_depth`: flush has a curve per depth."""
    from matplotlib.lines import Line2D

    axes.set_axis_off()
    handles = [
        Line2D([], [], color=colour, linewidth=1.6, label=f"{depth} stages")
        for depth, colour in zip(depths, _depth_colours(depths), strict=True)
    ]
    handles += [
        Line2D(
            [],
            [],
            color=_LABEL_COLOUR if flush_by_depth else _FLUSH_COLOUR,
            linewidth=1.2,
            **_DOTTED,
            label="flush, by depth" if flush_by_depth else "flush, every depth",
        ),
        Line2D([], [], color=_LABEL_COLOUR, **_CROSS, label="given up: diverged"),
    ]
    axes.legend(
        handles=handles,
        loc="center left",
        frameon=False,
        title="mean over seeds; shaded: range",
        alignment="left",
    )


def _final_figure(results: Results, task: str) -> Figure | None:
    """Draw the metric of every run, one panel per depth with a line per rule, over the range of
    flush. None if there is no rule but flush.
    """
    groups = results.of_task(task)
    depths = sorted({group.stages for group in groups})
    rules = list(dict.fromkeys(group.method for group in groups if group.rule != BASELINE))
    if not rules:
        return None
    metric = study_task(task).metric
    panel_size = (3.0, 0.9 + 0.21 * len(rules))
    figure, grid = _panel_grid(len(depths), len(depths), panel_size, sharex=True, sharey=True)
    for axes, depth in zip(grid, depths, strict=True):
        axes.set_title(f"{depth} stages", loc="left", fontweight="bold")
        for group in groups:
            if group.stages == depth and group.method in rules:
                _draw_runs(axes, results, group, rules.index(group.method))
        axes.set_xlabel(f"{metric.name},{metric.sign}" if metric.sign else metric.name)
    names = [rule_name(results, optimizer, rule) for optimizer, rule in rules]
    grid[0].set_yticks(range(len(rules)), names)
    # Downwards, so that the first rule is the top line.
    grid[0].set_ylim(len(rules) - 0.4, -0.6)
    title = (
        f"{task}: {metric.name} of every run; grey: flush; red: worse; "
        "\N{MULTIPLICATION SIGN}: did not train"
    )
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=9)
    return figure


def _draw_runs(axes: Axes, results: Results, group: Group, line: int) -> None:
    """Draw a dot per run of a group on a line of the panel, over the runs of flush."""
    metric = study_task(group.task).metric
    bottom, top = line - 0.42, line + 0.42
    flush = results.conclusions.get(group.baseline)
    if flush is not None and flush.values is not None:
        low, high = metric.scale * flush.values.low, metric.scale * flush.values.high
        axes.fill_betweenx([bottom, top], low, high, color=_FLUSH_COLOUR, alpha=0.3, linewidth=0)
        for value in flush.values.values:
            x = metric.scale * value
            axes.plot([x, x], [bottom, top], color=_FLUSH_COLOUR, linewidth=0.8)
    runs = results.groups[group]
    values = metric_values(runs, metric)
    is_worse = results.conclusions[group].standing in (Standing.WORSE, Standing.NOT_TRAINING)
    for value in values:
        axes.plot(
            [metric.scale * value],
            [line],
            "o",
            color=_FAILED_COLOUR if is_worse else BLACK,
            markersize=3.5,
            alpha=0.85,
            markeredgewidth=0,
        )
    failed = len(runs) - len(values)
    if failed:
        # On the side of bad values, where no dots are.
        axes.annotate(
            f"{failed} \N{MULTIPLICATION SIGN}",
            (0.02 if metric.higher else 0.98, line),
            xycoords=("axes fraction", "data"),
            ha="left" if metric.higher else "right",
            va="center",
            color=_FAILED_COLOUR,
            fontweight="bold",
        )
