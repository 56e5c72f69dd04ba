"""`penstock schedules`: what there is."""

from __future__ import annotations

from dataclasses import asdict

from penstock.cli.options import Json, print_json, table


def schedules(json: Json = False) -> None:
    """List all schedules with their sources.

    Example: penstock schedules --json
    """
    from penstock.schedule.catalogue import schedules as known

    facts = known()
    if json:
        print_json({name: asdict(each) for name, each in facts.items()})
        return
    rows = [
        (
            name,
            "yes" if each.synchronous else "no",
            each.stages_per_rank,
            "yes" if each.splits_backward else "no",
            each.source,
        )
        for name, each in facts.items()
    ]
    print(table(("schedule", "synchronous", "stages per rank", "splits backward", "source"), rows))
    for name, each in facts.items():
        if each.aliases:
            print(f"{', '.join(each.aliases)}: other names of {name}")
