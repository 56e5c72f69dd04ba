"""The figure of an HTML page that zooms: its frame and the data that `viewer.js` draws on a canvas.

`viewer.js` reads the data by the keys that are set here. A page of its own has the data in it
(`viewer`); a page that draws changing timelines puts the empty frame (`viewer_frame`) into its body
and fetches the data (`viewer_data`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files

import numpy as np

from penstock.draw.box_shades import BoxShades
from penstock.draw.columns import Spans, column_shares
from penstock.draw.facts import (
    KIND_NAMES,
    MAX_EXPLAINED_OPS,
    heading,
    kinds_in,
    op_name,
    op_number,
    shown_idle,
)
from penstock.draw.memory import downsample, holders_at_peak, memory_steps
from penstock.draw.pairs import events_by_rank, pair_halves
from penstock.draw.palette import FILLS, FILLS_ON_DARK, number_colours
from penstock.draw.scale import Clock, axis_seconds
from penstock.draw.stage_order import StageOrder, has_timed_updates, number_text
from penstock.draw.transfers import (
    TRANSFER_NAMES,
    timed_transfers,
    transfer_direction,
    transfer_directions,
)
from penstock.draw.waits import critical_path, dependencies_of_timeline, waits
from penstock.event import Event, MemoryCurve, Timeline
from penstock.idle import IdleCause
from penstock.schedule.dependencies import Dependencies
from penstock.schedule.op import Kind, Op

#: With more ops than this the page would have tens of megabytes; it then has a static figure with
#: columns instead of boxes.
MAX_VIEWER_OPS = 300_000
#: Columns of time of a timeline with too many ops for boxes: about the points of a wide screen.
_COLUMNS = 600

#: Letter of each transfer direction in the data.
_DIRECTION_LETTERS = {"on": "f", "back": "b", "pass": "p"}
#: Action in `viewer.js`, sign on the button, tooltip.
_BUTTONS = (
    ("in", "+", "zoom in"),
    ("out", "\N{MINUS SIGN}", "zoom out"),
    ("all", "all", "the whole timeline"),
    ("left", "←", "earlier"),
    ("right", "→", "later"),
    ("path", "critical path", "outline the ops that determine the makespan"),
)
_HINT = (
    "wheel or + \N{MINUS SIGN} 0: zoom · drag, shift + wheel or ← →: move · "
    "point at a box for its numbers"
)


def viewer(panels: Sequence[Timeline], label: str, static: str) -> str:
    """Return the only figure of a page with its data and its script, as HTML.

    The keys for zooming work on the whole page, and the address of the page holds the view.

    Args:
        panels: the timelines, on a common time scale.
        label: escaped description of the figure.
        static: an SVG for browsers that run no scripts and for print; may be empty.
    """
    figure = viewer_frame(
        label,
        viewer_legend(panels),
        static,
        attributes='id="penstock-figure" data-whole-page',
        data=_data_element(panels),
    )
    return f"{figure}\n<script>{viewer_script()}</script>"


def embedded_viewer(panels: Sequence[Timeline], label: str, static: str) -> str:
    """Return one of several figures of a page, as HTML; arguments are those of `viewer`.

    The page must end with a script element with `viewer_script`, which starts all figures. The keys
    for zooming work while the figure has the focus.
    """
    return viewer_frame(label, viewer_legend(panels), static, data=_data_element(panels))


def _data_element(panels: Sequence[Timeline]) -> str:
    """Return the script element with the data of a figure."""
    # In a script element only "</" and "<!--" are not text.
    data = json.dumps(viewer_data(panels), separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json">{data}</script>'


def viewer_script() -> str:
    """Return the script that starts all figures of a page that have their data in it."""
    return resource("viewer.js")


def resource(name: str) -> str:
    """Return the text of a file of `penstock.draw`: a style sheet or a script."""
    return files("penstock.draw").joinpath(name).read_text(encoding="utf-8")


def viewer_frame(
    label: str, legend: str = "", static: str = "", attributes: str = "", data: str = ""
) -> str:
    """Return a figure: buttons, canvas and legend.

    Args:
        label: escaped description of the figure.
        legend: HTML of the legend; may be set later.
        static: an SVG for browsers that run no scripts and for print; may be empty.
        attributes: further attributes of the element.
        data: the script element with the data; empty if a script sets the data.
    """
    buttons = "".join(
        f'<button type="button" data-do="{action}" title="{name}" aria-label="{name}">'
        f"{sign}</button>"
        for action, sign, name in _BUTTONS
    )
    return (
        f'<figure class="timeline" {attributes}><div class="tools">{buttons}'
        f'<span class="hint">{_HINT}</span><span class="summed" hidden>'
        "too many ops in view for a box each: heights are shares of time</span></div>"
        '<div class="frame"><div class="inner">'
        f'<canvas tabindex="0" role="img" aria-label="{label}"></canvas></div></div>'
        f'<div class="tip" role="status" hidden></div><div class="legend">{legend}</div>'
        f'<div class="still">{static}</div>\n{data}</figure>'
    )


def viewer_legend(panels: Sequence[Timeline], max_ops: int = MAX_VIEWER_OPS) -> str:
    """Return the HTML of the legend: colours of kinds, and what numbers, shades and halves mean.

    Args:
        panels: the timelines.
        max_ops: as in `viewer_data`.
    """
    boxed = _number_of_ops(panels) <= max_ops
    meanings = sorted({BoxShades.of(panel).meaning for panel in panels} - {""}) if boxed else []
    entries = []
    for kind in kinds_in(panels):
        fill = _legend_fill(kind, shaded=bool(meanings))
        entries.append((_colour_sign(fill), f"{kind} {KIND_NAMES[kind]}"))
    entries.append((_colour_sign("var(--lane)"), "idle"))
    if boxed and any(_waits_for_link(panel) for panel in panels):
        entries.append((_colour_sign("var(--link)"), "waits for the link"))
    if any(panel.memory for panel in panels):
        sign = _colour_sign("var(--held);border-bottom:1px solid var(--edge)")
        entries.append((sign, "memory, its peak before it"))
    for direction in transfer_directions(panels) if boxed else ():
        entries.append((f'<i class="arrow {direction}"></i>', TRANSFER_NAMES[direction]))
    entries += [("", meaning) for meaning in meanings]
    if boxed:
        entries.append(("", number_text(panels, has_versions=has_timed_updates(panels))))
        if any(_has_pairs(panel) for panel in panels):
            entries.append(("", "half boxes: pairs of ops"))
    return "".join(f"<span>{sign}{escape(text)}</span>" for sign, text in entries)


def _legend_fill(kind: Kind, *, shaded: bool) -> str:
    """Return the CSS background of a kind in the legend, both shades if there are two."""
    first, second = FILLS[kind]
    if kind in FILLS_ON_DARK:
        # Browsers without light-dark() ignore the second declaration.
        return f"{first};background:light-dark({first},{FILLS_ON_DARK[kind]})"
    return f"linear-gradient(90deg,{first} 50%,{second} 50%)" if shaded else first


def _number_of_ops(panels: Sequence[Timeline]) -> int:
    """Return the number of ops in all timelines."""
    return sum(len(panel.log.start) for panel in panels)


def _colour_sign(background: str) -> str:
    """Return a small box with a CSS background."""
    return f'<i style="background:{background}"></i>'


def _waits_for_link(panel: Timeline) -> bool:
    """Return whether any rank is shown to wait for a link."""
    return any(interval.cause is IdleCause.LINK for interval in shown_idle(panel))


def _has_pairs(panel: Timeline) -> bool:
    """Return whether two ops run as one on any rank."""
    return any(pair_halves(row) for row in events_by_rank(panel))


def viewer_data(
    panels: Sequence[Timeline],
    max_ops: int = MAX_VIEWER_OPS,
    dependencies: Sequence[Dependencies] | None = None,
) -> dict[str, object]:
    """Return what `viewer.js` draws, as plain values.

    Args:
        panels: the timelines, on a common time scale.
        max_ops: with more ops than this in all timelines together, there are no boxes, arrows and
            numbers: the data then has the share of time that each kind takes in columns of time.
        dependencies: of the schedule of each timeline, if the caller has them; for timelines of up
            to 20,000 ops they are computed otherwise.
    """
    clock, seconds = Clock.of(panels), axis_seconds(panels)
    boxed = _number_of_ops(panels) <= max_ops
    kinds = {
        str(kind): {
            "name": KIND_NAMES[kind],
            "fills": FILLS[kind],
            "dark": FILLS_ON_DARK.get(kind, ""),
            "inks": number_colours(kind),
        }
        for kind in kinds_in(panels)
    }
    panel_dependencies: Sequence[Dependencies | None] = dependencies or [None] * len(panels)
    return {
        "clock": {"unit": clock.unit, "factor": clock.factor},
        "seconds": _compact(seconds),
        "most": max((max(panel.peak_memory or (0,)) for panel in panels), default=0),
        "kinds": kinds,
        "panels": [
            _panel_data(panel, of_panel) if boxed else _shares_data(panel, seconds)
            for panel, of_panel in zip(panels, panel_dependencies, strict=True)
        ],
    }


def _shares_data(panel: Timeline, seconds: float) -> dict[str, object]:
    """Return the data of a timeline with too many ops for boxes.

    Args:
        panel: the timeline.
        seconds: length of the time axis.
    """
    labels = StageOrder.of(panel).rank_labels()
    curves = memory_steps(panel)
    kinds = kinds_in([panel])
    no_ops: dict[str, object] = {"t": [], "e": [], "k": "", "s": [], "n": [], "z": "", "h": ""}
    ranks = []
    for rank in range(panel.ranks):
        memory = None
        if curves is not None:
            memory = _memory_data(panel, rank, downsample(curves[rank], _COLUMNS, seconds))
        rank_data: dict[str, object] = {
            "name": f"rank {rank}",
            "held": labels[rank],
            "own": -1,
            **no_ops,
            "b": None,
            "memory": memory,
            "share": _rank_shares(panel, rank, kinds, seconds),
        }
        ranks.append(rank_data)
    return {
        "title": heading(panel),
        "makespan": _compact(panel.makespan),
        "several": False,
        "paired": False,
        "sent": {"t": [], "e": [], "f": [], "to": [], "o": [], "w": "", "b": []},
        "ranks": ranks,
    }


def _rank_shares(
    panel: Timeline, rank: int, kinds: Sequence[Kind], seconds: float
) -> dict[str, str]:
    """Return per kind the share of each column's time: a digit of base 36, z for all of it."""
    spans = Spans.of(panel, rank)
    # A timeline without ops has no length; its columns need one above 0.
    work, _ = column_shares(spans, kinds, _COLUMNS, seconds / _COLUMNS or 1.0)
    digits = np.frombuffer(b"0123456789abcdefghijklmnopqrstuvwxyz", np.uint8)
    texts = {}
    for kind, shares in work.items():
        levels = np.rint(35 * np.minimum(shares, 1.0)).astype(np.int64)
        texts[str(kind)] = digits[levels].tobytes().decode()
    return texts


