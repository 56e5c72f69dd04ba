"""Timelines as a self-contained SVG, in the style of the figures in pipeline papers.

There is one lane per rank and one box per op, with thin arrows for transfers that take time, and
memory below each lane if it is known. The file contains no script, no font and no external address,
and only plain CSS classes, so that viewers other than browsers can show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from penstock.draw.box_shades import BoxShades
from penstock.draw.facts import KIND_NAMES, clean, heading, kinds_in, summary_items
from penstock.draw.lanes import ARROW_CLASSES, draw_lanes
from penstock.draw.page import LABEL, SMALL, TITLE, Page
from penstock.draw.stage_order import number_text
from penstock.draw.transfers import TRANSFER_NAMES, transfer_directions
from penstock.event import Timeline
from penstock.schedule.op import Kind


def svg(panels: Sequence[Timeline], note: str = "", summary: bool = True) -> str:
    """Return timelines drawn one above the other on a common time scale.

    A box contains its micro-batch if there is room (`3.1` is slice 1 of micro-batch 3), and its
    stage (`s2`) on a rank with several stages. Its tooltip has its start and duration. Two ops that
    run as one share their span, one above the other. An op that took no time is a thin mark. If
    there are too many ops for boxes, columns show which share of their time went into ops of each
    kind, and the legend says so.

    Args:
        panels: the timelines.
        note: a last line.
        summary: whether to add headings and key figures. False is for pages that have them
            elsewhere.
    """
    page = Page.of(panels)
    lane_spans = []
    for panel in panels:
        if summary:
            page.paragraph([heading(panel)], "h", TITLE)
            page.paragraph(summary_items(panel, page.clock), "s", SMALL)
            page.y += 4
        top = page.y
        draw_lanes(page, panel)
        lane_spans.append((top, page.y))
        page.y += 16
    page.y -= 10
    page.axis(lane_spans)
    page.entries(_legend(page, panels))
    if note:
        page.y += 8
        page.paragraph([clean(note)], "l", LABEL)
    label = escape("; ".join(heading(panel) for panel in panels))
    return page.document(label)


def _legend(page: Page, panels: Sequence[Timeline]) -> list[tuple[str, str]]:
    """Return the signs and texts of the legend.

    Signs explain the kinds of op that occur, idle time, pairs, memory and transfers; texts without
    a sign explain numbers and shades.
    """
    meanings: set[str] = set()
    if not page.summed:
        meanings = {BoxShades.of(panel).meaning for panel in panels} - {""}
    entries = _kind_entries(panels, two_shades=bool(meanings))
    entries.append(('<rect class="lane" width="18" height="12"/>', "idle"))
    if page.link_waits:
        entries.append(('<rect class="link" width="18" height="12"/>', "waits for the link"))
    if page.paired:
        halves = (
            '<rect class="F" width="18" height="6"/><rect class="B" y="6" width="18" height="6"/>'
        )
        entries.append((halves, "pair of ops"))
    if any(panel.memory for panel in panels):
        curve = '<path class="held" d="M0 12V7H6V2H12V9H18V12Z"/>'
        entries.append((curve, "memory (peak on the left)"))
    if not page.summed:
        entries += _transfer_entries(panels)
    remarks = sorted(meanings)
    if page.numbered:
        has_versions = Kind.U in page.numbered
        numbers = number_text(panels, has_versions=has_versions, has_stages=not page.summed)
        remarks.insert(0, numbers)
    if page.summed:
        remarks.append("too many ops for a box each: heights are shares of time")
    return entries + [("", remark) for remark in remarks]


def _kind_entries(panels: Sequence[Timeline], two_shades: bool) -> list[tuple[str, str]]:
    """Return the legend's entries of the kinds of op that occur."""
    return [(_swatch(kind, two_shades), f"{kind} {KIND_NAMES[kind]}") for kind in kinds_in(panels)]


def _transfer_entries(panels: Sequence[Timeline]) -> list[tuple[str, str]]:
    """Return the legend's entries of the directions in which transfers take time."""
    entries = []
    for direction in transfer_directions(panels):
        classes = ARROW_CLASSES[direction]
        marker = f'marker-end="url(#penstock-{direction})"'
        sign = f'<path class="{classes}" d="M0 6H17" {marker}/>'
        entries.append((sign, TRANSFER_NAMES[direction]))
    return entries


def _swatch(kind: Kind, two_shades: bool) -> str:
    """Return a box in the colour of a kind, or in its two shades."""
    if not two_shades:
        return f'<rect class="{kind}" width="18" height="12"/>'
    return (
        f'<rect class="{kind}" width="9" height="12"/>'
        f'<rect class="{kind}2" x="9" width="9" height="12"/>'
    )
