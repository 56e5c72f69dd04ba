"""The SVG drawing: well-formed, complete, and with all its words inside."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.draw.svg import svg
from penstock.event import Event, Timeline
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Kind, Op, Schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule

NAMESPACE = "{http://www.w3.org/2000/svg}"


def timeline(name, stages, micro_batches, **costs):
    return simulate_schedule(
        schedule(name, stages=stages, micro_batches=micro_batches), Costs(**costs)
    )


def parsed(drawing):
    return ET.fromstring(drawing)


def boxes(root):
    return [
        rect
        for group in root.iter(f"{NAMESPACE}g")
        if "box" in group.get("class", "").split()
        for rect in group.findall(f"{NAMESPACE}rect")
    ]


def texts(root, rank):
    """What stands in the boxes of a rank."""
    groups = [
        group for group in root.iter(f"{NAMESPACE}g") if "box" in group.get("class", "").split()
    ]
    return [text.text for text in groups[rank].findall(f"{NAMESPACE}text")]


def words(root):
    """Every text with its left and right edge and baseline, by DejaVu Sans's width of digits, and
    of its points and spaces.
    """
    sizes = dict(
        re.findall(r"\.penstock \.(\w)\{font-size:([\d.]+)px", root.find(f"{NAMESPACE}style").text)
    )
    labels = []
    for group, dy in [(root, 0.0), *((g, shift(g)[1]) for g in root.iter(f"{NAMESPACE}g"))]:
        for text in group.findall(f"{NAMESPACE}text"):
            classes = text.get("class").split()
            wide = float(sizes.get(classes[0], 11)) * sum(
                0.35 if letter in " .,:" else 0.63 for letter in text.text
            )
            x, y = float(text.get("x")), float(text.get("y")) + dy
            left = x - (
                wide if "e" in classes else wide / 2 if {"n", "o", "m", "c"} & set(classes) else 0
            )
            labels.append((text.text, left, left + wide, y))
    return labels


def shift(group):
    match = re.match(r"translate\(([\d.]+) ([\d.]+)\)", group.get("transform", ""))
    return (float(match[1]), float(match[2])) if match else (0.0, 0.0)


def assert_words_inside(root):
    _, _, width, height = map(float, root.get("viewBox").split())
    for text, left, right, y in words(root):
        assert 0 <= left < right <= width, text
        assert 8 <= y <= height - 2, text


@given(
    st.sampled_from(["gpipe", "1f1b", "naive"]),
    st.integers(1, 6),
    st.integers(1, 12),
    st.sampled_from([0.0, 0.3]),
)
@settings(deadline=None, max_examples=40)
def test_every_schedule_has_one_box_per_op_and_all_words_inside(
    name, stages, micro_batches, transfer
):
    """A figure with a missing op or a cut word misleads, because readers trust it."""
    panel = timeline(name, stages, micro_batches, transfer=transfer)
    root = parsed(svg([panel]))
    assert len(boxes(root)) == len(panel.compute)
    assert_words_inside(root)
    # A mark for an op of no time may stand out by half its width of 2.
    left, right = lane_ends(root)
    assert all(
        left - 1 <= float(box.get("x"))
        and float(box.get("x")) + float(box.get("width")) <= right + 1.01
        for box in boxes(root)
    )


def lane_ends(root):
    lanes = [rect for rect in root.findall(f"{NAMESPACE}rect") if rect.get("class") == "lane"]
    left = float(lanes[0].get("x"))
    return left, left + float(lanes[0].get("width"))


def test_boxes_have_their_times_as_position_and_tooltip():
    """Readers take times from position and length; the tooltip has the numbers."""
    root = parsed(svg([timeline("1f1b", 3, 4, forward=0.0032, backward=0.0064)]))
    titles = {box.find(f"{NAMESPACE}title").text: box for box in boxes(root)}
    second = titles["2F0: 3.2 ms at 6.4 ms"]
    left, right = lane_ends(root)
    assert float(second.get("x")) == pytest.approx(left + (right - left) * 2 / 18, abs=0.01)
    assert float(second.get("width")) == pytest.approx((right - left) / 18, abs=0.01)
    assert second.get("class") == "F"


def test_numbers_are_dropped_where_the_box_is_too_narrow():
    """A number across three boxes names none of them."""
    wide, narrow = (parsed(svg([timeline("gpipe", 2, m)])) for m in (4, 2000))
    assert Counter(text for text, *_ in words(wide))["3"] == 4
    assert not [
        text for group in narrow.iter(f"{NAMESPACE}g") for text in group.findall(f"{NAMESPACE}text")
    ]


def test_stage_numbers_appear_only_on_ranks_of_several_stages():
    """On a plain pipeline the rank is the stage, and saying it in every box is noise."""
    both = simulate_schedule(Schedule.parse("rank 0 | 0F0 1F0 1B0 0B0 0U1 1U1"), Costs(update=1.0))
    assert {"s0", "s1", "s0 s1"} <= {text for text, *_ in words(parsed(svg([both])))}
    assert not [
        text for text, *_ in words(parsed(svg([timeline("gpipe", 2, 2)]))) if re.match(r"s\d", text)
    ]


def test_transfers_are_drawn_between_ranks_if_they_take_time():
    """The figure must show whether a bubble is due to a link or to the schedule."""
    root = parsed(svg([timeline("gpipe", 3, 2, transfer=0.5)]))
    arrows = [
        path.find(f"{NAMESPACE}title").text
        for group in root.iter(f"{NAMESPACE}g")
        if group.get("class", "").split()[:1] == ["t"]
        for path in group
    ]
    assert len(arrows) == 8
    assert "0F0 to rank 1: 0.5 at 1" in arrows
    assert "sent" not in svg([timeline("gpipe", 3, 2)])


def test_a_title_is_escaped_in_all_places():
    """A title is text, even if it contains markup; control characters are not valid XML."""
    drawing = svg([replace(timeline("gpipe", 2, 2), title='<script>&"\x00\ud800')], note="<&>")
    root = parsed(drawing)
    assert "<script>" not in drawing
    assert (
        root.get("aria-label")
        == '<script>&"\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}, simulated'
    )
    drawing.encode("utf-8")


def test_long_titles_are_wrapped_and_not_cut():
    """The viewer shows nothing outside the viewBox, so a title in one line would lose its end."""
    title = "the quick brown fox jumps over the lazy dog " * 10 + "x" * 300
    root = parsed(svg([replace(timeline("naive", 1, 1), title=title)]))
    assert_words_inside(root)
    assert sum(text.count("x") for text, *_ in words(root)) >= 300


def test_ten_thousand_boxes_stay_below_three_megabytes():
    """A figure that a browser cannot open shows nothing."""
    panel = timeline("1f1b", 16, 312, transfer=0.01)
    assert len(panel.compute) == 10_000
    assert len(svg([panel])) < 3_000_000


def test_the_drawing_needs_nothing_from_outside():
    """Documentation and tickets show it where no network, script or font file is."""
    drawing = svg([timeline("1f1b", 4, 8, transfer=0.2)])
    assert not re.search(r"<script|href=|@import|url\((?!#)|<image", drawing)
    assert "http" not in drawing.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("ranks", [0, 3])
def test_an_empty_timeline_is_drawn_idle(ranks):
    """Before the first step there is nothing to show, and that is no error."""
    root = parsed(svg([Timeline((), ranks, ranks)]))
    assert not boxes(root)
    assert_words_inside(root)


def test_an_op_without_length_is_a_mark():
    """An update that costs nothing still happened, and its place matters."""
    root = parsed(svg([Timeline.of([Event(0, Op(Kind.U, 0, 1), 0.0, 0.0)], 1, 1)]))
    (mark,) = boxes(root)
    assert mark.get("class") == "U z"
    assert float(mark.get("width")) == 2


def test_every_number_is_written_at_eight_ranks_and_sixteen_micro_batches():
    """The size at which schedules are compared; a figure without numbers shows colours only."""
    for name in ("1f1b", "zb-h1", "bpipe"):
        root = parsed(svg([timeline(name, 8, 16)]))
        for rank in range(8):
            counts = Counter(texts(root, rank))
            assert all(counts[str(m)] >= 2 for m in range(16)), (name, rank)
    assert float(root.get("width")) < 1300


def test_the_ops_of_a_pair_share_their_span_one_above_the_other():
    """Side by side they would be sequential, on top of each other one of them hidden."""
    simulated = simulate_schedule(Schedule.parse("0F0 0F1&0B0 0B1 0U1"), Costs())
    drawing = svg([simulated])
    titles = {box.find(f"{NAMESPACE}title").text: box for box in boxes(parsed(drawing))}
    upper, lower = titles["0F1: 3 at 1"], titles["0B0: 3 at 1"]
    assert (upper.get("x"), upper.get("width")) == (lower.get("x"), lower.get("width"))
    assert (upper.get("y"), float(lower.get("y"))) == (None, float(upper.get("height")))
    assert float(titles["0F0: 1 at 0"].get("height")) == 2 * float(upper.get("height"))
    assert "pair of ops" in drawing


def test_slices_are_written_with_their_micro_batch():
    """`slice 5` alone does not show the micro-batch."""
    simulated = simulate_schedule(schedule("seq1f1b", stages=2, micro_batches=3, slices=2), Costs())
    root = parsed(svg([simulated]))
    assert {"0.0", "0.1", "2.1"} <= set(texts(root, 0))
    assert "1F2.1: 0.5 at 7" in {title.text for title in root.iter(f"{NAMESPACE}title")}


def test_slices_stand_below_their_micro_batch_where_a_box_is_narrow():
    """At eight ranks and sixteen micro-batches of two slices `15.1` does not fit side by side."""
    root = parsed(
        svg([simulate_schedule(schedule("seq1f1b", stages=8, micro_batches=16, slices=2), Costs())])
    )
    assert Counter(texts(root, 0))["15"] == 2
    assert Counter(texts(root, 0))[".1"] == 16


def test_evictions_and_loads_are_marks_in_two_colours():
    """They take no time of a rank, so a box would have no width."""
    root = parsed(svg([timeline("bpipe", 6, 12)]))
    marks = Counter(box.get("class") for box in boxes(root) if box.get("class").endswith(" z"))
    assert marks["E z"] == marks["L z"] > 0
    assert any(text.startswith("E evict") for text, *_ in words(root))


def test_memory_is_below_the_row_of_a_rank_on_one_scale():
    """The rank with the most memory must look so, in every timeline of the figure."""
    one, other = (
        timeline(name, 3, 4, activation_bytes=1024, weight_bytes=1024) for name in ("1f1b", "gpipe")
    )
    root = parsed(svg([one, other]))
    paths = [
        path
        for path in root.iter(f"{NAMESPACE}path")
        if path.get("class") == "held" and path.find(f"{NAMESPACE}title") is not None
    ]
    tall = [
        max(map(float, re.findall(r"V([\d.]+)", path.get("d"))))
        - min(map(float, re.findall(r"V([\d.]+)", path.get("d"))))
        for path in paths
    ]
    assert tall == pytest.approx(
        [tall[-1] * share for share in (4 / 5, 3 / 5, 2 / 5, 1, 1, 1)], abs=0.02
    )
    assert (
        paths[0].find(f"{NAMESPACE}title").text
        == "peak 4.0 KiB at 2: activations 3.0 KiB, weights 1.0 KiB"
    )
    assert "memory" not in svg([timeline("1f1b", 3, 4)])


@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 4000), (128, 100)])
def test_too_many_ops_become_shares_of_time_with_a_note(stages, micro_batches):
    """A browser cannot show a hundred thousand boxes."""
    drawing = svg([timeline("1f1b", stages, micro_batches, transfer=0.1)])
    root = parsed(drawing)
    assert not boxes(root)
    assert len(drawing) < 8_000_000
    assert "too many ops for a box each: heights are shares of time" in drawing
    assert_words_inside(root)


def test_summed_columns_are_as_high_as_their_shares():
    """In the middle of a long 1F1B a rank is never idle: a third is forward."""
    root = parsed(svg([timeline("1f1b", 2, 9000)]))
    backward, forward = [
        path for path in root.findall(f"{NAMESPACE}path") if path.get("class") in ("F", "B", "U")
    ][1:3]
    assert (backward.get("class"), forward.get("class")) == ("B", "F")
    base = float(re.match(r"M[\d.]+ ([\d.]+)V", forward.get("d"))[1])
    heights = [base - float(place) for place in re.findall(r"V([\d.]+)", forward.get("d"))]
    assert sorted(heights)[len(heights) // 2] == pytest.approx(28 / 3, abs=0.6)
