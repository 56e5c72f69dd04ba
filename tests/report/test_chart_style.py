"""Colours of charts that remain distinguishable with colour blindness."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from tests.colour_vision import SIGHT, XYZ, lab, linear

from penstock.report.chart_style import COLOURS


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("ground", [0, 1], ids=["light", "dark"])
def test_series_stay_apart_for_every_sight(sight, ground):
    """One man in twelve sees less red or green; markers and dashes help, colours come first."""
    matrix = SIGHT[sight]
    for first, second in combinations(COLOURS, 2):
        distance = np.linalg.norm(
            lab(matrix @ linear(first[ground])) - lab(matrix @ linear(second[ground]))
        )
        assert distance >= 25, (first[ground], second[ground], distance)


@pytest.mark.parametrize(("ground", "colour"), [(0, "#ffffff"), (1, "#14181e")])
def test_every_colour_has_contrast_to_the_ground(ground, colour):
    """WCAG 2.2, criterion 1.4.11: parts of graphics need a contrast of 3 to 1."""
    luminance = XYZ[1] @ linear(colour)
    for pair in COLOURS:
        other = XYZ[1] @ linear(pair[ground])
        brighter, darker = max(luminance, other), min(luminance, other)
        assert (brighter + 0.05) / (darker + 0.05) >= 3
