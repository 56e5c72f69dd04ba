"""Figures: what every rule learns beside flush, against samples and against time; and what all have
come to at the end.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.draw.output import write
from penstock.draw.palette import BLACK, WHITE
from penstock.errors import MissingExtra
from penstock.study.question import BASELINE, Group
from penstock.study.results import Results
from penstock.study.statistics import Spread, curve, ends_at, window_of
from penstock.study.tasks import study_task
from penstock.study.verdict import Fate, Standing, fate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: By depth, from the palette of the drawings: the deeper, the darker; of more depths the last is
#: used again.
_DEPTHS = ("#4f86c6", "#e99a1f", "#5b2a73", "#17744a", "#87101e")
_FLUSH, _FAILED, _GRID, _SOFT = "#8b95a3", "#87101e", "#d3d8df", "#4a5563"
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "svg.hashsalt": "penstock",
    "svg.fonttype": "none",
    "axes.edgecolor": "#5b6675",
    "text.color": BLACK,
    "axes.labelcolor": _SOFT,
    "xtick.color": _SOFT,
    "ytick.color": _SOFT,
    "axes.linewidth": 0.7,
}
_DPI = 130
_COLUMNS = 4

#: Per group, by how much a batch moves on along the x axis; None leaves the group out.
Scale = Callable[[Group], float | None]


def figures(results: Results, folder: Path) -> list[str]:
    """Draw all into a folder, each as PNG and SVG; returns the names of the PNGs.

    Raises:
        MissingExtra: Matplotlib is not installed.
        FileError: the folder cannot be written.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise MissingExtra("matplotlib", "draw", "the figures of a study") from error
    written = []
    with mpl.rc_context(_STYLE):  # type: ignore[arg-type]  # rc_context is typed by the names that Matplotlib knows
        for task in results.question.tasks:
            scales = {
                "samples": ("samples", _samples),
                "simulated-time": (
                    "simulated seconds, one device per rank",
                    _pace(results, "simulated_s"),
                ),
                "measured-time": (
                    "measured seconds, one process per rank",
                    _pace(results, "measured_s"),
                ),
            }
            made = {
                name: _curves(results, task, word, scale) for name, (word, scale) in scales.items()
            }
            made["final"] = _finals(results, task)
            for name, figure in made.items():
                if figure is not None:
                    written.append(_put(figure, folder, f"{task}-{name}"))
    return written


def _samples(group: Group) -> float:
    return float(study_task(group.task).settings.batch)


def _pace(results: Results, field: str) -> Scale:
    def of(group: Group) -> float | None:
        found = results.paces.get(group)
        return None if found is None else getattr(found, field)

    return of


def _put(figure: Figure, folder: Path, name: str) -> str:
    for suffix in ("png", "svg"):
        held = io.BytesIO()
        # No date and no version: the same results give the same bytes.
        figure.savefig(
            held,
            format=suffix,
            dpi=_DPI,
            facecolor=WHITE,
            metadata={"Software" if suffix == "png" else "Date": None},
        )
        write(folder / f"{name}.{suffix}", held.getvalue())
    return f"{name}.png"


def _axes(
    count: int, columns: int, size: tuple[float, float], **options: Any
) -> tuple[Figure, list[Axes]]:
    """So many axes in a grid, without a window anywhere."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = -(-count // columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * lines), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(lines, columns, squeeze=False, **options).ravel().tolist()
    for spare in grid[count:]:
        spare.set_axis_off()
    for axes in grid[:count]:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color=_GRID, linewidth=0.5)
        axes.set_axisbelow(True)
    return figure, grid[:count]


def _curves(results: Results, task: str, word: str, scale: Scale) -> Figure | None:
    """A panel for each rule: its training loss at every depth, and flush's with the same optimizer."""
    groups = [group for group in results.of_task(task) if scale(group) is not None]
    panels = list(dict.fromkeys(group[1:3] for group in groups if group.rule != BASELINE))
    if not panels:
        return None
    figure, grid = _axes(len(panels) + 1, min(_COLUMNS, len(panels) + 1), (2.6, 1.9), sharey=True)
    depths = sorted({group.stages for group in groups})
    first = [run.losses[0] for group in groups for run in results.groups[group] if run.losses]
    least = min(
        ends_at(run.losses) for group in groups for run in results.groups[group] if run.losses
    )
    bottom, top = (0.0 if least < 0.3 * max(first) else 0.9 * least), 1.25 * max(first)
    apart = len({scale(group) for group in groups}) > 1
    colours = dict(zip(depths, _colours(depths), strict=True))
    for axes, (optimizer, rule) in zip(grid, panels, strict=False):
        axes.set_title(
            rule if optimizer == results.question.optimizer else f"{rule} ({optimizer})",
            fontweight="bold",
            loc="left",
        )
        for group in (each for each in groups if each[1:3] == (optimizer, rule)):
            own, per_batch = colours[group.stages], scale(results.fastest[group])
            if per_batch is not None and group.baseline in results.groups:
                _lines(axes, results, group.baseline, per_batch, own if apart else _FLUSH)
            _lines(axes, results, group, scale(group) or 0.0, own)
        axes.set_ylim(bottom, top)
        axes.margins(x=0.02)
    figure.supxlabel(word, color=_SOFT, fontsize=8)
    _key(grid[-1], depths, apart)
    figure.suptitle(
        f"{task}: training loss against {word}", x=0.01, ha="left", fontweight="bold", fontsize=10
    )
    return figure


