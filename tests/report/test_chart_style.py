"""Colours of charts that remain distinguishable with colour blindness."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from penstock.report.chart_style import COLOURS

#: Machado, Oliveira and Fernandes 2009, table 1, severity 1.0.
SIGHT = {
    "usual": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
               [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
               [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
               [0.004733, 0.691367, 0.303900]],
}  # fmt: skip
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour):
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    ratio = XYZ @ np.clip(rgb, 0, 1) / np.array([0.9505, 1, 1.089])
    x, y, z = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("ground", [0, 1], ids=["light", "dark"])
def test_series_stay_apart_for_every_sight(sight, ground):
    """One man in twelve sees less red or green; markers and dashes help, colours come first."""
    matrix = np.asarray(SIGHT[sight])
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
