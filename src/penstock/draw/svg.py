"""Timelines as a self-contained SVG, in the manner of the pipeline papers' figures.

One lane per rank, one box per op, thin arrows for transfers that take time. No script, no font and no address outside the
file; plain CSS classes, so that viewers other than browsers show it as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from statistics import median, quantiles

from penstock.draw.facts import KIND_NAMES, clean, figures, heading, kinds, stages_of_rank
from penstock.draw.measure import flowing, text_width, wrapped
from penstock.draw.palette import DARK, FILLS, fill_class, light_style
from penstock.draw.scale import Clock, horizon, number
from penstock.event import Event, Timeline
from penstock.schedule.op import Kind, Op

MARGIN, RIGHT, GAP, WIDE_GAP, LANE, TALL_LANE = 16.0, 28.0, 6.0, 18.0, 28.0, 36.0
NARROWEST, WIDEST = 520.0, 1600.0
#: Points for a short op, where the whole then is neither too narrow nor too wide.
_OP = 22.0
#: More transfers than this get no heads: they would blacken the figure.
_MANY_TRANSFERS = 400
_TITLE, _LABEL, _SMALL, _TINY = 15.0, 12.0, 11.0, 8.0
_STYLE = (
    ".penstock text{font-family:sans-serif;pointer-events:none}"
    f".penstock .h{{font-size:{_TITLE:g}px;font-weight:600}}.penstock .l{{font-size:{_LABEL:g}px}}"
    f".penstock .s,.penstock .n{{font-size:{_SMALL:g}px}}.penstock .m{{font-size:{_TINY:g}px}}"
    ".penstock .n,.penstock .m,.penstock .c{text-anchor:middle}.penstock .e{text-anchor:end}"
    ".penstock .grid{stroke-width:.6}.penstock .axis,.penstock .t{stroke-width:1}.penstock .t,.penstock .axis{fill:none}"
    ".penstock .many{stroke-width:.5;stroke-opacity:.5}.penstock .box rect{stroke-width:.8}.penstock .box.fine rect,.penstock .box .z{stroke:none}"
)


def svg(panels: Sequence[Timeline], note: str = "", words: bool = True) -> str:
    """Draw timelines one above the other on a common time scale.

    Boxes carry their micro-batch where it fits, and their stage (`s2`) on a rank that holds several; pointing at one says when
    it began and how long it took. An op that took no time is a thin mark.

    Args:
        panels: the timelines.
        note: a last line.
        words: False leaves out headings and figures, for pages that say them around the drawing.
    """
    page = _Page.of(panels)
    places = []
    for panel in panels:
        if words:
            page.paragraph([heading(panel)], "h", _TITLE)
            page.paragraph(figures(panel, page.clock), "s", _SMALL)
            page.y += 4
        top = page.y
        page.lanes(panel)
        places.append((top, page.y))
        page.y += 16
    page.y -= 10
    page.axis(places)
    page.legend(panels)
    if note:
        page.y += 8
        page.paragraph([clean(note)], "l", _LABEL)
    label = escape("; ".join(heading(panel) for panel in panels))
    return page.document(label)


@dataclass
class _Page:
    """A drawing in the making: what is drawn so far, and `y`, where the next thing goes. Lengths in points."""

    clock: Clock
    seconds: float
    left: float
    plot: float
    y: float = MARGIN
    behind: list[str] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    numbered: set[Kind] = field(default_factory=set)

    @classmethod
    def of(cls, panels: Sequence[Timeline]) -> _Page:
        whole, clock = horizon(panels), Clock.of(panels)
        lengths = [e.end - e.start for panel in panels for e in panel.compute if e.op.kind is not Kind.U and e.end > e.start]
        short = quantiles(lengths, n=4)[0] if len(lengths) > 1 else whole
        plot = min(WIDEST, max(NARROWEST, _OP * whole / short)) if short > 0 else NARROWEST
        labels = [text_width(_axis_title(clock), _SMALL)]
        for panel in panels:
            labels += [text_width(f"rank {panel.ranks - 1}", _LABEL)]
            labels += [text_width(words, _SMALL) for words in _held(panel)]
        return cls(clock, whole, MARGIN + max(labels) + 10, plot)

    @property
    def width(self) -> float:
        return self.left + self.plot + RIGHT

    def x(self, seconds: float) -> float:
        """Where a moment stands; moments after the end of the axis at its end."""
        return self.left + (self.plot * min(1.0, seconds / self.seconds) if self.seconds else 0.0)

    def text(self, x: float, words: str, classes: str) -> None:
        """Words with their baseline at `y`."""
        self.parts.append(f'<text class="{classes}" x="{_n(x)}" y="{_n(self.y)}">{escape(words)}</text>')

    def paragraph(self, items: list[str], classes: str, size: float) -> None:
        """Items from the left margin with commas between, broken between items where that is possible."""
        room = self.width - 2 * MARGIN
        measured = 1.12 * size if classes == "h" else size  # bold letters are wider
        between = text_width(", ", measured)
        for line in flowing([text_width(item, measured) for item in items], between, room):
            for part in wrapped(", ".join(items[index] for index in line), measured, room):
                self.y += size
                self.text(MARGIN, part, classes)
                self.y += 5

    def lanes(self, panel: Timeline) -> None:
        """The lanes of all ranks with boxes and transfers."""
        held = stages_of_rank(panel)
        transfers = [event for event in panel.events if event.to_rank is not None and event.end > event.start]
        height = TALL_LANE if any(len(stages) > 1 for stages in held) else LANE
        gap = WIDE_GAP if transfers else GAP
        tops = [self.y + rank * (height + gap) for rank in range(panel.ranks)]
        end = self.x(panel.makespan) if panel.makespan else self.left + self.plot
        names = _held(panel)
        for rank, top in enumerate(tops):
            self.behind.append(f'<rect class="lane" x="{_n(self.left)}" y="{_n(top)}" '
                               f'width="{_n(end - self.left)}" height="{_n(height)}"/>')  # fmt: skip
            self.y = top + height / 2 + (-2 if names[rank] else 4)
            self.text(self.left - 8, f"rank {rank}", "l e")
            if names[rank]:
                self.y += 13
                self.text(self.left - 8, names[rank], "s e")
        self._transfers(transfers, tops, height)
        self._boxes(panel, held, tops, height)
        self.y = tops[-1] + height if tops else self.y

    def _transfers(self, transfers: list[Event], tops: list[float], height: float) -> None:
        many = len(transfers) > _MANY_TRANSFERS
        for back in (False, True):
            lines = []
            for event in transfers:
                if (event.op.kind is not Kind.F) is back and event.to_rank is not None:
                    down = event.to_rank > event.rank
                    start, end = tops[event.rank] + down * height, tops[event.to_rank] + (not down) * height
                    lines.append(f'<path d="M{_n(self.x(event.start))} {_n(start)}L{_n(self.x(event.end))} {_n(end)}">'
                                 f"<title>{event.op} to rank {event.to_rank}: {self._span(event)}</title></path>")  # fmt: skip
            if lines:
                head = "" if many else f' marker-end="url(#penstock-{"back" if back else "on"})"'
                classes = "t" + back * " r" + many * " many"
                self.parts.append(f'<g class="{classes}"{head}>{"".join(lines)}</g>')

    def _boxes(self, panel: Timeline, held: list[list[int]], tops: list[float], height: float) -> None:
        size = self._number_sizes(panel)
        fine = bool(panel.compute) and median(self._wide(event) for event in panel.compute) < 4
        rows: list[list[str]] = [[] for _ in tops]
        labels: list[list[str]] = [[] for _ in tops]
        for event in panel.compute:
            rank, op, start, end, *_ = event
            odd = held[rank].index(op.stage) % 2 == 1
            mark = end <= start
            x, width = (self.x(start) - 1, 2.0) if mark else (self.x(start), self._wide(event))
            classes = fill_class(op.kind, odd) + " z" * mark
            rows[rank].append(f'<rect class="{classes}" x="{_n(x)}" width="{_n(width)}" height="{_n(height)}">'
                              f"<title>{op}: {self._span(event)}</title></rect>")  # fmt: skip
            number_size = size[op.kind]
            if text_width(str(op.micro_batch), number_size) + 2 <= width:
                several = len(held[rank]) > 1 and text_width(f"s{op.stage}", _TINY) + 2 <= width
                ink = "v" if FILLS[op.kind][odd] in DARK else "k"
                labels[rank] += _label(op, x + width / 2, height, f"{'n' if number_size == _SMALL else 'm'} {ink}", several)
                self.numbered.add(op.kind)
        for top, row, words in zip(tops, rows, labels, strict=True):
            if row:
                self.parts.append(
                    f'<g class="box{" fine" * fine}" transform="translate(0 {_n(top)})">{"".join(row + words)}</g>'
                )

    def _wide(self, event: Event) -> float:
        return self.x(event.end) - self.x(event.start)

    def _number_sizes(self, panel: Timeline) -> dict[Kind, float]:
        """By kind, the font size of micro-batches: one for all boxes, such that the longest fits the typical box."""
        sizes = {}
        for kind in kinds([panel]):
            events = [event for event in panel.compute if event.op.kind is kind]
            longest = max(text_width(str(event.op.micro_batch), _SMALL) for event in events)
            sizes[kind] = _SMALL if longest + 3 <= median(map(self._wide, events)) else _TINY
        return sizes

    def _span(self, event: Event) -> str:
        return f"{self.clock.exact(event.end - event.start)} at {self.clock.exact(event.start)}"

    def axis(self, places: list[tuple[float, float]]) -> None:
        """The time axis below everything drawn so far, its ticks going up through the lanes at `places`."""
        line = self.y
        self.parts.append(f'<path class="axis" d="M{_n(self.left)} {_n(line)}H{_n(self.left + self.plot)}"/>')
        self.y += 16
        self.text(self.left - 8, _axis_title(self.clock), "s e")
        for step in self.clock.steps(self.seconds / self.plot or 1.0):
            moments = [i * step for i in range(int(self.seconds / step + 1e-9) + 1)]
            broadest = text_width(self.clock.tick_number(moments[-1]), _SMALL)
            if len(moments) == 1 or self.x(step) - self.left >= max(broadest + 14, 36):
                break
        for moment in moments:
            x, words = self.x(moment), self.clock.tick_number(moment)
            for top, bottom in places:
                self.behind.append(f'<path class="grid" d="M{_n(x)} {_n(top)}V{_n(bottom)}"/>')
            self.parts.append(f'<path class="axis" d="M{_n(x)} {_n(line)}v4"/>')
            if x + text_width(words, _SMALL) / 2 <= self.width:
                self.text(x, words, "s c")
        self.y += 12

    def legend(self, panels: Sequence[Timeline]) -> None:
        """A swatch and a name for every kind that occurs, for idle and for transfers."""
        twice = any(len(stages) > 1 for panel in panels for stages in stages_of_rank(panel))
        entries = [(_swatch(kind, twice), f"{kind} {KIND_NAMES[kind]}") for kind in kinds(panels)]
        entries.append(('<rect class="lane" width="18" height="12"/>', "idle"))
        for back, name in ((False, "activation"), (True, "gradient")):
            if any(e.to_rank is not None and e.end > e.start and (e.op.kind is not Kind.F) is back
                   for panel in panels for e in panel.events):  # fmt: skip
                classes, head = ("t r", "back") if back else ("t", "on")
                entries.append((f'<path class="{classes}" d="M0 6H17" marker-end="url(#penstock-{head})"/>', f"{name} sent"))
        if self.numbered:
            versions = ", of U the weight version" if Kind.U in self.numbered else ""
            entries.append(("", f"numbers: micro-batch{versions}{', s: stage' if twice else ''}"))
        widths = [(24 if sign else 0) + text_width(name, _SMALL) for sign, name in entries]
        for line in flowing(widths, 14, self.width - 2 * MARGIN):
            x = MARGIN
            self.y += 14
            for index in line:
                sign, name = entries[index]
                if sign:
                    self.parts.append(f'<g transform="translate({_n(x)} {_n(self.y - 10)})">{sign}</g>')
                self.text(x + (24 if sign else 0), name, "s")
                x += widths[index] + 14
            self.y += 6

    def document(self, label: str) -> str:
        """The finished file; `label` is escaped and names the drawing to who cannot see it."""
        width, height = _n(self.width), _n(self.y + MARGIN)
        heads = "".join(
            f'<marker id="penstock-{name}" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" markerHeight="6" orient="auto" '
            f'markerUnits="userSpaceOnUse"><path class="head{classes}" d="M0 .5L6 3L0 5.5z"/></marker>'
            for name, classes in (("on", ""), ("back", " r"))
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="penstock" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" aria-label="{label}">\n<style>{light_style()}{_STYLE}</style>\n<defs>{heads}</defs>\n'
            f'<rect class="bg" width="{width}" height="{height}"/>\n' + "\n".join([*self.behind, *self.parts]) + "\n</svg>\n"
        )


def _n(value: float) -> str:
    return number(value, 2)


def _axis_title(clock: Clock) -> str:
    return f"time, {clock.unit}" if clock.unit else "time"


def _held(panel: Timeline) -> list[str]:
    """Per rank the stages it holds, `s0 s4`; nothing where every rank holds the one stage of its own number."""
    held = stages_of_rank(panel)
    if all(stages in ([], [rank]) for rank, stages in enumerate(held)):
        return [""] * len(held)
    return [
        " ".join(f"s{stage}" for stage in stages) if len(stages) <= 4 else f"s{stages[0]} … s{stages[-1]}" for stages in held
    ]


def _label(op: Op, middle: float, height: float, classes: str, with_stage: bool) -> list[str]:
    """The micro-batch in a box, and below it the stage."""
    base = height / 2 + (4 if classes.startswith("n") else 3) - (6 if with_stage else 0)
    label = [f'<text class="{classes}" x="{_n(middle)}" y="{_n(base)}">{op.micro_batch}</text>']
    if with_stage:
        label.append(f'<text class="m {classes[2:]}" x="{_n(middle)}" y="{_n(height - 6)}">s{op.stage}</text>')
    return label


def _swatch(kind: Kind, twice: bool) -> str:
    if not twice:
        return f'<rect class="{kind}" width="18" height="12"/>'
    return f'<rect class="{kind}" width="9" height="12"/><rect class="{kind}2" x="9" width="9" height="12"/>'