def _lines(axes: Axes, results: Results, group: Group, per_batch: float, colour: str) -> None:
    """The mean over the seeds where all go on, within their least and most; a cross where a run was
    given up.
    """
    runs = results.groups[group]
    window = window_of(runs[0].case.batches)
    means = [curve(run.losses, window) for run in runs]
    common = min(map(len, means))
    xs = [(i + 1) * window * per_batch for i in range(common)]
    at = [Spread(tuple(each[i] for each in means)) for i in range(common)]
    flush = group.rule == BASELINE
    order = 2 if flush else 3
    axes.fill_between(
        xs,
        [one.low for one in at],
        [one.high for one in at],
        color=colour,
        alpha=0.18,
        linewidth=0,
        zorder=order,
    )
    axes.plot(
        xs,
        [one.mean for one in at],
        color=colour,
        linewidth=1.0 if flush else 1.3,
        zorder=order,
        linestyle=(0, (1.2, 1.2)) if flush else "-",
    )
    for run, mean in zip(runs, means, strict=True):
        if run.given_up is not None and mean:
            end = len(mean) * window * per_batch
            axes.plot(
                [end],
                [min(mean[-1], 1.2 * run.losses[0])],
                "x",
                color=colour,
                markersize=6,
                markeredgewidth=1.8,
                zorder=5,
            )


def _colours(depths: Sequence[int]) -> list[str]:
    return [_DEPTHS[min(i, len(_DEPTHS) - 1)] for i in range(len(depths))]


def _key(axes: Axes, depths: Sequence[int], apart: bool) -> None:
    """What the colours mean. `apart`: flush's curves differ by depth."""
    from matplotlib.lines import Line2D

    axes.set_axis_off()
    handles = [
        Line2D([], [], color=colour, linewidth=1.6, label=f"{depth} stages")
        for depth, colour in zip(depths, _colours(depths), strict=True)
    ]
    handles += [
        Line2D(
            [],
            [],
            color=_SOFT if apart else _FLUSH,
            linewidth=1.2,
            linestyle=(0, (1.2, 1.2)),
            label="flush, by depth" if apart else "flush, every depth",
        ),
        Line2D(
            [],
            [],
            color=_SOFT,
            marker="x",
            linestyle="",
            markeredgewidth=1.8,
            label="given up: the loss ran away",
        ),
    ]
    axes.legend(
        handles=handles,
        loc="center left",
        frameon=False,
        title="mean over seeds; shaded: least to most",
        alignment="left",
    )


def _finals(results: Results, task: str) -> Figure | None:
    """A panel for each depth: every run's metric, rule by rule, and the span of flush's."""
    groups = results.of_task(task)
    depths = sorted({group.stages for group in groups})
    rules = list(dict.fromkeys(group[1:3] for group in groups if group.rule != BASELINE))
    if not rules:
        return None
    metric = study_task(task).metric
    figure, grid = _axes(
        len(depths), len(depths), (3.0, 0.9 + 0.21 * len(rules)), sharex=True, sharey=True
    )
    for axes, depth in zip(grid, depths, strict=True):
        axes.set_title(f"{depth} stages", loc="left", fontweight="bold")
        for group in groups:
            if group.stages == depth and group[1:3] in rules:
                _dots(axes, results, group, rules.index(group[1:3]))
        axes.set_xlabel(f"{metric.name}{f',{metric.sign}' * bool(metric.sign)}")
    names = [
        rule if optimizer == results.question.optimizer else f"{rule} ({optimizer})"
        for optimizer, rule in rules
    ]
    grid[0].set_yticks(range(len(rules)), names)
    grid[0].set_ylim(len(rules) - 0.4, -0.6)
    figure.suptitle(
        f"{task}: {metric.name} of every run; grey: flush; red: worse; \N{MULTIPLICATION SIGN}: did not train",
        x=0.01,
        ha="left",
        fontweight="bold",
        fontsize=9,
    )
    return figure


def _dots(axes: Axes, results: Results, group: Group, place: int) -> None:
    metric, verdict = study_task(group.task).metric, results.verdicts[group]
    base = results.verdicts.get(group.baseline)
    if base is not None and base.values is not None:
        low, high = (metric.scale * number for number in (base.values.low, base.values.high))
        axes.fill_betweenx(
            [place - 0.42, place + 0.42], low, high, color=_FLUSH, alpha=0.3, linewidth=0
        )
        for flush in base.values.values:
            axes.plot(
                [metric.scale * flush] * 2,
                [place - 0.42, place + 0.42],
                color=_FLUSH,
                linewidth=0.8,
            )
    colour = _FAILED if verdict.standing in (Standing.LOSES, Standing.FAILS) else BLACK
    failed = 0
    for run in results.groups[group]:
        value = run.test_accuracy if metric.higher else run.test_loss
        if fate(run)[0] is Fate.TRAINED and value is not None:
            axes.plot(
                [metric.scale * value],
                [place],
                "o",
                color=colour,
                markersize=3.5,
                alpha=0.85,
                markeredgewidth=0,
            )
        else:
            failed += 1
    if failed:
        axes.annotate(
            f"{failed} \N{MULTIPLICATION SIGN}",
            (0.02 if metric.higher else 0.98, place),
            xycoords=("axes fraction", "data"),
            ha="left" if metric.higher else "right",
            va="center",
            color=_FAILED,
            fontweight="bold",
        )
