"""The committed figures of the documentation."""

from __future__ import annotations

import runpy
from itertools import pairwise
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[2] / "docs" / "figures" / "make_figures.py"


def study_timeline(file: str) -> Any:
    """The timeline of a figure of the study."""
    return runpy.run_path(str(SCRIPT))["study_figures"]()[file]


def ops_and_times(timeline: Any, rank: int) -> list[Any]:
    """The ops of a rank in order, without transfers."""
    return [event for event in timeline.events if event.rank == rank and event.to_rank is None]


def ops_of(timeline: Any, rank: int) -> list[str]:
    """The text of the ops of a rank in order."""
    return [str(event.op) for event in ops_and_times(timeline, rank)]


def test_figure_1_shows_the_same_work_split_by_data_and_by_layers():
    """Data parallelism: the whole model on every rank. Model parallelism: one rank at a time."""
    data = study_timeline("figure-1a-data-parallelism.svg")
    layers = study_timeline("figure-1b-model-parallelism.svg")
    assert (data.stages, layers.stages) == (1, 3)
    assert [ops_of(data, rank) for rank in range(3)] == [
        [f"0F{rank}", f"0B{rank}", "0U1"] for rank in range(3)
    ]
    assert data.busy == layers.busy
    computing = [
        event for event in layers.events if event.to_rank is None and event.op.kind in "FB"
    ]
    assert all(before.end <= after.start for before, after in pairwise(computing))


def test_figure_2a_is_gpipe_with_3_devices_3_micro_batches_and_reversed_backwards():
    """Forward order would be another schedule than that of the study's libraries."""
    timeline = study_timeline("figure-2a-gpipe.svg")
    assert timeline.ranks == 3
    for rank in range(3):
        forwards = [f"{rank}F{m}" for m in (0, 1, 2)]
        backwards = [f"{rank}B{m}" for m in (2, 1, 0)]
        assert ops_of(timeline, rank) == [*forwards, *backwards, f"{rank}U1"]


def test_figure_2b_has_no_idle_time_after_its_start_up_and_an_update_per_batch():
    """The point of PipeDream: with a flush every batch would leave a gap."""
    timeline = study_timeline("figure-2b-pipedream.svg")
    end = max(event.end for event in timeline.events)
    for rank in range(3):
        events = ops_and_times(timeline, rank)
        first_backward = next(i for i, event in enumerate(events) if event.op.kind == "B")
        steady = events[first_backward:]
        assert all(before.end == after.start for before, after in pairwise(steady))
        assert steady[-1].end == end
        updates = [op for op in ops_of(timeline, rank) if op[1] == "U"]
        assert updates == [f"{rank}U{version}" for version in range(1, len(updates) + 1)]
        assert len(updates) >= 3


def test_the_committed_figures_are_those_that_the_script_draws(tmp_path):
    """A committed figure that the code no longer draws would be an unchecked claim."""
    runpy.run_path(str(SCRIPT))["main"](tmp_path)
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    committed = {
        path.name: path.read_text(encoding="utf-8") for path in SCRIPT.parent.glob("*.svg")
    }
    assert drawn == committed, f"run {SCRIPT}"
