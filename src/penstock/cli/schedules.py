"""`penstock schedules`: list the schedules, compare them, and draw a gallery of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.flags.options import Json, print_json
from penstock.errors import SettingError
from penstock.text_table import table

if TYPE_CHECKING:
    from penstock.search.schedule_figures import ScheduleFigures

#: Sort keys of the table by name; ties stay in the order of the schedules' names.
SORTS: dict[str, Callable[[ScheduleFigures], float | str]] = {
    "bubble": lambda figures: figures.bubble_ratio,
    "span": lambda figures: figures.span_bubble_ratio,
    "makespan": lambda figures: figures.makespan,
    "in-flight": lambda figures: figures.in_flight,
    "weights": lambda figures: figures.weights,
    "name": lambda figures: figures.name,
}
#: Stages and micro-batches of the comparison where the flags do not set them.
_STAGES, _MICRO_BATCHES = 4, 8
HEAD = (
    "stages",
    "bubble ratio",
    "by span",
    "makespan",
    "in flight",
    "weight copies",
    "splits backward",
)
_EXPLANATION = (
    "A rank's share of the model takes F = 1, B = 2, I = W = 1 for a micro-batch, in one stage or "
    "several; transfers and updates take no time. Bubble ratio: idle time of all ranks / (ranks x "
    "makespan); by span: idle share of the longest time from a rank's first op to its last, as in "
    "the zero-bubble papers. In flight: most micro-batches that any rank holds at a time. Weight "
    "copies: copies of the model on all ranks, in all versions. Asynchronous schedules do not drain "
    "between batches: their bubble ratio and makespan are those of one batch in the steady state."
)


def schedules(
    stages: Annotated[
        int | None,
        typer.Option(
            help="Compare all schedules on this number of ranks, with one stage or more on each; "
            "default: 4."
        ),
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option(help="Number of micro-batches per batch; default: 8.")
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(
            help="Sort the comparison by bubble, span, makespan, in-flight, weights or name."
        ),
    ] = None,
    gallery: Annotated[
        Path | None,
        typer.Option(help="Draw all schedules into this folder, with a page that shows them."),
    ] = None,
    json: Json = False,
) -> None:
    """List all schedules with their sources; or, with any other flag, compare them by simulation.

    Example: penstock schedules --stages 4 --micro-batches 8 --sort in-flight
    """
    if stages is None and micro_batches is None and sort is None and gallery is None:
        _list_schedules(json)
        return
    if sort is not None and sort not in SORTS:
        raise SettingError(f"--sort must be one of {', '.join(SORTS)}, not {sort!r}")
    _compare_schedules(
        _STAGES if stages is None else stages,
        _MICRO_BATCHES if micro_batches is None else micro_batches,
        sort or "bubble",
        gallery,
        json,
    )


def _compare_schedules(
    ranks: int, micro_batches: int, sort: str, gallery: Path | None, json: bool
) -> None:
    """Simulate all schedules; draw them into the folder `gallery`, or print a table or JSON.

    Raises:
        SettingError: a number is below 1.
        FileError: the gallery cannot be written.
    """
    from penstock.search.schedule_figures import compare

    for flag, number in (("stages", ranks), ("micro-batches", micro_batches)):
        if number < 1:
            raise SettingError(f"--{flag} {number}: must be at least 1")
    comparison, left_out = compare(ranks, micro_batches)
    comparison.sort(key=SORTS[sort])
    if gallery is not None:
        _draw_gallery(gallery, ranks, micro_batches, comparison, left_out)
    if json:
        print_json(
            {
                "ranks": ranks,
                "micro_batches": micro_batches,
                "schedules": [figures.facts() for figures in comparison],
                "refused": left_out,
            }
        )
    elif gallery is None:
        _print_comparison(comparison, grouped=sort != "name")
        for line in _left_out_lines(left_out):
            print(line)


def _print_comparison(comparison: list[ScheduleFigures], *, grouped: bool) -> None:
    """Print the table of figures; `grouped`: synchronous schedules first.

    An asynchronous schedule has no bubble, but gradients of older weights: sorted by bubble alone,
    such schedules would seem to be the best.
    """
    from penstock.search.schedules import schedules as list_schedules

    catalogue = list_schedules()
    rows = []
    for figures in comparison:
        synchronous = _yes_or_no(catalogue[figures.name].synchronous)
        rows.append((figures.name, *_cells(figures), synchronous))
    if grouped:
        rows.sort(key=lambda row: row[-1], reverse=True)
    print(table(("schedule", *HEAD, "synchronous"), rows))


def _cells(figures: ScheduleFigures) -> tuple[str, ...]:
    """Return the cells of a schedule's table row, in the order of `HEAD`."""
    from penstock.draw.facts import percent
    from penstock.draw.scale import format_number

    return (
        str(figures.stages),
        percent(figures.bubble_ratio),
        percent(figures.span_bubble_ratio),
        format_number(figures.makespan, 2),
        format_number(figures.in_flight, 2),
        format_number(figures.weights, 2),
        _yes_or_no(figures.splits_backward),
    )


