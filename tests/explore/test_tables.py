"""Tables of key figures and of ranks."""

from __future__ import annotations

import pytest

from penstock.explore.evaluate import evaluate, steady_state_of
from penstock.explore.state import parse_state
from penstock.explore.tables import (
    MAX_RANK_ROWS,
    key_figures,
    limit_share,
    rank_rows,
    steady_rows,
)


def rows_of(query):
    """The rows of key figures by title."""
    state = parse_state(query)
    return {row.title: row for row in key_figures(state, evaluate(state))}


def test_key_figures_are_those_of_the_timelines():
    """1F1B on 4 ranks with 8 micro-batches: (8 + 3) x 3, bubble 3 / 11."""
    rows = rows_of("a=1f1b&b=zb-h1")
    assert rows["makespan"].cells == ("33", "27")
    assert rows["bubble ratio"].cells == ("27.3 %", "11.1 %")
    assert rows["makespan"].better == rows["bubble ratio"].better == 1
    assert rows["micro-batches in flight"].cells == ("4", "4")
    assert rows["micro-batches in flight"].better is None
    assert "peak memory" not in rows


def test_in_flight_counts_parts_of_a_rank():
    """With two stages per rank, a micro-batch on one stage is half of a rank's activations."""
    rows = rows_of("a=zb-v&b=1f1b")
    assert rows["micro-batches in flight"].cells == ("4", "4")
    assert rows["stages, ranks"].cells == ("8, 4", "4, 4")
    state = parse_state("a=zb-v&b=1f1b")
    ranks = rank_rows(state, evaluate(state))
    assert [row.cells[1].in_flight for row in ranks] == ["4", "3", "2", "1"]
    assert max(float(row.cells[0].in_flight) for row in ranks) == 4


def test_makespans_of_different_numbers_of_batches_are_not_compared():
    """Three batches take longer than one; their time per micro-batch can be compared."""
    rows = rows_of("a=pipedream&b=1f1b")
    assert rows["makespan"].better is None
    assert rows["makespan per micro-batch"].better == 0
    assert rows_of("a=gpipe&b=zb-h1")["makespan"].better == 1


def test_a_schedule_that_does_not_fit_has_empty_cells():
    """The other one keeps its figures, and neither is better."""
    rows = rows_of("ranks=3&a=chimera&b=1f1b&micro_batches=6")
    assert rows["makespan"].cells[0] == ""
    assert rows["makespan"].cells[1]
    assert rows["makespan"].better is None


def test_ranks_over_the_limit_are_marked_by_more_than_a_colour():
    """Activations of 4, 3, 2 and 1 micro-batches, limit 2.5."""
    query = "a=1f1b&b=gpipe&activation_bytes=1MiB&memory_limit=2.5MiB"
    assert rows_of(query)["ranks over the limit"].cells == ("▲ 2 of 4", "▲ 4 of 4")
    state = parse_state(query)
    panels = evaluate(state)
    rows = rank_rows(state, panels)
    assert [row.cells[0].overfull for row in rows] == ["+1.5 MiB", "+512.0 KiB", "", ""]
    assert [row.cells[0].memory for row in rows] == ["4.0 MiB", "3.0 MiB", "2.0 MiB", "1.0 MiB"]
    assert rows[0].cells[1].memory_share == 1.0
    assert limit_share(state, panels) == pytest.approx(2.5 / 8)
    assert limit_share(parse_state("a=1f1b"), panels) is None


def test_of_many_ranks_the_fullest_are_shown():
    """A table of 64 ranks and more is no help."""
    state = parse_state("ranks=40&micro_batches=40&a=1f1b&activation_bytes=1MiB")
    rows = rank_rows(state, evaluate(state))
    assert [row.rank for row in rows] == list(range(MAX_RANK_ROWS))


def test_panels_may_have_different_numbers_of_ranks():
    """HetPipe has several pipelines."""
    state = parse_state("ranks=2&micro_batches=4&a=1f1b&b=hetpipe")
    rows = rank_rows(state, evaluate(state))
    assert len(rows) == 4
    assert rows[3].cells[0] is None
    assert rows[3].cells[1] is not None


def test_the_steady_state_is_compared_with_the_batch_of_a_synchronous_schedule():
    """PipeDream has no bubble once it is full: 8 x 3 per batch."""
    state = parse_state("a=pipedream&b=1f1b")
    panels = evaluate(state)
    states = [steady_state_of(state, panel.result) for panel in panels]
    seconds, bubble = steady_rows(panels, states)
    assert seconds.cells == ("24", "33")
    assert bubble.cells == ("0.0 %", "27.3 %")
    assert bubble.better == 0
    assert steady_rows(panels[1:], states[1:]) == ()
