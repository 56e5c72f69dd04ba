"""Colours that remain distinguishable with colour blindness."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from tests.colour_vision import SIGHT, XYZ, lab, linear

from penstock.draw.palette import FILLS, number_colours
from penstock.schedule.op import Kind

LEAST = {"usual": 30, "protan": 18, "deutan": 18, "tritan": 12}


@pytest.mark.parametrize("sight", SIGHT)
def test_any_two_kinds_stay_apart_for_every_sight(sight):
    """One man in twelve sees less red or green; the figure's whole message is its colours."""
    for first, second in combinations(Kind, 2):
        distance = min(
            np.linalg.norm(lab(SIGHT[sight] @ linear(a)) - lab(SIGHT[sight] @ linear(b)))
            for a in FILLS[first]
            for b in FILLS[second]
        )
        assert distance >= LEAST[sight], (first, second, distance)


def test_numbers_stand_out_from_every_fill():
    """4.5 is the contrast that WCAG 2.1 asks of small text."""
    for kind in Kind:
        for fill, ink in zip(FILLS[kind], number_colours(kind), strict=True):
            bright, dark = sorted(
                ((XYZ @ linear(colour))[1] for colour in (fill, ink)), reverse=True
            )
            assert (bright + 0.05) / (dark + 0.05) >= 4.5, (kind, fill)
