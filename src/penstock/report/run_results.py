"""Sections of a run's report that compare the prediction with the measurement."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.draw.facts import busy_shares, shown_idle
from penstock.event import Timeline
from penstock.idle import LinkTraffic, idle_seconds, link_traffic
from penstock.profile.profile import Profile
from penstock.report.cells import relative_change, without_empty_columns
from penstock.report.difference import Difference, explain_difference
from penstock.report.document import Column, Section, Table, Text, TimelineFigure, Value
from penstock.report.outcome import Outcome
from penstock.report.run_folder import METRICS, OUTCOME, TIMELINE, RunFolder


def prediction_section(run: RunFolder) -> Section:
    """Return predicted and measured time, idle share and memory."""
    outcome = run.outcome
    if outcome is None:
        return Section("Prediction", (Text("The run has not ended: nothing is compared yet."),))
    blocks: list[Table | Text] = [_time_table(outcome)]
    difference = run_difference(run)
    if difference is not None:
        blocks.append(Text(str(difference)))
    blocks.append(_rank_table(run, outcome))
    if not outcome.synchronous:
        blocks.append(_version_table(outcome))
    return Section("Predicted and measured", tuple(blocks))


def _time_table(outcome: Outcome) -> Table:
    """Return the time of a step as predicted, as measured, and of plain training."""
    name = "step, median of the last epoch" if outcome.synchronous else "batch, steady state"
    rows: list[tuple[Value, ...]] = [
        (
            name,
            outcome.predicted_step_s,
            outcome.measured_step_s,
            relative_change(outcome.predicted_step_s, outcome.measured_step_s),
            outcome.predicted_bubble_ratio,
            outcome.measured_bubble_ratio,
        )
    ]
    quartiles = (outcome.predicted_step_quartiles_s, outcome.measured_step_quartiles_s)
    for number, label in enumerate(("lower quartile", "upper quartile")):
        predicted, measured = (None if pair is None else pair[number] for pair in quartiles)
        if predicted is not None or measured is not None:
            rows.append((label, predicted, measured, None, None, None))
    if outcome.one_thread_step_s is not None:
        rows.append(("step of plain training", None, outcome.one_thread_step_s, None, None, None))
    columns = (
        Column("time"),
        Column("predicted", "seconds"),
        Column("measured", "seconds"),
        Column("difference", "percent", 1),
        Column("predicted idle share", "percent", 1, about="bubble ratio: idle time of all ranks"),
        Column("measured idle share", "percent", 1, about="likewise, of the timeline shown below"),
    )
    return Table("time", "Time", columns, tuple(rows), source=(OUTCOME, METRICS))


def run_difference(run: RunFolder) -> Difference | None:
    """Return what explains the difference between predicted and measured step; None if the run has
    not ended, or the difference is small.
    """
    outcome = run.outcome
    if outcome is None:
        return None
    return outcome_difference(outcome, run.profile, (run.predicted, run.measured))


def outcome_difference(
    outcome: Outcome, profile: Profile, timelines: tuple[Timeline | None, Timeline | None]
) -> Difference | None:
    """Return what explains the difference between predicted and measured step; None if it is small.

    Args:
        outcome: of the run.
        profile: that the run was planned from.
        timelines: the predicted and the measured one.
    """
    # A timeline of an asynchronous plan has several batches: its sums are not those of a step.
    return explain_difference(
        outcome.predicted_step_s,
        outcome.measured_step_s,
        timelines if outcome.synchronous else (None, None),
        (profile.conditions, outcome.conditions),
        outcome.timeline_step_s,
    )


def _rank_table(run: RunFolder, outcome: Outcome) -> Table:
    """Return busy share and memory of every rank."""
    ranks = len(outcome.predicted_peak_memory)
    predicted_busy = _busy(run.predicted, ranks)
    measured_busy = _busy(run.measured, ranks)
    process = outcome.measured_peak_rss
    if len(process) != ranks:
        process = ()
    rows: list[tuple[Value, ...]] = []
    for rank, predicted in enumerate(outcome.predicted_peak_memory):
        peaks = outcome.measured_peak_memory
        measured = None if peaks is None or rank >= len(peaks) else peaks[rank]
        rows.append(
            (
                rank,
                predicted_busy[rank],
                measured_busy[rank],
                predicted,
                measured,
                None if measured is None else relative_change(predicted, measured),
                process[rank] if process else None,
            )
        )
    columns = (
        Column("rank", "number"),
        Column("predicted busy", "percent", 1, about="share of the timeline in which it works"),
        Column("measured busy", "percent", 1, about="likewise, in the timeline of the median step"),
        Column("predicted memory", "bytes", about="weights, gradients, optimizer, activations"),
        Column("measured memory", "bytes", about="the same tensors, counted in the run"),
        Column("difference", "percent", 1, about="of the memory"),
        Column("whole process", "bytes", about="peak resident memory, with Python and libraries"),
    )
    return without_empty_columns(Table("ranks", "Ranks", columns, tuple(rows), source=(OUTCOME,)))


def _busy(timeline: Timeline | None, ranks: int) -> list[float | None]:
    """Return the busy share of each rank, None where it is unknown."""
    if timeline is None or timeline.ranks != ranks:
        return [None] * ranks
    return list(busy_shares(timeline))


def _version_table(outcome: Outcome) -> Table:
    """Return the weight versions that each stage stored."""
    measured = outcome.measured_weight_versions
    rows: list[tuple[Value, ...]] = []
    for stage, versions in enumerate(outcome.predicted_weight_versions):
        rows.append((stage, versions, measured[stage] if stage < len(measured) else None))
    columns = (
        Column("stage", "number"),
        Column("predicted versions", "number"),
        Column("measured versions", "number"),
    )
    return Table("weight-versions", "Weight versions", columns, tuple(rows), source=(OUTCOME,))


def timeline_section(run: RunFolder) -> Section | None:
    """Return the predicted timeline above the measured one; None if neither is known."""
    timelines = tuple(panel for panel in (run.predicted, run.measured) if panel is not None)
    if not timelines:
        return None
    caption = "One lane per rank, one box per op, on a common time scale."
    title = "Predicted step"
    if run.measured is not None:
        step = "the median step" if run.plan.synchronous else "the last batches"
        title = f"Predicted step, and {step} as measured"
    if run.predicted is None:
        title = "Measured step"
        caption += " The folder has no cluster.yaml, from which the prediction would be drawn."
    figure = TimelineFigure("timelines", title, timelines, caption)
    blocks: list[TimelineFigure | Text | Table] = [figure]
    if run.measured is not None and run.plan.synchronous:
        blocks.append(
            Text(
                "The measured timeline is that of the recorded step of the last epoch whose length "
                f"is the median; its file is {TIMELINE}."
            )
        )
    if run.measured is not None:
        blocks += _waiting_tables(run.measured)
    return Section("Timeline", tuple(blocks))


def _waiting_tables(measured: Timeline) -> list[Table]:
    """Return what idle ranks waited for, and the messages between ranks and between hosts."""
    intervals = shown_idle(measured)
    if not intervals:
        return []
    rows: list[tuple[Value, ...]] = []
    for rank, seconds in enumerate(idle_seconds(measured, intervals)):
        rows.append((rank, seconds.neighbour, seconds.link, seconds.rest))
    columns = (
        Column("rank", "number"),
        Column("waits for neighbours", "seconds", about="values that are not computed yet"),
        Column("waits for links", "seconds", about="values that are computed and on their way"),
        Column("rest", "seconds", about="gradient sums, overhead, and no more ops"),
    )
    caption = (
        "A rank that waits for links needs a faster network or smaller messages; one that waits "
        "for neighbours needs another cut or schedule."
    )
    tables = [Table("idle", "Idle time", columns, tuple(rows), caption, (TIMELINE,))]
    for ends, by_host in (("rank", False), ("host", True)):
        traffic = link_traffic(measured, intervals, by_host=by_host)
        if traffic:
            title = f"Messages between {ends}s"
            tables.append(_traffic_table(f"messages-by-{ends}", title, traffic))
    return tables


def _traffic_table(name: str, title: str, traffic: Sequence[LinkTraffic]) -> Table:
    """Return the messages of every direction between two ranks or hosts."""
    columns = (
        Column("from"),
        Column("to"),
        Column("messages", "number"),
        Column("bytes", "bytes"),
        Column("on their way", "seconds", about="seconds in which at least one is on its way"),
        Column("target waits for them", "seconds"),
    )
    rows: list[tuple[Value, ...]] = [
        (str(link.source), str(link.target), *link[2:]) for link in traffic
    ]
    return Table(name, title, columns, tuple(rows), source=(TIMELINE,))
