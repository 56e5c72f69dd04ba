"""The examples to start from."""

from __future__ import annotations

import pytest

from penstock.explore.evaluate import evaluate, overfull_ranks
from penstock.explore.presets import PRESETS
from penstock.explore.state import parse_state


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.title)
def test_an_example_shows_two_schedules(preset):
    """None of them is refused."""
    panels = evaluate(parse_state(preset.query))
    assert len(panels) == 2
    assert [panel.error for panel in panels] == ["", ""]


def test_examples_show_what_they_say():
    """The words beside them are claims."""
    results = {}
    for preset in PRESETS:
        state = parse_state(preset.query)
        results[preset.title] = [state, *(panel.result for panel in evaluate(state))]
    state, first, second = results["1F1B's memory"]
    assert overfull_ranks(state, first.timeline) == ()
    assert len(overfull_ranks(state, second.timeline)) == 8
    _, first, second = results["Slow links"]
    assert first.timeline.makespan < second.timeline.makespan
    assert max(first.timeline.peak_memory) > max(second.timeline.peak_memory)
    _, first, second = results["Zero bubble"]
    assert first.timeline.bubble_ratio < second.timeline.bubble_ratio
    _, first, second = results["Interleaved"]
    assert first.timeline.bubble_ratio < second.timeline.bubble_ratio
    _, first, second = results["GPipe's bubble"]
    assert first.timeline.bubble_ratio == pytest.approx(3 / 11)
