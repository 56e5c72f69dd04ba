"""Draw the figures of the documentation into this folder: python docs/figures/make_figures.py.

Every B takes twice as long as its F, and transfers are free, as in the papers' figures.

"Figure 1a" and so on are the figures of Núñez, Romero-Sandi, Rojas and Meneses 2024, "A Study of
Pipeline Parallelism in Deep Neural Networks". All of them have 3 devices.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from penstock.draw.draw import draw, unit_timeline
from penstock.draw.svg import svg
from penstock.event import Timeline
from penstock.schedule.catalogue import schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule

#: File name, title, schedule, stages, micro-batches.
FIGURES = (
    ("naive.svg", "One micro-batch at a time", "naive", 4, 2),
    ("gpipe.svg", "GPipe: all forwards, then all backwards", "gpipe", 4, 4),
    ("1f1b.svg", "1F1B: one forward, one backward", "1f1b", 4, 8),
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
#: Updates that take time, so that their boxes have room for the weight version.
STUDY_COSTS = Costs(forward=1, backward=2, update=0.5)
#: End of the part of figure 2b that is drawn: the last update of rank 0 that is inside.
STEADY_UNTIL = 20.0


def study_figures() -> dict[str, Timeline]:
    """Return the timelines of the study's figures 1 and 2, by file name.

    In figure 1 a device does the same work either way: the whole model on a third of the batch, or
    a third of the model on the whole batch.
    """
    data_parallel = schedule("gpipe", stages=1, micro_batches=3, replicas=(3,))
    model_parallel = schedule("naive", stages=3, micro_batches=1)
    gpipe = schedule("gpipe", stages=3, micro_batches=3, backward_order="reverse")
    pipedream = schedule("pipedream", stages=3, micro_batches=1, batches=12)
    return {
        "figure-1a-data-parallelism.svg": simulate_schedule(data_parallel, STUDY_COSTS),
        "figure-1b-model-parallelism.svg": simulate_schedule(model_parallel, STUDY_COSTS),
        "figure-2a-gpipe.svg": simulate_schedule(gpipe, STUDY_COSTS),
        "figure-2b-pipedream.svg": beginning(
            simulate_schedule(pipedream, STUDY_COSTS), STEADY_UNTIL
        ),
    }


def beginning(timeline: Timeline, end: float) -> Timeline:
    """Return the part of a timeline before a time; ops that are running then end there."""
    events = []
    for event in timeline.events:
        if event.start < end:
            events.append(event._replace(end=min(event.end, end)))
    return Timeline.of(events, timeline.ranks, timeline.stages, title=timeline.title)


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
    for file, timeline in study_figures().items():
        # Without key figures: the makespan of a part of a stream means nothing.
        text = svg([timeline], summary=False)
        (folder / file).write_text(text, encoding="utf-8", newline="\n")
        print(folder / file)
    (folder / "compared.svg").write_text(compared(), encoding="utf-8", newline="\n")
    print(folder / "compared.svg")


if __name__ == "__main__":
    main(Path(__file__).resolve().parent)
