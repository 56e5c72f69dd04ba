"""Timelines of a report: interactive in HTML, a static SVG elsewhere."""

from __future__ import annotations

from html import escape

from penstock.draw.compare import differences
from penstock.draw.facts import heading
from penstock.draw.svg import svg
from penstock.draw.viewer import MAX_VIEWER_OPS, embedded_viewer
from penstock.report.document import TimelineFigure

#: With more ops than this, the page has no static picture for print: it would be too fine to read.
_MAX_STATIC_OPS = 5_000


def timeline_svg(figure: TimelineFigure) -> str:
    """Return the timelines as a stand-alone SVG, with a line on their differences."""
    return svg(figure.timelines, differences(figure.timelines))


def timeline_html(figure: TimelineFigure, name: str) -> str:
    """Return the timelines as a figure that zooms, or as a picture if there are too many ops.

    Args:
        figure: the timelines.
        name: of the figure in the page: letters, digits and hyphens.
    """
    panels = figure.timelines
    label = escape("; ".join(heading(panel) for panel in panels))
    ops = sum(len(panel.log.start) for panel in panels)
    if ops > MAX_VIEWER_OPS:
        return f'<figure class="still">{_unique_ids(timeline_svg(figure), name)}</figure>'
    static = _unique_ids(svg(panels), name) if ops <= _MAX_STATIC_OPS else ""
    return embedded_viewer(panels, label, static)


def _unique_ids(drawing: str, name: str) -> str:
    """Return an SVG whose ids do not occur in the other SVGs of the page.

    A quotation mark in a text of the drawing is escaped, so that `id="` only occurs in its markup.
    """
    drawing = drawing.replace('id="penstock-', f'id="{name}--')
    return drawing.replace("url(#penstock-", f"url(#{name}--")
