"""Describe how timelines that are drawn together differ."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.draw.facts import clean, heading, percent
from penstock.draw.scale import Clock
from penstock.event import Timeline


def differences(panels: Sequence[Timeline]) -> str:
    """Describe in one line how each later timeline differs from the first.

    Returns an empty string for a single timeline.
    """
    return "; ".join(difference(panels[0], later) for later in panels[1:])


def difference(first: Timeline, second: Timeline) -> str:
    """Describe in one line how the second timeline differs from the first.

    >>> difference(Timeline((), 1, 1), Timeline((), 1, 1, source="measured"))
    'measured takes 0 s, as long as simulated; bubble ratio 0.0 % instead of 0.0 %'
    """
    clock = Clock.of((first, second))
    first_name, second_name = first.source, second.source
    if first_name == second_name:
        first_name = clean(first.title) or heading(first)
        second_name = clean(second.title) or heading(second)
    change = second.makespan / first.makespan - 1 if first.makespan else 0.0
    if change:
        direction = "more" if change > 0 else "less"
        first_time = clock.exact(first.makespan)
        change_text = f"{percent(abs(change))} {direction} than {first_name} ({first_time})"
    else:
        change_text = f"as long as {first_name}"
    return (
        f"{second_name} takes {clock.exact(second.makespan)}, {change_text}; "
        f"bubble ratio {percent(second.bubble_ratio)} instead of {percent(first.bubble_ratio)}"
    )