def _panel_data(panel: Timeline, dependencies: Dependencies | None) -> dict[str, object]:
    """Return a timeline as the arrays that the viewer's script reads."""
    if dependencies is None and len(panel.log.start) <= MAX_EXPLAINED_OPS:
        dependencies = dependencies_of_timeline(panel)
    rank_waits = _waits_data(panel, dependencies)
    rank_idle = _idle_data(panel)
    no_path: list[list[int]] = [[] for _ in range(panel.ranks)]
    path = no_path if dependencies is None else critical_path(panel, dependencies)
    stage_order = StageOrder.of(panel)
    shades = BoxShades.of(panel, stage_order)
    curves = memory_steps(panel)
    labels = stage_order.rank_labels()
    transfers = [event for event in panel.events if event.to_rank is not None]
    transfer_bytes = {(event.rank, event.op): event.bytes for event in transfers if event.bytes}
    ranks: list[dict[str, object]] = []
    for rank, row in enumerate(events_by_rank(panel)):
        stages = stage_order.stages[rank]
        rank_data: dict[str, object] = {
            "name": f"rank {rank}",
            "held": labels[rank],
            "own": stages[0] if len(stages) == 1 else -1,
            **_op_columns(panel, rank, row, shades),
            "b": _sent_bytes(rank, row, transfer_bytes),
            "memory": None if curves is None else _memory_data(panel, rank, curves[rank]),
            "waits": rank_waits[rank],
            "idle": rank_idle[rank],
            "path": path[rank],
        }
        ranks.append(rank_data)
    return {
        "title": heading(panel),
        "makespan": _compact(panel.makespan),
        "several": stage_order.has_shared_ranks,
        "paired": _has_pairs(panel),
        "sent": _transfer_data(panel),
        "ranks": ranks,
    }


