"""Tables of the page: key figures of both schedules side by side, and figures per rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from penstock.draw.facts import busy_shares, percent, stages_of_rank
from penstock.draw.scale import Clock, format_number
from penstock.event import Timeline
from penstock.explore.evaluate import Panel, Result, overfull_ranks
from penstock.explore.state import State
from penstock.simulate.steady_state import Steady
from penstock.units import format_bytes

Figure = TypeVar("Figure")

#: With more ranks than this, the table per rank has the fullest ranks only.
MAX_RANK_ROWS = 32


@dataclass(frozen=True)
class Row:
    """A row of the table of key figures.

    Attributes:
        title: what the figures are.
        about: their definition.
        cells: one per panel; empty where a schedule has no such figure.
        better: index of the better cell; None if they are equal or cannot be ranked.
    """

    title: str
    about: str
    cells: tuple[str, ...]
    better: int | None = None


@dataclass(frozen=True)
class RankCell:
    """Figures of a rank in one schedule.

    Attributes:
        stages: the stages that it runs.
        busy: share of the makespan in which it works.
        in_flight: micro-batches whose activations it holds at most, of all its stages.
        memory: peak memory, empty if it is unknown.
        memory_share: of the highest bar.
        overfull: how much it exceeds the limit, empty if it does not.
    """

    stages: str
    busy: str
    in_flight: str
    memory: str = ""
    memory_share: float = 0.0
    overfull: str = ""


@dataclass(frozen=True)
class RankRow:
    """A rank in all schedules; None where a schedule does not use it."""

    rank: int
    cells: tuple[RankCell | None, ...]


def timelines_of(panels: Sequence[Panel]) -> list[Timeline]:
    """Return the timelines of the panels that have one."""
    return [panel.result.timeline for panel in panels if panel.result is not None]


def key_figures(state: State, panels: Sequence[Panel]) -> tuple[Row, ...]:
    """Return the rows of the table of key figures."""
    clock = Clock.of(timelines_of(panels)) if timelines_of(panels) else Clock(1.0, "")
    results = [panel.result for panel in panels]
    # Makespans of different numbers of batches cannot be compared.
    makespan_row = _ranked if same_batches(panels) else _unranked
    rows = [
        makespan_row(
            "makespan",
            "seconds from the first op to the end of the last; of an asynchronous schedule, of all "
            "batches shown",
            _of_each(results, lambda result: result.timeline.makespan),
            clock.exact,
        ),
        _ranked(
            "makespan per micro-batch",
            "makespan / micro-batches of all batches shown",
            _of_each(results, _seconds_per_micro_batch),
            clock.exact,
        ),
        _ranked(
            "bubble ratio",
            "idle time of all ranks / (ranks x makespan)",
            _of_each(results, lambda result: result.timeline.bubble_ratio),
            percent,
        ),
        _ranked(
            "micro-batches in flight",
            "on the fullest rank, all its stages together: the forward has run, the backward not",
            _of_each(results, lambda result: max(_in_flight(state, result))),
            lambda value: format_number(value, 2),
        ),
        _ranked(
            "peak memory",
            "of the fullest rank: weights, activations and messages",
            _of_each(results, _peak_memory),
            format_bytes,
        ),
        *_text_rows(state, results),
    ]
    return tuple(row for row in rows if any(row.cells))


def _of_each(
    results: Sequence[Result | None], figure: Callable[[Result], Figure | None]
) -> list[Figure | None]:
    """Return a figure of each result; None where there is no result."""
    return [None if result is None else figure(result) for result in results]


def _text_rows(state: State, results: Sequence[Result | None]) -> list[Row]:
    """Return the rows of key figures that are not ranked."""
    return [
        _row(
            "ranks over the limit",
            "ranks whose peak memory exceeds the limit",
            _of_each(results, lambda result: _overfull_text(state, result)),
        ),
        _row(
            "stages, ranks",
            "stages of the model, and ranks that run them",
            _of_each(results, lambda result: f"{result.whole.stages}, {result.whole.ranks}"),
        ),
        _row(
            "copies of weights",
            "on the fullest rank, in stages: more than its stages if it "
            "stores several versions or both directions",
            _of_each(results, lambda result: format_number(max(result.weight_copies), 2)),
        ),
    ]


def steady_rows(panels: Sequence[Panel], steady_states: Sequence[Steady | None]) -> tuple[Row, ...]:
    """Return the rows of asynchronous schedules, whose batches follow each other without a flush.

    Args:
        panels: the panels.
        steady_states: of each panel, if it has one. A synchronous schedule is represented by its
            one batch.
    """
    if not any(steady_states):
        return ()
    clock = Clock.of(timelines_of(panels))
    seconds: list[float | None] = []
    bubbles: list[float | None] = []
    for panel, steady_state in zip(panels, steady_states, strict=True):
        if steady_state is not None:
            seconds.append(steady_state.seconds_per_batch)
            bubbles.append(steady_state.bubble_ratio)
        elif panel.result is not None and panel.result.whole.stream is None:
            seconds.append(panel.result.timeline.makespan)
            bubbles.append(panel.result.timeline.bubble_ratio)
        else:
            seconds.append(None)
            bubbles.append(None)
    return (
        _ranked("time per batch, steady", "once the pipeline is full", seconds, clock.exact),
        _ranked("bubble ratio, steady", "once the pipeline is full", bubbles, percent),
    )


def _seconds_per_micro_batch(result: Result) -> float:
    """Return the makespan divided by the number of micro-batches."""
    return result.timeline.makespan / (result.simulated.micro_batches * result.simulated.batches)


def _in_flight(state: State, result: Result) -> list[float]:
    """Return micro-batches in flight per rank, in parts of the model of one rank.

    With v stages per rank, a stage is a v-th of the part of the model that a rank holds.
    """
    share = state.ranks / result.whole.stages
    return [peak * share for peak in result.timeline.peak_on_rank]


def _peak_memory(result: Result) -> float | None:
    """Return the peak memory of the fullest rank."""
    peaks = result.timeline.peak_memory
    return None if peaks is None else float(max(peaks))


def _overfull_text(state: State, result: Result) -> str:
    """Return how many ranks exceed the limit; empty without limit or memory."""
    if state.memory_limit is None or result.timeline.peak_memory is None:
        return ""
    ranks = overfull_ranks(state, result.timeline)
    return f"▲ {len(ranks)} of {result.timeline.ranks}" if ranks else "none"


def _row(title: str, about: str, cells: Sequence[str | None]) -> Row:
    """Return a row of texts, which are not ranked."""
    return Row(title, about, tuple(cell or "" for cell in cells))


def _ranked(
    title: str,
    about: str,
    values: Sequence[float | None],
    text_of: Callable[[float], str],
) -> Row:
    """Return a row of numbers, of which less is better."""
    cells = tuple("" if value is None else text_of(value) for value in values)
    indices = {value: index for index, value in enumerate(values) if value is not None}
    # Values that differ by less than what is printed are not ranked.
    better = indices[min(indices)] if len(indices) > 1 and len(set(cells)) > 1 else None
    return Row(title, about, cells, better)


def _unranked(
    title: str,
    about: str,
    values: Sequence[float | None],
    text_of: Callable[[float], str],
) -> Row:
    """Return a row of numbers that cannot be compared."""
    return replace(_ranked(title, about, values, text_of), better=None)


def same_batches(panels: Sequence[Panel]) -> bool:
    """Return whether all timelines are of the same number of batches."""
    counts = {panel.result.simulated.batches for panel in panels if panel.result is not None}
    return len(counts) <= 1


def rank_rows(state: State, panels: Sequence[Panel]) -> tuple[RankRow, ...]:
    """Return the table per rank: all ranks, or the fullest of many."""
    columns = [_rank_cells(state, panel.result, _highest(state, panels)) for panel in panels]
    count = max(map(len, columns), default=0)
    rows = []
    for rank in range(count):
        cells = tuple(column[rank] if rank < len(column) else None for column in columns)
        rows.append(RankRow(rank, cells))
    if count <= MAX_RANK_ROWS:
        return tuple(rows)
    fullest = sorted(rows, key=lambda row: -_fill(row))[:MAX_RANK_ROWS]
    return tuple(sorted(fullest, key=lambda row: row.rank))


def _fill(row: RankRow) -> float:
    """Return the longest memory bar of a rank."""
    return max((cell.memory_share for cell in row.cells if cell is not None), default=0.0)


def _highest(state: State, panels: Sequence[Panel]) -> float:
    """Return the bytes of a memory bar of full length: the highest peak, or the limit."""
    peaks = [max(timeline.peak_memory or (0,)) for timeline in timelines_of(panels)]
    return max([*peaks, state.memory_limit or 0, 1])


def limit_share(state: State, panels: Sequence[Panel]) -> float | None:
    """Return where the limit is on the memory bars, from 0 to 1; None without a limit."""
    if state.memory_limit is None:
        return None
    return state.memory_limit / _highest(state, panels)


def _rank_cells(state: State, result: Result | None, highest: float) -> list[RankCell]:
    """Return the figures of every rank of a schedule."""
    if result is None:
        return []
    timeline = result.timeline
    in_flight = _in_flight(state, result)
    overfull = set(overfull_ranks(state, timeline))
    cells = []
    shares = busy_shares(timeline)
    for rank, stages in enumerate(stages_of_rank(timeline)):
        memory, share, excess = "", 0.0, ""
        if timeline.peak_memory is not None:
            peak = timeline.peak_memory[rank]
            memory, share = format_bytes(peak), peak / highest
            if rank in overfull:
                excess = f"+{format_bytes(peak - (state.memory_limit or 0))}"
        names = ", ".join(map(str, stages))
        count = format_number(in_flight[rank], 2)
        cells.append(RankCell(names, percent(shares[rank]), count, memory, share, excess))
    return cells
