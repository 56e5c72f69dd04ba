"""Colours that remain distinguishable with colour blindness."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from penstock.draw.palette import FILLS, number_colours
from penstock.schedule.op import Kind

#: Machado, Oliveira and Fernandes 2009, table 1, severity 1.0: what is left of linear RGB.
SIGHT = {
    "usual": np.eye(3),
    "protan": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deutan": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritan": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
LEAST = {"usual": 30, "protan": 18, "deutan": 18, "tritan": 12}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour):
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    ratio = XYZ @ np.clip(rgb, 0, 1) / np.array([0.9505, 1, 1.089])
    x, y, z = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


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
