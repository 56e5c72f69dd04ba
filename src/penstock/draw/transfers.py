"""The transfers that drawings show, and their directions."""

from __future__ import annotations

from penstock.event import Event, Timeline
from penstock.schedule.op import ACTIVATION_MOVES, Kind


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
