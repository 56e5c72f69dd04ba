"""`penstock schedules`: the table of all, and the gallery."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedules
from penstock.search.schedule_figures import compare, schedule_for_ranks
from penstock.search.schedules import schedules as all_schedules

GALLERY = Path(__file__).parents[2] / "docs" / "gallery"


def rows(printed):
    return [line.split() for line in printed.splitlines()[1:] if "%" in line]


def test_the_table_has_every_schedule_or_says_why_not(penstock):
    """A schedule that is silently left out looks as if it did not exist."""
    for numbers in ((3, 8), (4, 5)):
        out = penstock("schedules", "--stages", numbers[0], "--micro-batches", numbers[1]).out
        listed = {row[0] for row in rows(out)} | {
            name
            for line in out.splitlines()
            if ": " in line
            for name in line.partition(":")[0].split(", ")
        }
        assert listed == set(all_schedules())
    assert "chimera: " in out
    assert "even number of them and got 5" in out


def test_known_figures_stand_in_the_table():
    """Formulas of the papers for S = 4, M = 8 and equal work per rank: docs/literature/notation.md, 6
    and 7.
    """
    figures_of = {figures.name: figures for figures in compare(4, 8)[0]}
    one = figures_of["1f1b"]
    assert (one.makespan, one.bubble_ratio, one.in_flight, one.weights) == (
        33,
        pytest.approx(3 / 11),
        4,
        1,
    )
    assert (figures_of["gpipe"].makespan, figures_of["gpipe"].in_flight) == (33, 8)
    assert figures_of["zb-h1"].makespan == 27
    assert figures_of["zb-h2"].span_bubble_ratio == 0
    assert figures_of["interleaved"].makespan == 24 + 9 / 2
    assert (figures_of["interleaved"].stages, figures_of["interleaved"].ranks) == (8, 4)
    assert (
        figures_of["chimera"].weights,
        figures_of["dualpipe"].weights,
        figures_of["dualpipe-v"].weights,
    ) == (
        2,
        2,
        1,
    )
    assert figures_of["zb-h1"].splits_backward
    assert not one.splits_backward


def test_every_row_has_the_same_work_on_every_rank():
    """Else a bubble ratio of one is compared with another model's of the other."""
    for figures in compare(4, 8)[0]:
        # Of a stream all batches are drawn; of virtual workers each has every other of them.
        batches = (
            1
            if schedules()[figures.name].synchronous
            else schedule_for_ranks(figures.name, 4, 8).batches
        )
        assert figures.timeline.busy == pytest.approx([24.0 * batches] * 4), figures.name


def test_an_asynchronous_schedule_is_compared_by_one_batch_once_it_is_full():
    """24 s of work per rank and no bubble; what it costs is weights: 4 + 3 + 2 + 1 quarters of the
    model with one micro-batch.
    """
    figures_of = {figures.name: figures for figures in compare(4, 8)[0]}
    stream = figures_of["pipedream"]
    assert (stream.makespan, stream.bubble_ratio, stream.span_bubble_ratio) == (24, 0, 0)
    assert figures_of["2bw"].weights == 2
    assert (figures_of["hetpipe"].ranks, figures_of["hetpipe"].stages) == (4, 2)
    assert {figures.name: figures for figures in compare(4, 1)[0]}["pipedream"].weights == 10 / 4


@pytest.mark.parametrize(
    ("sort", "place"), [("bubble", 2), ("makespan", 6), ("in-flight", 7), ("weights", 8)]
)
def test_the_table_is_sorted_by_what_is_asked_for(penstock, sort, place):
    """The best stands first. Asynchronous schedules come last: they have no bubble, but gradients
    of older weights.
    """
    table = rows(penstock("schedules", "--sort", sort).out)
    groups = [row[-1] for row in table]
    assert groups == sorted(groups, reverse=True)
    for group in ("yes", "no"):
        values = [float(row[place]) for row in table if row[-1] == group]
        assert values == sorted(values)
        assert len(values) >= 4


def test_names_and_spans_sort_too(penstock):
    """To find a row again."""
    names = [row[0] for row in rows(penstock("schedules", "--sort", "name").out)]
    assert names == sorted(names)
    spans = [float(row[4]) for row in rows(penstock("schedules", "--sort", "span").out)]
    assert spans[:2] == [0, 0]


def test_json_has_the_rows_and_the_refusals(penstock):
    """For machines: numbers as numbers."""
    facts = json.loads(penstock("schedules", "--stages", 2, "--micro-batches", 4, "--json").out)
    assert (facts["ranks"], facts["micro_batches"]) == (2, 4)
    ratios = [figures["bubble_ratio"] for figures in facts["schedules"]]
    assert ratios == sorted(ratios)
    assert {
        "name",
        "stages",
        "span_bubble_ratio",
        "in_flight",
        "weights",
        "splits_backward",
        "source",
    } <= set(facts["schedules"][0])
    assert set(facts["refused"]) == set(all_schedules()) - {
        figures["name"] for figures in facts["schedules"]
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--sort", "size"), "--sort must be one of bubble, span"),
        (("--stages", 0), "at least 1"),
        (("--micro-batches", 0), "at least 1"),
    ],
)
def test_wrong_words_are_said(penstock, words, message):
    """With what is right."""
    result = penstock("schedules", *words)
    assert (result.status, message in result.err) == (2, True)


def test_a_schedule_is_put_on_the_ranks_with_as_many_stages_as_it_takes():
    """Schedules are compared on equal numbers of devices, not of stages."""
    assert [
        schedule_for_ranks(name, 4, 8).stages for name in ("1f1b", "zb-v", "interleaved", "chimera")
    ] == [
        4,
        8,
        8,
        4,
    ]
    with pytest.raises(ScheduleError, match="of 8 stages takes 8 micro-batches or more and got 3"):
        schedule_for_ranks("dualpipe-v", 4, 3)


def test_the_committed_gallery_is_what_the_command_draws(penstock, tmp_path):
    """A gallery that lacks the newest schedule, or shows an order that the code no longer has,
    misleads.
    """
    fresh = tmp_path / "gallery"
    assert (
        penstock("schedules", "--stages", 4, "--micro-batches", 8, "--gallery", fresh).status == 0
    )
    drawn = {path.name: path.read_text(encoding="utf-8") for path in fresh.iterdir()}
    stored = {path.name: path.read_text(encoding="utf-8") for path in GALLERY.iterdir()}
    assert set(drawn) == set(stored)
    assert {f"{name}.svg" for name in schedules()} <= set(drawn)
    stale = [name for name, drawing in drawn.items() if drawing != stored[name]]
    assert stale == [], (
        "run: penstock schedules --stages 4 --micro-batches 8 --gallery docs/gallery"
    )
