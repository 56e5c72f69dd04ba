"""Draw the figures of the documentation into this folder: python docs/figures/make_figures.py.

Every B takes twice as long as its F, and transfers are free, as in the papers' figures.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from penstock.draw.draw import draw, unit_timeline
from penstock.schedule.catalogue import schedule

#: File name, title, schedule, stages, micro-batches.
FIGURES = (
    ("naive.svg", "One micro-batch at a time", "naive", 4, 2),
    ("figure-2a-gpipe.svg", "GPipe: all forwards, then all backwards", "gpipe", 4, 4),
    ("figure-2b-1f1b.svg", "1F1B: one forward, one backward", "1f1b", 4, 8),
)


def main(folder: Path) -> None:
    """Write every figure into `folder`."""
    for file, title, name, stages, micro_batches in FIGURES:
        timeline = unit_timeline(schedule(name, stages=stages, micro_batches=micro_batches))
        draw(replace(timeline, title=title), folder / file)
        print(folder / file)


if __name__ == "__main__":
    main(Path(__file__).resolve().parent)