def _yes_or_no(flag: bool) -> str:
    return "yes" if flag else "no"


def _left_out_lines(left_out: dict[str, str]) -> list[str]:
    """Write one line per reason, with the names of the schedules that it excludes."""
    names_of_reason: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        names_of_reason.setdefault(reason, []).append(name)
    return [f"{', '.join(names)}: {reason}" for reason, names in names_of_reason.items()]


def _draw_gallery(
    folder: Path,
    ranks: int,
    micro_batches: int,
    comparison: list[ScheduleFigures],
    left_out: dict[str, str],
) -> None:
    """Draw all schedules into a folder, with a page that shows them."""
    from penstock.draw.gallery import GalleryEntry, GalleryText, write_gallery
    from penstock.search.schedules import schedules as list_schedules

    command = (
        f"penstock schedules --stages {ranks} --micro-batches {micro_batches} "
        f"--gallery {folder.name}"
    )
    introduction = (
        f"Every schedule of Penstock on {ranks} ranks with {micro_batches} micro-batches, "
        f"simulated. {_EXPLANATION}"
    )
    after = tuple(f"Not shown: {line}." for line in _left_out_lines(left_out))
    text = GalleryText(
        f"Schedules on {ranks} ranks", (introduction, f"Command: {command}"), HEAD, after
    )
    catalogue = list_schedules()
    entries = []
    for figures in comparison:
        synchronous = catalogue[figures.name].synchronous
        group = "synchronous schedules" if synchronous else "asynchronous schedules"
        entries.append(
            GalleryEntry(figures.name, figures.source, figures.timeline, _cells(figures), group)
        )
    # An asynchronous schedule has no bubble, but gradients of older weights: the groups are apart.
    entries.sort(key=lambda entry: entry.group, reverse=True)
    paths = write_gallery(folder, text, entries)
    typer.echo(f"wrote {len(paths)} files, see {folder / 'index.html'}", err=True)


def _list_schedules(json: bool) -> None:
    """Print all schedules with their properties and sources."""
    from penstock.search.schedules import schedules as list_schedules

    catalogue = list_schedules()
    if json:
        print_json({name: asdict(facts) for name, facts in catalogue.items()})
        return
    rows = []
    for name, facts in catalogue.items():
        rows.append(
            (
                name,
                _yes_or_no(facts.synchronous),
                facts.weights,
                facts.stages_per_rank,
                _yes_or_no(facts.splits_backward),
                facts.source,
            )
        )
    head = ("schedule", "synchronous", "weights", "stages per rank", "splits backward", "source")
    print(table(head, rows))
    for name, facts in catalogue.items():
        if facts.aliases:
            print(f"{', '.join(facts.aliases)}: other names of {name}")
