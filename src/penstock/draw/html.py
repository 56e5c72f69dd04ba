"""Timelines as one page: a figure that zooms, and the figures as tables. Nothing from the network,
light and dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files

from penstock.draw.facts import busy_shares, clean, heading, percent, stages_of_rank
from penstock.draw.memory import told
from penstock.draw.palette import dark_style
from penstock.draw.scale import Clock, number
from penstock.draw.svg import svg
from penstock.draw.viewer import MOST_OPS, viewer
from penstock.event import Timeline
from penstock.units import format_bytes

#: With more ops than this, a page for readers without scripts would be twice as long for a picture
#: too fine to read.
_MOST_STILL = 5_000


def html(panels: Sequence[Timeline], note: str = "") -> str:
    """A page with the timelines drawn one above the other, and of each the figures per rank and per
    stage.

    The figure zooms and pans along time, tells the numbers of what is pointed at and marks the ops
    of the same micro-batch; `#t=3,7` behind the page's address opens it at 3 to 7 s. With more than
    300,000 ops it is a still picture of sums.

    Args:
        panels: the timelines.
        note: a line below the drawing.
    """
    clock = Clock.of(panels)
    single = len(panels) == 1
    title = escape(" / ".join(heading(panel) for panel in panels))
    body = [f"<h1>{title}</h1>"]
    if single:
        body.append(_key_figures(panels[0], clock))
    ops = sum(len(panel.log.start) for panel in panels)
    if ops > MOST_OPS:
        body.append(
            f'<figure class="still">{svg(panels, words=not single)}</figure><p>{ops:,} ops are too many for a figure '
            f"that zooms: heights are shares of time. Draw fewer micro-batches, or the trace for Perfetto.</p>"
        )
    else:
        body.append(
            viewer(panels, title, svg(panels, words=not single) if ops <= _MOST_STILL else "")
        )
    if note:
        body.append(f"<p>{escape(clean(note))}</p>")
    for panel in panels:
        if not single:
            body += [f"<h2>{escape(heading(panel))}</h2>", _key_figures(panel, clock)]
        body.append(f'<div class="tables">{_rank_table(panel, clock)}{_stage_table(panel)}</div>')
    style = f"{_sheet('page.css')}@media (prefers-color-scheme:dark){{{_sheet('page_dark.css')}{dark_style('main')}}}"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _sheet(name: str) -> str:
    return files("penstock.draw").joinpath(name).read_text(encoding="utf-8")


def _key_figures(panel: Timeline, clock: Clock) -> str:
    entries = (
        ("makespan", clock.exact(panel.makespan)),
        ("bubble ratio", percent(panel.bubble_ratio)),
        ("bubble ratio of the longest rank's span", percent(panel.span_bubble_ratio)),
        ("ranks", str(panel.ranks)),
        ("stages", str(panel.stages)),
        ("ops", str(len(panel.log.start))),
    )
    return (
        "<dl>"
        + "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in entries)
        + "</dl>"
    )


def _rank_table(panel: Timeline, clock: Clock) -> str:
    names = ["rank", "stages", "busy", "busy share", "idle share"]
    rows = []
    for rank, (stages, share) in enumerate(
        zip(stages_of_rank(panel), busy_shares(panel), strict=True)
    ):
        bar = f'<span class="bar"><i style="width:{number(100 * min(1.0, share), 1)}%"></i></span>'
        rows.append(
            [
                str(rank),
                ", ".join(map(str, stages)) or "none",
                clock.exact(panel.busy[rank]),
                bar + percent(share),
                percent(1 - share),
            ]
        )
    if panel.peak_memory is not None:
        names.append("peak memory")
        for row, held in zip(rows, panel.peak_memory, strict=True):
            row.append(format_bytes(held))
    curves, holders = panel.memory, panel.memory_holders
    if curves is not None and holders is not None:
        names += ["peak at", "held by, at the peak"]
        for rank, (row, curve) in enumerate(zip(rows, curves, strict=True)):
            row += [clock.exact(curve.peak_at), escape(clean(told(panel, rank)))]
    return _table("per rank", names, rows)


def _stage_table(panel: Timeline) -> str:
    ranks: list[list[int]] = [[] for _ in range(panel.stages)]
    for rank, stages in enumerate(stages_of_rank(panel)):
        for stage in stages:
            ranks[stage].append(rank)
    rows = [
        [str(stage), ", ".join(map(str, ranks[stage])) or "none", number(peak, 2)]
        for stage, peak in enumerate(panel.peak_in_flight)
    ]
    return _table("per stage", ["stage", "ranks", "peak in flight"], rows)


def _table(caption: str, names: list[str], rows: list[list[str]]) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div><table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
