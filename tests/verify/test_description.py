"""The report on a sound schedule as text."""

from __future__ import annotations

from dataclasses import replace

import penstock as ps
from penstock.verify.description import figures


def test_a_report_prints_its_figures_by_stage():
    """As `penstock verify` does, under the name of the schedule."""
    report = ps.verify(ps.schedule("1f1b", stages=3, micro_batches=6))
    assert str(report).splitlines() == [
        "1f1b is sound: 3 stages on 3 ranks",
        "  staleness per stage       max 0 0 0, mean 0 0 0, weight rule flush",
        "  weight versions per stage 1 1 1",
        "  peak in flight per stage  3 2 1, per rank 3 2 1",
        "  channel depth             1 (messages a blocking channel must buffer)",
    ]


def test_its_repr_is_one_line_without_tuples_per_stage():
    """A thousand stages would fill the terminal."""
    report = ps.verify(ps.schedule("pipedream", stages=3))
    assert repr(report) == (
        "<Report: pipedream is sound, 3 stages on 3 ranks, at most 3 micro-batches in flight on a "
        "rank, weight rule stash>"
    )


def test_a_notebook_shows_what_print_shows():
    """Values with text have it in a fixed-width font."""
    report = ps.verify(ps.schedule("gpipe", stages=2, micro_batches=2))
    assert report._repr_html_() == f"<pre>{report}</pre>"


def test_missing_updates_of_other_copies_are_a_line():
    """Schedules with waves alone have them."""
    waves, plain = (ps.verify(ps.schedule(name, 2, 2)) for name in ("hetpipe", "pipedream"))
    assert sum("staleness to replicas" in line for line in figures(waves)) == 1
    alone = replace(waves, staleness_across=(0, 0))
    for report in (plain, alone):
        assert not any("staleness to replicas" in line for line in figures(report))


def test_each_figure_stands_in_its_own_place():
    """All unlike: stages and ranks, the most and the mean, stages' and ranks' peaks."""
    report = replace(
        ps.verify(ps.schedule("1f1b", stages=3, micro_batches=6)),
        schedule="mine",
        weights="stash",
        staleness_max=(5, 4, 3),
        staleness_mean=(2.25, 1.00001, 0.5),
        staleness_across=(0, 7, 0),
        versions=(6, 8, 9),
        peak_in_flight=(11, 12, 13),
        peak_on_rank=(21, 22),
        channel_depth=31,
    )
    assert str(report).splitlines() == [
        "mine is sound: 3 stages on 2 ranks",
        "  staleness per stage       max 5 4 3, mean 2.25 1 0.5, weight rule stash",
        "  staleness to replicas     at most 0 7 0 batches",
        "  weight versions per stage 6 8 9",
        "  peak in flight per stage  11 12 13, per rank 21 22",
        "  channel depth             31 (messages a blocking channel must buffer)",
    ]
    assert repr(report) == (
        "<Report: mine is sound, 3 stages on 2 ranks, at most 22 micro-batches in flight on a "
        "rank, weight rule stash>"
    )
