"""Which layers run again: against every choice there is."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.search.recompute.min_time_recompute import (
    COARSE,
    FINE,
    Layers,
    min_time_recompute,
)


def every_choice(layers: Layers) -> Iterator[list[tuple[int, int]]]:
    """All lists of segments: at every layer it keeps, begins a segment, or goes on with one."""
    count = len(layers.seconds)
    for word in product("ksg", repeat=count):
        goes_on = [place for place, letter in enumerate(word) if letter == "g"]
        if any(place in layers.firsts or word[place - 1] == "k" for place in goes_on):
            continue
        starts = [place for place in range(count) if word[place] == "s"]
        yield [
            (first, next((p for p in range(first + 1, count) if word[p] != "g"), count))
            for first in starts
        ]


def held(layers: Layers, segments: list[tuple[int, int]]) -> tuple[float, float, float]:
    """Seconds, what is kept, and what comes back at most, added up layer by layer."""
    again = {place for first, end in segments for place in range(first, end)}
    saved = sum(layers.inputs[first] for first, _ in segments)
    for place in set(range(len(layers.seconds))) - again:
        saved += layers.saved[place] + (
            layers.entry[place] if place in layers.firsts or place - 1 in again else 0
        )
    return (
        sum(layers.seconds[place] for place in again),
        saved,
        max((layers.recompute_bytes(*segment) for segment in segments), default=0.0),
    )


@st.composite
def random_layers(draw) -> Layers:
    """Up to six layers of up to three stages; seconds are whole numbers of ticks, so that the least
    is exact.
    """
    count = draw(st.integers(1, 6))
    small = st.integers(0, 9)
    rows = [draw(st.lists(small, min_size=count, max_size=count)) for _ in range(4)]
    seconds, saved, entry, given_ = rows
    if sum(seconds) and FINE.ticks % sum(seconds):
        seconds[0] += next(
            more for more in range(FINE.ticks) if FINE.ticks % (sum(seconds) + more) == 0
        )
    firsts = frozenset({0, *draw(st.sets(st.integers(0, count - 1), max_size=2))})
    table = {(i, j): float(draw(small)) for i in range(count) for j in range(i + 1, count + 1)}
    return Layers(seconds, saved, entry, given_, lambda i, j: table[i, j], firsts)


@settings(max_examples=120, deadline=None)
@given(random_layers(), st.integers(0, 60), st.sampled_from([0.0, 0.5, 1.0, 3.0]))
def test_the_choice_takes_the_least_of_all_that_fit(layers, room, weight):
    """Where nothing fits, no choice comes nearer."""
    chosen_segments, fits = min_time_recompute(layers, lambda bounds: room - weight * bounds)
    seconds, saved, back = held(layers, chosen_segments)
    fitting = [
        s
        for s, k, b in (held(layers, choice) for choice in every_choice(layers))
        if k + weight * b <= room
    ]
    assert fits is bool(fitting)
    assert all(a[1] <= b[0] for a, b in pairwise(chosen_segments)), (
        "segments in order, none over another"
    )
    if fits:
        assert saved + weight * back <= room
        assert seconds == min(fitting)
    else:
        over = min(
            k + weight * b for _, k, b in (held(layers, choice) for choice in every_choice(layers))
        )
        assert saved + weight * back == pytest.approx(over)


def test_layers_alike_are_cut_where_little_comes_back():
    """Twelve blocks that each save 17 times what they are given: one at a time comes back, and as
    few run again as fit.
    """
    layers = Layers(
        [1.0] * 12,
        [17.0] * 12,
        [0.0] * 12,
        [1.0] * 12,
        lambda i, j: 17.0 * (j - i) - 1,
        frozenset({0}),
    )
    for room, again in ((17 * 12, 0), (17 * 6 + 6 + 16, 6), (12 + 16, 12)):
        chosen_segments, fits = min_time_recompute(layers, lambda bounds, room=room: room - bounds)
        assert fits
        assert held(layers, chosen_segments)[0] == again
    assert min_time_recompute(layers, lambda bounds: 12 + 15 - bounds)[1] is False


def test_a_hundred_layers_of_different_seconds_are_within_the_rounding():
    """Half a tick for each layer, of the best of a sum that is known: all layers keep as much as
    they take.
    """
    numbers = np.random.default_rng(0).uniform(1, 10, 100)
    layers = Layers(
        numbers.tolist(),
        numbers.tolist(),
        [0.0] * 100,
        [0.0] * 100,
        lambda i, j: 0.0,
        frozenset({0}),
    )
    chosen_segments, fits = min_time_recompute(layers, lambda bounds: numbers.sum() / 2 - bounds)
    seconds, saved, _ = held(layers, chosen_segments)
    assert fits
    assert saved <= numbers.sum() / 2
    assert seconds <= numbers.sum() / 2 * 1.02


def test_a_few_layers_have_the_resolution_of_all_ticks():
    """Of two layers that differ by 2 % in their seconds the faster one is recomputed, although the
    other one frees more. Many layers have a number of ticks each.
    """
    two = Layers(
        [1.0, 1.02], [100.0, 110.0], [0.0] * 2, [0.0] * 2, lambda i, j: 0.0, frozenset({0, 1})
    )
    assert min_time_recompute(two, lambda bounds: 115.0 - bounds)[0] == [(0, 1)]
    swapped = Layers(
        [1.02, 1.0], [110.0, 100.0], [0.0] * 2, [0.0] * 2, lambda i, j: 0.0, frozenset({0, 1})
    )
    assert min_time_recompute(swapped, lambda bounds: 115.0 - bounds)[0] == [(1, 2)]
    for count in (100, 4):
        seconds = [1.0] * (count - 1) + [0.5]
        many = Layers(
            seconds,
            [10.0] * count,
            [0.0] * count,
            [0.0] * count,
            lambda i, j: 0.0,
            frozenset(range(count)),
        )
        room = 10.0 * (count - 1)
        result, fits = min_time_recompute(many, lambda bounds, room=room: room - bounds, COARSE)
        assert fits
        assert result == [(count - 1, count)]