def _waits_data(
    panel: Timeline, dependencies: Dependencies | None
) -> list[dict[str, tuple[str, int, float, float]]]:
    """Return per rank what it waits for before its ops.

    The keys are positions of ops; the values are the op that is waited for, its rank, and the
    seconds at which it ends and its value arrives.
    """
    if dependencies is None:
        return [{} for _ in range(panel.ranks)]
    data = []
    for rank_waits in waits(panel, dependencies):
        rank_data = {}
        for position, wait in rank_waits.items():
            name = op_name(panel, wait.op)
            times = (_compact(wait.end), _compact(wait.arrival))
            rank_data[str(position)] = (name, wait.rank, *times)
        data.append(rank_data)
    return data


def _idle_data(panel: Timeline) -> list[list[tuple[float, float, str, str, int, int]]]:
    """Return per rank its idle intervals; empty lists for a simulated timeline.

    The values are start and end in seconds; the cause, n for the neighbour, l for the link, r for
    the rest; and of the transfer that is waited for: its op, its sender, and its bytes.
    """
    data: list[list[tuple[float, float, str, str, int, int]]] = [[] for _ in range(panel.ranks)]
    for interval in shown_idle(panel):
        transfer = interval.transfer
        awaited = ("", -1, 0)
        if transfer is not None:
            awaited = (op_name(panel, transfer.op), transfer.rank, transfer.bytes)
        times = (_compact(interval.start), _compact(interval.end))
        data[interval.rank].append((*times, interval.cause.value[0], *awaited))
    return data


def _sent_bytes(
    rank: int, row: Sequence[Event], transfer_bytes: Mapping[tuple[int, Op], int]
) -> list[int] | None:
    """Return the bytes that each op of a rank sends, or None if no bytes are known.

    Args:
        rank: the rank.
        row: its events, which may have bytes of their own.
        transfer_bytes: bytes of the transfers that have any, by rank and op.
    """
    if not transfer_bytes and not any(event.bytes for event in row):
        return None
    return [event.bytes or transfer_bytes.get((rank, event.op), 0) for event in row]


def _op_columns(
    panel: Timeline, rank: int, row: Sequence[Event], shades: BoxShades
) -> dict[str, object]:
    """Return the ops of a rank, as one list or string for each of their properties.

    The keys are t and e, start and end in seconds; k, the kind; s, the stage; n, the number in the
    box; z, 1 for the second shade; h, 1 or 2 for the first or second op of a pair, otherwise 0.
    """
    halves = pair_halves(row)
    half_digits = [str(1 + halves[index]) if index in halves else "0" for index in range(len(row))]
    return {
        "t": [_compact(event.start) for event in row],
        "e": [_compact(event.end) for event in row],
        "k": "".join(str(event.op.kind) for event in row),
        "s": [event.op.stage for event in row],
        "n": _numbers(panel, row),
        "z": "".join("1" if shades.is_second(rank, event.op) else "0" for event in row),
        "h": "".join(half_digits),
    }


def _numbers(panel: Timeline, row: Sequence[Event]) -> list[int] | list[str]:
    """Return the numbers in the boxes of a rank: integers, or text if there are slices."""
    texts = [op_number(panel, event.op) for event in row]
    return texts if any("." in text for text in texts) else [int(text) for text in texts]


def _memory_data(panel: Timeline, rank: int, steps: MemoryCurve) -> dict[str, object]:
    """Return a rank's memory over time, its peak, and what occupies the memory then.

    Args:
        panel: the timeline.
        rank: the rank.
        steps: its curve with one step per moment. The full curve has the exact peak.
    """
    curve = panel.memory[rank] if panel.memory is not None else steps
    return {
        "t": [_compact(seconds) for seconds in steps.seconds.tolist()],
        "b": steps.bytes.tolist(),
        "peak": curve.peak,
        "at": _compact(curve.peak_at),
        "by": holders_at_peak(panel, rank),
    }


def _transfer_data(panel: Timeline) -> dict[str, object]:
    """Return the transfers that take time, as one list or string for each of their properties.

    The keys are t and e, start and end in seconds; f and to, the sending and the receiving rank; o,
    the op; w, the direction: f for activations, b for gradients, p for activations that another
    rank stores; b, bytes.
    """
    transfers = timed_transfers(panel)
    return {
        "t": [_compact(event.start) for event in transfers],
        "e": [_compact(event.end) for event in transfers],
        "f": [event.rank for event in transfers],
        "to": [event.to_rank for event in transfers],
        "o": [op_name(panel, event.op) for event in transfers],
        "w": "".join(_DIRECTION_LETTERS[transfer_direction(event)] for event in transfers),
        "b": [event.bytes for event in transfers],
    }


def _compact(seconds: float) -> float:
    """Round to nine digits, a nanosecond in a second; more would only make the page larger."""
    value = float(f"{seconds:.9g}")
    return int(value) if value == int(value) else value
