"""Timelines as a self-contained SVG, in the manner of the pipeline papers' figures.

One lane per rank, one box per op, thin arrows for transfers that take time, and below each lane
what the rank holds, where that is known. No script, no font and no address outside the file; plain
CSS classes, so that viewers other than browsers show it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from penstock.draw.box_shades import Shades
from penstock.draw.facts import KIND_NAMES, clean, figures, heading, kinds
from penstock.draw.lanes import draw_lanes
from penstock.draw.page import LABEL, SMALL, TITLE, Page
from penstock.draw.stage_order import Ways
from penstock.event import Timeline
from penstock.schedule.op import ACTIVATION_MOVES, Kind


def svg(panels: Sequence[Timeline], note: str = "", words: bool = True) -> str:
    """Draw timelines one above the other on a common time scale.

    Boxes carry their micro-batch where it fits (`3.1` is slice 1 of micro-batch 3), and their stage
    (`s2`) on a rank that holds several; pointing at one says when it began and how long it took.
    Two ops that run as one share their span, one above the other. An op that took no time is a thin
    mark. Where there are too many ops for boxes, columns show how much of their time went into ops
    of each kind, and the legend says so.

    Args:
        panels: the timelines.
        note: a last line.
        words: False leaves out headings and figures, for pages that say them around the drawing.
    """
    page = Page.of(panels)
    places = []
    for panel in panels:
        if words:
            page.paragraph([heading(panel)], "h", TITLE)
            page.paragraph(figures(panel, page.clock), "s", SMALL)
            page.y += 4
        top = page.y
        draw_lanes(page, panel)
        places.append((top, page.y))
        page.y += 16
    page.y -= 10
    page.axis(places)
    _legend(page, panels)
    if note:
        page.y += 8
        page.paragraph([clean(note)], "l", LABEL)
    label = escape("; ".join(heading(panel) for panel in panels))
    return page.document(label)


def _legend(page: Page, panels: Sequence[Timeline]) -> None:
    """A swatch and a name for every kind that occurs, for idle, for pairs, memory and transfers;
    what numbers and shades mean.
    """
    ways = [Ways.of(panel) for panel in panels]
    meanings = [] if page.summed else sorted({Shades.of(panel).meaning for panel in panels} - {""})
    staged, twice = any(each.several for each in ways) and not page.summed, bool(meanings)
    entries = [(_swatch(kind, twice), f"{kind} {KIND_NAMES[kind]}") for kind in kinds(panels)]
    entries.append(('<rect class="lane" width="18" height="12"/>', "idle"))
    if page.paired:
        entries.append(
            (
                '<rect class="F" width="18" height="6"/><rect class="B" y="6" width="18" height="6"/>',
                "two ops run as one",
            )
        )
    if any(panel.memory for panel in panels):
        entries.append(
            ('<path class="held" d="M0 12V7H6V2H12V9H18V12Z"/>', "memory, its peak on the left")
        )
    if not page.summed:
        sent = {
            "F" if e.op.kind is Kind.F else "E" if e.op.kind in ACTIVATION_MOVES else "B"
            for panel in panels
            for e in panel.events
            if e.to_rank is not None and e.end > e.start
        }
        for key, classes, head, name in (
            ("F", "t", "on", "activation sent"),
            ("B", "t r", "back", "gradient sent"),
            ("E", "t p", "pass", "activations handed over"),
        ):
            if key in sent:
                entries.append(
                    (
                        f'<path class="{classes}" d="M0 6H17" marker-end="url(#penstock-{head})"/>',
                        name,
                    )
                )
    if page.numbered:
        cut = ".slice" * any(panel.slicing is not None for panel in panels)
        versions = ", of U the weight version" if Kind.U in page.numbered else ""
        entries.append(("", f"numbers: micro-batch{cut}{versions}{', s: stage' if staged else ''}"))
    entries += [("", meaning) for meaning in meanings]
    if page.summed:
        entries.append(("", "too many ops for a box each: heights are shares of time"))
    page.entries(entries)


def _swatch(kind: Kind, twice: bool) -> str:
    if not twice:
        return f'<rect class="{kind}" width="18" height="12"/>'
    return f'<rect class="{kind}" width="9" height="12"/><rect class="{kind}2" x="9" width="9" height="12"/>'
