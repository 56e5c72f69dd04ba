"""`penstock partition`: cut a profiled model into stages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.flags import options
from penstock.cli.flags.options import Json
from penstock.errors import SettingError
from penstock.text_table import table
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from penstock.profile.profile import Profile


def partition(
    profile: Annotated[
        Path | None, typer.Argument(help="A profile from `penstock profile`.")
    ] = None,
    stages: Annotated[int | None, typer.Option(help="Number of stages.")] = None,
    by: Annotated[
        str,
        typer.Option(help="Partition method, type:REGEX, or the layers per stage: 5,6,4."),
    ] = "bottleneck",
    methods: Annotated[
        bool, typer.Option("--list", help="List the partition methods and their sources.")
    ] = False,
    json: Json = False,
) -> None:
    """Cut a profiled model into stages.

    Example: penstock partition profile.json --stages 4 --by time
    """
    from penstock.partition.catalogue import partition as cut
    from penstock.profile.profile import Profile

    if methods:
        _list_methods(json)
        return
    if profile is None:
        raise SettingError("name a profile: penstock partition profile.json --stages 4")
    costs = Profile.load(profile)
    words = by.split(",")
    method: str | list[int] = by
    if all(word.strip().isdecimal() for word in words):
        method = [int(word) for word in words]
    lengths = cut(costs, stages, method)
    if json:
        options.print_json(lengths)
        return
    print(f"{lengths}  by {by}; F + B for {costs.sizes[-1]} samples")
    print(table(("stage", "layers", "from", "to", "F + B", "weights"), _stage_rows(costs, lengths)))


def _list_methods(json: bool) -> None:
    """Print the partition methods and their sources."""
    from penstock.partition.catalogue import PARTITIONERS

    sources = {
        name: str(entry.facts.get("source", "")) for name, entry in PARTITIONERS.entries().items()
    }
    if json:
        options.print_json(sources)
    else:
        print(table(("method", "source"), list(sources.items())))


def _stage_rows(profile: Profile, lengths: list[int]) -> list[tuple[str, ...]]:
    """Return a row of the table per stage: layers, time for the largest batch, bytes of weights."""
    layer_seconds = profile.step_seconds(profile.sizes[-1])
    rows: list[tuple[str, ...]] = []
    first = 0
    for stage, length in enumerate(lengths):
        end = first + length
        layers = profile.layers[first:end]
        weight_bytes = sum(layer.parameter_bytes for layer in layers)
        rows.append(
            (
                str(stage),
                str(length),
                layers[0].name,
                layers[-1].name,
                format_seconds(sum(layer_seconds[first:end])),
                format_bytes(weight_bytes),
            )
        )
        first = end
    return rows
