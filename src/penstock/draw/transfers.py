"""The transfers that drawings show, and their directions."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.event import Event, Timeline
from penstock.schedule.op import ACTIVATION_MOVES, Kind

#: What a transfer of each direction carries, for legends.
TRANSFER_NAMES = {
    "on": "activation sent",
    "back": "gradient sent",
    "pass": "activations handed over",
}


def timed_transfers(panel: Timeline) -> list[Event]:
    """Return the transfers that take time; only they are drawn."""
    return [
        event for event in panel.events if event.to_rank is not None and event.end > event.start
    ]


def transfer_direction(event: Event) -> str:
    """Return the direction of a transfer.

    It is "on" for activations, "back" for gradients, and "pass" for activations that another rank
    stores.
    """
    if event.op.kind in ACTIVATION_MOVES:
        return "pass"
    return "on" if event.op.kind is Kind.F else "back"


def transfer_directions(panels: Sequence[Timeline]) -> list[str]:
    """Return the directions of the drawn transfers of some timelines, in the order of legends."""
    directions = {transfer_direction(event) for panel in panels for event in timed_transfers(panel)}
    return [direction for direction in TRANSFER_NAMES if direction in directions]
