"""Timelines as one HTML page: a figure that zooms, and tables of key figures.

The page loads nothing from the network and follows the browser's light or dark colour scheme.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from penstock.draw.facts import (
    busy_shares,
    clean,
    heading,
    percent,
    shown_idle,
    stages_of_rank,
)
from penstock.draw.memory import holder_text
from penstock.draw.palette import dark_style
from penstock.draw.scale import Clock, format_number
from penstock.draw.svg import svg
from penstock.draw.viewer import MAX_VIEWER_OPS, resource, viewer
from penstock.event import Timeline
from penstock.idle import idle_seconds, link_traffic
from penstock.units import format_bytes

#: With more ops than this, the page has no static picture for browsers without scripts: it would
#: double the length of the page, and the picture would be too fine to read.
_MAX_STATIC_OPS = 5_000


def html(panels: Sequence[Timeline], note: str = "") -> str:
    """Return a page with the timelines one above the other, and tables per rank and per stage.

    The figure zooms and pans along time, shows the details of the box or arrow under the pointer
    and marks the ops of the same micro-batch. Appending `#t=3,7` to the page's address opens it at
    3 to 7 s. With more than 300,000 ops the figure is a static picture of time shares.

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
    body.append(_figure(panels, title))
    if note:
        body.append(f"<p>{escape(clean(note))}</p>")
    for panel in panels:
        if not single:
            body += [f"<h2>{escape(heading(panel))}</h2>", _key_figures(panel, clock)]
        tables = [_rank_table(panel, clock), _stage_table(panel), *_traffic_tables(panel, clock)]
        body.append(f'<div class="tables">{"".join(tables)}</div>')
    dark = resource("page_dark.css") + dark_style()
    style = resource("viewer.css") + resource("page.css")
    style += f"@media screen and (prefers-color-scheme:dark){{{dark}}}"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _figure(panels: Sequence[Timeline], title: str) -> str:
    """Return the figure that zooms, or a static one where there are too many ops for it."""
    ops = sum(len(panel.log.start) for panel in panels)
    # A single timeline has its summary above the figure.
    summary = len(panels) > 1
    if ops > MAX_VIEWER_OPS:
        return (
            f'<figure class="still">{svg(panels, summary=summary)}</figure>'
            f"<p>{ops:,} ops are too many for a figure that zooms: heights are shares of time. "
            "Draw fewer micro-batches, or the trace for Perfetto.</p>"
        )
    static = svg(panels, summary=summary) if ops <= _MAX_STATIC_OPS else ""
    return viewer(panels, title, static)


def _key_figures(panel: Timeline, clock: Clock) -> str:
    """Return the key figures of a timeline as a definition list."""
    figures = (
        ("makespan", clock.exact(panel.makespan)),
        ("bubble ratio", percent(panel.bubble_ratio)),
        ("bubble ratio of the longest rank's span", percent(panel.span_bubble_ratio)),
        ("ranks", str(panel.ranks)),
        ("stages", str(panel.stages)),
        ("ops", str(len(panel.log.start))),
    )
    entries = [f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in figures]
    return f"<dl>{''.join(entries)}</dl>"


def _rank_table(panel: Timeline, clock: Clock) -> str:
    """Return the table of busy and idle time per rank, with peak memory if it is known."""
    columns = ["rank", "stages", "busy", "busy share", "idle share"]
    rows = []
    stages_and_shares = zip(stages_of_rank(panel), busy_shares(panel), strict=True)
    for rank, (stages, share) in enumerate(stages_and_shares):
        bar_width = format_number(100 * min(1.0, share), 1)
        bar = f'<span class="bar"><i style="width:{bar_width}%"></i></span>'
        rows.append(
            [
                str(rank),
                ", ".join(map(str, stages)) or "none",
                clock.exact(panel.busy[rank]),
                bar + percent(share),
                percent(1 - share),
            ]
        )
    idle = shown_idle(panel)
    if idle:
        columns += ["waits for neighbours", "waits for links", "rest"]
        for row, seconds in zip(rows, idle_seconds(panel, idle), strict=True):
            row.extend(map(clock.exact, (seconds.neighbour, seconds.link, seconds.rest)))
    if panel.peak_memory is not None:
        columns.append("peak memory")
        for row, peak in zip(rows, panel.peak_memory, strict=True):
            row.append(format_bytes(peak))
    curves = panel.memory
    if curves is not None and panel.memory_holders is not None:
        columns += ["peak at", "held by, at the peak"]
        for rank, (row, curve) in enumerate(zip(rows, curves, strict=True)):
            row += [clock.exact(curve.peak_at), escape(clean(holder_text(panel, rank)))]
    return _table("per rank", columns, rows)


def _stage_table(panel: Timeline) -> str:
    """Return the table of ranks and peak in flight per stage."""
    ranks_of_stage: list[list[int]] = [[] for _ in range(panel.stages)]
    for rank, stages in enumerate(stages_of_rank(panel)):
        for stage in stages:
            ranks_of_stage[stage].append(rank)
    rows = []
    for stage, peak in enumerate(panel.peak_in_flight):
        ranks = ", ".join(map(str, ranks_of_stage[stage])) or "none"
        rows.append([str(stage), ranks, format_number(peak, 2)])
    return _table("per stage", ["stage", "ranks", "peak in flight"], rows)


def _traffic_tables(panel: Timeline, clock: Clock) -> list[str]:
    """Return the tables of messages between ranks and between hosts, if they are measured."""
    tables = []
    idle = shown_idle(panel)
    for ends, by_host in (("rank", False), ("host", True)):
        rows = []
        for link in link_traffic(panel, idle, by_host=by_host) if idle else ():
            rows.append(
                [
                    escape(clean(f"{link.source} → {link.target}")),
                    str(link.messages),
                    format_bytes(link.bytes),
                    clock.exact(link.busy_s),
                    clock.exact(link.waited_s),
                ]
            )
        if rows:
            columns = ["from → to", "messages", "bytes", "on their way", "target waits for them"]
            tables.append(_table(f"messages by {ends}", columns, rows))
    return tables


def _table(caption: str, columns: list[str], rows: list[list[str]]) -> str:
    """Return an HTML table; cells are escaped already."""
    head = "".join(f'<th scope="col">{name}</th>' for name in columns)
    body = ""
    for row in rows:
        cells = "".join(f"<td>{cell}</td>" for cell in row)
        body += f"<tr>{cells}</tr>"
    return (
        f"<div><table><caption>{caption}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )
