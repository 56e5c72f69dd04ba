"""Answers of the server as plain values and HTML; without any web library."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from penstock.draw.compare import difference
from penstock.draw.facts import heading
from penstock.draw.palette import dark_style
from penstock.draw.svg import svg
from penstock.draw.viewer import resource, viewer_data, viewer_frame, viewer_legend
from penstock.errors import FileError, MissingExtra, PenstockError
from penstock.explore import tables
from penstock.explore.choices import choices
from penstock.explore.commands import commands
from penstock.explore.evaluate import Panel, evaluate, overfull_ranks, steady_state_of
from penstock.explore.presets import PRESETS
from penstock.explore.state import (
    MAX_BATCHES,
    MAX_MICRO_BATCHES,
    MAX_RANKS,
    RECOMPUTE,
    BadState,
    State,
    parse_state,
)
from penstock.explore.sweep import HEIGHT, WIDTH, chart, sweep
from penstock.explore.uploads import state_of_files
from penstock.files.read import parse_json
from penstock.schedule.dependencies import dependencies_of
from penstock.simulate.costs import LINKS

if TYPE_CHECKING:
    from jinja2 import Environment

#: Ops of both timelines up to which every op is drawn as a box. 6,000 take about 60 ms to write;
#: with more, lanes show shares of time.
MAX_BOXES: Final = 6_000
#: The page that a reader sees first.
START: Final = "a=1f1b&b=zb-h1"
#: Ops up to which the page has a static picture for browsers without scripts.
_MAX_STATIC_OPS: Final = 2_000


@cache
def templates() -> Environment:
    """Return the templates of the page.

    Raises:
        MissingExtra: Jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise MissingExtra("jinja2", "explore", "penstock explore") from error
    return Environment(
        loader=PackageLoader("penstock.explore"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def page(query: str) -> str:
    """Return the whole page for a query string.

    Fields that cannot be parsed have a message; the figures are those of the others.

    Args:
        query: the state.
    """
    problems: dict[str, str] = {}
    bad_texts: dict[str, str] = {}
    try:
        state = parse_state(query or START)
    except BadState as error:
        state, problems, bad_texts = error.state, error.problems, error.texts
    panels = evaluate(state)
    timelines = tables.timelines_of(panels)
    ops = sum(len(timeline.log.start) for timeline in timelines)
    static = svg(timelines, summary=True) if timelines and ops <= _MAX_STATIC_OPS else ""
    label = escape("; ".join(map(heading, timelines)) or "no timeline")
    texts = {**state.texts(), **bad_texts}
    return (
        templates()
        .get_template("page.html")
        .render(
            texts=texts,
            problems=problems,
            other_problems={
                name: text for name, text in problems.items() if name not in state.texts()
            },
            query=state.query,
            choices=choices(),
            presets=PRESETS,
            links=LINKS,
            recompute=RECOMPUTE,
            limits={
                "ranks": MAX_RANKS,
                "micro_batches": MAX_MICRO_BATCHES,
                "batches": MAX_BATCHES,
            },
            figure=viewer_frame(
                label,
                viewer_legend(timelines, MAX_BOXES) if timelines else "",
                static,
                attributes='id="penstock-figure"',
            ),
            fragments=_fragments(state, panels),
        )
    )


def style_sheet() -> str:
    """Return the style sheet: that of drawings, and what the page adds."""
    explore = files("penstock.explore").joinpath("static")
    light = resource("viewer.css") + resource("page.css")
    dark = resource("page_dark.css") + dark_style()
    explore_light = explore.joinpath("explore.css").read_text(encoding="utf-8")
    explore_dark = explore.joinpath("explore_dark.css").read_text(encoding="utf-8")
    return f"{light}{explore_light}@media (prefers-color-scheme:dark){{{dark}{explore_dark}}}"


def evaluation(query: str) -> dict[str, Any]:
    """Return what changes on the page with its state: data of the figure, and HTML.

    The key `problems` has messages by field; if there are any, there is nothing else.
    """
    start = time.perf_counter()
    try:
        state = parse_state(query)
    except BadState as error:
        return {"problems": error.problems}
    panels = evaluate(state)
    timelines = tables.timelines_of(panels)
    results = [panel.result for panel in panels if panel.result is not None]
    # The simulation has computed them already.
    dependencies = [dependencies_of(result.simulated) for result in results]
    return {
        "problems": {},
        "query": state.query,
        "panels": [panel.choice.facts.name for panel in panels],
        "data": viewer_data(timelines, MAX_BOXES, dependencies) if timelines else None,
        "legend": viewer_legend(timelines, MAX_BOXES) if timelines else "",
        "label": "; ".join(map(heading, timelines)),
        "fragments": _fragments(state, panels),
        "milliseconds": round(1000 * (time.perf_counter() - start), 1),
    }


def _fragments(state: State, panels: Sequence[Panel]) -> dict[str, str]:
    """Return the HTML of the parts of the page that depend on the state, by their ids."""
    context = {
        "state": state,
        "texts": state.texts(),
        "panels": panels,
        "rows": tables.key_figures(state, panels),
        "rank_rows": tables.rank_rows(state, panels),
        "limit_share": tables.limit_share(state, panels),
        "notes": {panel.name: _notes(state, panel) for panel in panels},
        "summary": _summary(state, panels),
        "difference": _difference(panels),
        "commands": {panel.name: commands(state, panel) for panel in panels},
    }
    rendered = {
        name: templates().get_template(f"{name}.html").render(context)
        for name in ("summary", "figures", "commands")
    }
    for name, selected in (("a", state.a), ("b", state.b)):
        panel = next((panel for panel in panels if panel.name == name), None)
        rendered[f"options-{name}"] = (
            templates()
            .get_template("options.html")
            .render({**context, "name": name, "selected": selected, "panel": panel})
        )
        rendered[f"about-{name}"] = (
            templates().get_template("about.html").render({**context, "panel": panel})
        )
    return rendered


def _difference(panels: Sequence[Panel]) -> str:
    """Return how the second timeline differs from the first; empty if they cannot be compared."""
    timelines = tables.timelines_of(panels)
    if len(timelines) < 2 or not tables.same_batches(panels):
        return ""
    return difference(*timelines)


def _notes(state: State, panel: Panel) -> list[str]:
    """Return what a reader has to know about a panel."""
    facts = panel.choice.facts
    notes = []
    if not facts.synchronous:
        notes.append(
            f"Asynchronous: updates use gradients of older weights (rule {facts.weights}). "
            f"{state.batches} batches are shown."
        )
    if facts.causal:
        notes.append("Only for models in which no token depends on a later one.")
    if panel.result is not None:
        ranks = overfull_ranks(state, panel.result.timeline)
        if ranks:
            names = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
            plural = "s" if len(ranks) > 1 else ""
            verb = "exceed" if len(ranks) > 1 else "exceeds"
            notes.append(f"▲ Rank{plural} {names} {verb} the memory limit.")
    return notes


def _summary(state: State, panels: Sequence[Panel]) -> str:
    """Return the key figures in a sentence, which screen readers announce."""
    sentences = []
    for panel in panels:
        name = panel.choice.facts.name
        if panel.result is None:
            sentences.append(f"{name} cannot run with these numbers.")
            continue
        timeline = panel.result.timeline
        text = f"{name}: bubble {100 * timeline.bubble_ratio:.1f} %"
        ranks = overfull_ranks(state, timeline)
        if ranks:
            text += f", {len(ranks)} of {timeline.ranks} ranks over the memory limit"
        sentences.append(f"{text}.")
    return " ".join(sentences)


def more(query: str) -> dict[str, Any]:
    """Return what takes longer: the steady state of asynchronous schedules, and the sweep."""
    try:
        state = parse_state(query)
    except BadState as error:
        return {"problems": error.problems}
    panels = evaluate(state)
    steady_states = [
        None if panel.result is None else steady_state_of(state, panel.result) for panel in panels
    ]
    context = {
        "rows": tables.steady_rows(panels, steady_states),
        "panels": panels,
        "chart": chart(sweep(state)),
        "width": WIDTH,
        "height": HEIGHT,
    }
    return {"problems": {}, "more": templates().get_template("more.html").render(context)}


def upload(query: str, body: str) -> dict[str, Any]:
    """Return the state with the content of files, and a message; or a problem.

    Args:
        query: the state of the page.
        body: a JSON list of names and texts of files.
    """
    try:
        state = parse_state(query)
        contents = parse_json(body, list[tuple[str, str]], "the upload", kind="list of files")
        if not 1 <= len(contents) <= 2:
            raise FileError("open one profile, one plan, or one of each")
        result = state_of_files(state, contents)
    except PenstockError as error:
        return {"problem": str(error)}
    return {
        "problem": "",
        "message": result.message,
        "query": result.state.query,
        "inputs": result.state.texts(),
    }
