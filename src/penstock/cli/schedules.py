"""`penstock schedules`: what there is, and how it compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import Json, print_json, table
from penstock.errors import SettingError

if TYPE_CHECKING:
    from penstock.cli.comparison import Compared

#: What the table can be sorted by; equals stay in the order of their names.
SORTS: dict[str, Callable[[Compared], float | str]] = {
    "bubble": lambda each: each.bubble_ratio,
    "span": lambda each: each.span_bubble_ratio,
    "makespan": lambda each: each.makespan,
    "in-flight": lambda each: each.in_flight,
    "weights": lambda each: each.weights,
    "name": lambda each: each.name,
}
HEAD = (
    "stages",
    "bubble ratio",
    "by span",
    "makespan",
    "in flight",
    "weights held",
    "splits backward",
)
_EXPLAINED = (
    "A rank's share of the model costs F = 1, B = 2, I = W = 1 for a micro-batch, be it one stage or several; transfers and updates are "
    "free. Bubble ratio: idle time of all ranks / (ranks x makespan); by span: idle share of the longest time from a rank's first op to its "
    "last, as the zero-bubble papers count. In flight: micro-batches on the fullest rank. Weights held: copies of the model on all ranks, in "
    "all versions. Asynchronous schedules do not drain between batches: bubble ratio and makespan are those of one batch once they are full."
)


def schedules(
    stages: Annotated[
        int | None,
        typer.Option(
            help="Compare all on so many ranks, of one stage each or more; 4 if not said."
        ),
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option(help="Parts that a batch is cut into; 8 if not said.")
    ] = None,
    sort: Annotated[
        str | None, typer.Option(help="bubble, span, makespan, in-flight, weights or name.")
    ] = None,
    gallery: Annotated[
        Path | None, typer.Option(help="Draw all into this folder, with a page that shows them.")
    ] = None,
    json: Json = False,
) -> None:
    """List all schedules with their sources; with numbers, compare them.

    Example: penstock schedules --stages 4 --micro-batches 8 --sort in-flight
    """
    if stages is None and micro_batches is None and sort is None and gallery is None:
        _sources(json)
        return
    if sort is not None and sort not in SORTS:
        raise SettingError(f"--sort is one of {', '.join(SORTS)}, not {sort!r}")
    from penstock.cli.comparison import compare

    ranks, parts = 4 if stages is None else stages, 8 if micro_batches is None else micro_batches
    for flag, number in (("stages", ranks), ("micro-batches", parts)):
        if number < 1:
            raise SettingError(f"--{flag} {number}: there is at least 1")
    found, refused = compare(ranks, parts)
    found.sort(key=SORTS[sort or "bubble"])
    if gallery is not None:
        _draw(gallery, ranks, parts, found, refused)
    if json:
        print_json(
            {
                "ranks": ranks,
                "micro_batches": parts,
                "schedules": [each.facts() for each in found],
                "refused": refused,
            }
        )
    elif gallery is None:
        print(table(("schedule", *HEAD), [(each.name, *_cells(each)) for each in found]))
        for line in _left_out(refused):
            print(line)


def _cells(each: Compared) -> tuple[str, ...]:
    return (
        str(each.stages),
        f"{each.bubble_ratio:.1%}".replace("%", " %"),
        f"{each.span_bubble_ratio:.1%}".replace("%", " %"),
        f"{each.makespan:.2f}".rstrip("0").rstrip("."),
        f"{each.in_flight:.2f}".rstrip("0").rstrip("."),
        f"{each.weights:.2f}".rstrip("0").rstrip("."),
        "yes" if each.splits_backward else "no",
    )


def _left_out(refused: dict[str, str]) -> list[str]:
    """A line for every reason, with the names it holds for."""
    names: dict[str, list[str]] = {}
    for name, reason in refused.items():
        names.setdefault(reason, []).append(name)
    return [f"{', '.join(each)}: {reason}" for reason, each in names.items()]


def _draw(
    folder: Path, ranks: int, micro_batches: int, found: list[Compared], refused: dict[str, str]
) -> None:
    from penstock.draw.gallery import Exhibit, Show, gallery

    left_out = _left_out(refused)
    before = (
        f"Every schedule of Penstock on {ranks} ranks with {micro_batches} micro-batches, simulated. {_EXPLAINED}",
        f"Made by: penstock schedules --stages {ranks} --micro-batches {micro_batches} --gallery {folder.name}",
    )
    show = Show(
        f"Schedules on {ranks} ranks",
        before,
        HEAD,
        tuple(f"Not shown: {each}." for each in left_out),
    )
    exhibits = [Exhibit(each.name, each.source, each.timeline, _cells(each)) for each in found]
    written = gallery(folder, show, exhibits)
    typer.echo(f"wrote {len(written)} files, see {folder / 'index.html'}", err=True)


def _sources(json: bool) -> None:
    from penstock.search.schedules import schedules as known

    facts = known()
    if json:
        print_json({name: asdict(each) for name, each in facts.items()})
        return
    rows = [
        (
            name,
            "yes" if each.synchronous else "no",
            each.weights,
            each.stages_per_rank,
            "yes" if each.splits_backward else "no",
            each.source,
        )
        for name, each in facts.items()
    ]
    print(
        table(
            ("schedule", "synchronous", "weights", "stages per rank", "splits backward", "source"),
            rows,
        )
    )
    for name, each in facts.items():
        if each.aliases:
            print(f"{', '.join(each.aliases)}: other names of {name}")
