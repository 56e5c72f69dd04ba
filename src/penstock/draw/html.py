"""Timelines as one page: the SVG and the figures as tables. No script, nothing from the network, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from penstock.draw.facts import busy_shares, clean, heading, percent, stages_of_rank
from penstock.draw.palette import dark_style
from penstock.draw.scale import Clock, number
from penstock.draw.svg import svg
from penstock.event import Timeline
from penstock.units import format_bytes

_STYLE = """
:root{color-scheme:light dark;--ground:#fff;--ink:#1d2530;--soft:#4a5563;--line:#d3d8df;--bar:#7eb0e8}
body{margin:0;background:var(--ground);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1680px;margin:0 auto;padding:24px}
h1{font-size:22px;margin:0 0 12px;overflow-wrap:anywhere}h2{font-size:17px;margin:28px 0 8px;overflow-wrap:anywhere}
figure{margin:16px 0;overflow-x:auto;border:1px solid var(--line);border-radius:8px;background:var(--ground)}figure svg{display:block}
dl{display:flex;flex-wrap:wrap;gap:8px 32px;margin:0}dt{color:var(--soft);font-size:13px}dd{margin:0;font-size:18px}
.tables>div{overflow-x:auto;max-width:100%}
.tables{margin-top:16px;display:flex;flex-wrap:wrap;gap:16px 48px;align-items:flex-start}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}caption{text-align:left;color:var(--soft);padding:4px 0}
th,td{padding:4px 16px 4px 0;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{font-weight:600;color:var(--soft);font-size:13px}
.bar{display:inline-block;width:96px;height:9px;margin-right:8px;border:1px solid var(--line)}
.bar i{display:block;height:100%;background:var(--bar)}
"""
_DARK = ":root{--ground:#14181e;--ink:#e4e9f0;--soft:#a9b4c2;--line:#323b47;--bar:#4f86c6}"


def html(panels: Sequence[Timeline], note: str = "") -> str:
    """A page with the timelines drawn above the other, and of each the figures per rank and per stage.

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
    body.append(f"<figure>{svg(panels, '', words=not single)}</figure>")
    if note:
        body.append(f"<p>{escape(clean(note))}</p>")
    for panel in panels:
        if not single:
            body += [f"<h2>{escape(heading(panel))}</h2>", _key_figures(panel, clock)]
        body.append(f'<div class="tables">{_rank_table(panel, clock)}{_stage_table(panel)}</div>')
    style = f"{_STYLE}@media (prefers-color-scheme:dark){{{_DARK}{dark_style('main')}}}"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _key_figures(panel: Timeline, clock: Clock) -> str:
    entries = (
        ("makespan", clock.exact(panel.makespan)),
        ("bubble ratio", percent(panel.bubble_ratio)),
        ("bubble ratio of the longest rank's span", percent(panel.span_bubble_ratio)),
        ("ranks", str(panel.ranks)),
        ("stages", str(panel.stages)),
        ("ops", str(len(panel.compute))),
    )
    return "<dl>" + "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in entries) + "</dl>"


def _rank_table(panel: Timeline, clock: Clock) -> str:
    names = ["rank", "stages", "busy", "busy share", "idle share"]
    rows = []
    for rank, (stages, share) in enumerate(zip(stages_of_rank(panel), busy_shares(panel), strict=True)):
        bar = f'<span class="bar"><i style="width:{number(100 * min(1.0, share), 1)}%"></i></span>'
        rows.append([str(rank), ", ".join(map(str, stages)) or "none", clock.exact(panel.busy[rank]),
                     bar + percent(share), percent(1 - share)])  # fmt: skip
    if panel.peak_memory is not None:
        names.append("peak memory")
        for row, held in zip(rows, panel.peak_memory, strict=True):
            row.append(format_bytes(held))
    return _table("per rank", names, rows)


def _stage_table(panel: Timeline) -> str:
    ranks: list[list[int]] = [[] for _ in range(panel.stages)]
    for rank, stages in enumerate(stages_of_rank(panel)):
        for stage in stages:
            ranks[stage].append(rank)
    rows = [
        [str(stage), ", ".join(map(str, ranks[stage])) or "none", str(peak)] for stage, peak in enumerate(panel.peak_in_flight)
    ]
    return _table("per stage", ["stage", "ranks", "peak in flight"], rows)


def _table(caption: str, names: list[str], rows: list[list[str]]) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div><table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
