"""`penstock partition`: where to cut."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import options
from penstock.cli.options import Json
from penstock.errors import SettingError
from penstock.units import format_bytes, format_seconds


def partition(
    profile: Annotated[
        Path | None, typer.Argument(help="A profile from `penstock profile`.")
    ] = None,
    stages: Annotated[int | None, typer.Option(help="Number of stages.")] = None,
    by: Annotated[
        str, typer.Option(help="A method, type:REGEX, or layers per stage: 5,6,4.")
    ] = "bottleneck",
    methods: Annotated[bool, typer.Option("--list", help="List the methods.")] = False,
    json: Json = False,
) -> None:
    """Cut a profiled model into stages.

    Example: penstock partition profile.json --stages 4 --by time
    """
    from penstock.partition.catalogue import PARTITIONERS
    from penstock.partition.catalogue import partition as cut
    from penstock.profile.profile import Profile

    if methods:
        facts = {
            name: str(entry.facts.get("source", ""))
            for name, entry in PARTITIONERS.entries().items()
        }
        if json:
            options.print_json(facts)
        else:
            print(options.table(("method", "source"), list(facts.items())))
        return
    if profile is None:
        raise SettingError("say which profile to cut: penstock partition profile.json --stages 4")
    costs = Profile.load(profile)
    words = by.split(",")
    lengths = cut(
        costs,
        stages,
        [int(word) for word in words] if all(word.strip().isdigit() for word in words) else by,
    )
    if json:
        options.print_json(lengths)
        return
    seconds, rows, first = costs.step_seconds(costs.sizes[-1]), [], 0
    for stage, length in enumerate(lengths):
        layers = costs.layers[first : first + length]
        weights = sum(layer.parameter_bytes for layer in layers)
        time = format_seconds(sum(seconds[first : first + length]))
        rows.append(
            (str(stage), str(length), layers[0].name, layers[-1].name, time, format_bytes(weights))
        )
        first += length
    print(f"{lengths}  by {by}; F + B for {costs.sizes[-1]} samples")
    print(options.table(("stage", "layers", "from", "to", "F + B", "weights"), rows))
