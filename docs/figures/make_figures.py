"""Draw the figures of the documentation into this folder: python docs/figures/make_figures.py.

Every B takes twice as long as its F, and transfers are free, as in the papers' figures.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from penstock.draw.draw import draw, unit_timeline
from penstock.schedule.catalogue import schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule

#: File name, title, schedule, stages, micro-batches.
FIGURES = (
    ("naive.svg", "One micro-batch at a time", "naive", 4, 2),
    ("figure-2a-gpipe.svg", "GPipe: all forwards, then all backwards", "gpipe", 4, 4),
    ("figure-2b-1f1b.svg", "1F1B: one forward, one backward", "1f1b", 4, 8),
    ("zb-h1.svg", "ZB-H1: split backward, 8 ranks and 16 micro-batches", "zb-h1", 8, 16),
    ("chimera.svg", "Chimera: two pipelines, one down the ranks and one up", "chimera", 4, 4),
    (
        "dualpipe.svg",
        "DualPipe: forwards and backwards as pairs of ops",
        "dualpipe",
        4,
        10,
    ),
    (
        "seq1f1b.svg",
        "Seq1F1B: micro-batches cut into two slices along their tokens",
        "seq1f1b",
        4,
        4,
    ),
)


def compared() -> str:
    """Draw 1F1B above ZB-H1, with the memory of their ranks."""
    costs = Costs(forward=1, backward=2, transfer=0.2, activation_bytes=2**30, weight_bytes=2**31)
    timelines = [
        simulate_schedule(schedule(name, stages=4, micro_batches=8), costs)
        for name in ("1f1b", "zb-h1")
    ]
    drawing = draw(timelines, format="svg")
    return str(drawing)


def main(folder: Path) -> None:
    """Write every figure into `folder`."""
    for file, title, name, stages, micro_batches in FIGURES:
        timeline = unit_timeline(schedule(name, stages=stages, micro_batches=micro_batches))
        draw(replace(timeline, title=title), folder / file)
        print(folder / file)
    (folder / "compared.svg").write_text(compared(), encoding="utf-8", newline="\n")
    print(folder / "compared.svg")


if __name__ == "__main__":
    main(Path(__file__).resolve().parent)
