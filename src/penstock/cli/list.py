"""`penstock list`: the entries of a catalogue, with their sources."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from penstock.cli.flags import options
from penstock.cli.flags.options import Json
from penstock.errors import UnknownName
from penstock.text_table import table

#: A catalogue's entries: facts by name. The first fact is the column that a terminal shows.
Facts = dict[str, dict[str, object]]


def _schedules() -> Facts:
    """Return the schedules, and whether they are synchronous."""
    from penstock.search.schedules import schedules

    return {
        name: {"source": facts.source, "synchronous": facts.synchronous}
        for name, facts in schedules().items()
    }


def _planners() -> Facts:
    """Return the planners."""
    from penstock.search.catalogue import PLANNERS

    return {name: dict(entry.facts) for name, entry in PLANNERS.entries().items()}


def _partitioners() -> Facts:
    """Return the partition methods."""
    from penstock.partition.catalogue import PARTITIONERS

    return {name: dict(entry.facts) for name, entry in PARTITIONERS.entries().items()}


def _weights() -> Facts:
    """Return the weight rules, their options and the optimizers that they support."""
    from penstock.weights.catalogue import WEIGHT_RULES, weight_rule

    facts: Facts = {}
    for name in WEIGHT_RULES.entries():
        rule = weight_rule(name)
        facts[name] = {
            "source": rule.source,
            "options": dict(rule.options),
            "optimizers": list(rule.optimizers),
        }
    return facts


def _clusters() -> Facts:
    """Return the clusters of the presets."""
    from penstock.cluster.cluster import cluster
    from penstock.cluster.presets import Presets

    facts: Facts = {}
    for name, row in Presets.load().clusters.items():
        facts[name] = {"source": row.get("source", ""), "devices": len(cluster(name).devices)}
    return facts


def _models() -> Facts:
    """Return the models of the zoo, their parameters and options."""
    from penstock.zoo.catalogue import models

    return {
        name: {
            "source": facts.source,
            "parameters": facts.parameters,
            "options": facts.options,
        }
        for name, facts in models().items()
    }


def _data() -> Facts:
    """Return the data sets and how they are written."""
    from penstock.training.data.catalogue import DATASETS

    facts: Facts = {}
    for name, entry in DATASETS.entries().items():
        facts[name] = {"source": entry.facts["source"], "usage": entry.facts["usage"]}
    return facts


def _exports() -> Facts:
    """Return the libraries that plans are exported to."""
    from penstock.export.catalogue import EXPORTERS

    return {
        name: {"source": entry.facts.get("source", "")}
        for name, entry in EXPORTERS.entries().items()
    }


KINDS: dict[str, Callable[[], Facts]] = {
    "schedules": _schedules,
    "planners": _planners,
    "partitioners": _partitioners,
    "weights": _weights,
    "clusters": _clusters,
    "models": _models,
    "data": _data,
    "exports": _exports,
}


def list_names(
    kind: Annotated[
        str,
        typer.Argument(
            help=f"What to list: {', '.join(KINDS)}.", autocompletion=lambda: list(KINDS)
        ),
    ],
    json: Json = False,
) -> None:
    """List the schedules, planners, partitioners, weight rules, clusters, models, data sets or
    export formats, also those of installed plug-ins.

    Example: penstock list planners
    """
    if kind not in KINDS:
        raise UnknownName("kind of entry", kind, list(KINDS))
    facts = KINDS[kind]()
    if json:
        options.print_json(facts)
        return
    rows = [(name, str(entry.get("source", ""))) for name, entry in facts.items()]
    print(table((kind, "source"), rows))
