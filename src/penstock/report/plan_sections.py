"""Sections of a report that explain a plan: its reasons, its memory and suggestions."""

from __future__ import annotations

from penstock.plan.description import replica_text, slowdown
from penstock.plan.plan import Plan
from penstock.report.cells import relative_change
from penstock.report.document import Chart, Column, Facts, Section, Series, Table, Text, Value
from penstock.report.scaled import scaled_bytes, scaled_seconds
from penstock.schedule.recompute import Recompute
from penstock.units import format_count, format_seconds

#: With more ranks, memory is not drawn: the bars would fill several screens.
_MAX_BAR_RANKS = 16


def plan_summary(plan: Plan) -> tuple[str, ...]:
    """Return what a plan is and why it was chosen, one sentence each."""
    predicted = plan.predicted
    step = "a step" if plan.synchronous else "a batch in the steady state"
    comparison = f"{predicted.speed_up:.2f} times the speed of one device"
    if predicted.data_parallel_s is not None and predicted.step_s:
        ratio = predicted.data_parallel_s / predicted.step_s
        comparison += f" and {ratio:.2f} times that of data parallelism"
    configuration = _configuration(plan.schedule_name, plan.stages, plan.micro_batches)
    ranks = f"{plan.ranks} of the {plan.cluster_ranks} ranks of {plan.cluster}"
    prediction = f"It predicts {format_seconds(predicted.step_s)} for {step}, {comparison}"
    idle = f"{predicted.bubble_ratio:.0%} of the ranks' time is idle"
    return f"The plan is {configuration} on {ranks}.", f"{prediction}; {idle}."


def _configuration(schedule: str, stages: int, micro_batches: int) -> str:
    """Return a schedule with its numbers of stages and micro-batches."""
    micro_batch_text = _count_micro_batches(micro_batches)
    return f"{schedule} with {format_count(stages, 'stage')} and {micro_batch_text}"


def _count_micro_batches(count: int) -> str:
    """Return a number of micro-batches as text."""
    return format_count(count, "micro-batch", "micro-batches")


def plan_sections(plan: Plan) -> list[Section]:
    """Return the sections that explain a plan."""
    sections = [
        Section("Plan", (_plan_facts(plan), _stage_table(plan))),
        Section("Why this plan", _reasons(plan)),
    ]
    memory = _memory_blocks(plan)
    if memory:
        sections.append(Section("Predicted memory by holder", memory))
    if plan.remedies:
        sections.append(Section("Suggestions", (_suggestion_table(plan),)))
    return sections


def _plan_facts(plan: Plan) -> Facts:
    """Return the key figures of a plan."""
    states = f"{format_count(plan.optimizer_states, 'state')} per parameter"
    samples_per_s = plan.predicted.samples_per_s
    digits = 0 if samples_per_s >= 100 else 2
    items = [
        ("schedule", plan.schedule_name),
        ("stages", str(plan.stages)),
        ("ranks", f"{plan.ranks} of {plan.cluster_ranks} of {plan.cluster}"),
        ("batch", f"{plan.batch} samples in {_count_micro_batches(plan.micro_batches)}"),
        ("throughput", f"{samples_per_s:,.{digits}f} samples/s"),
        ("recompute", _recompute_text(plan)),
        ("weights", plan.weights if plan.synchronous else f"{plan.weights}, asynchronous"),
        ("optimizer", f"{plan.optimizer or 'not named'}, {states}"),
        ("planner", plan.planner),
    ]
    if plan.objective is not None:
        items.append(("objective of the planner", str(plan.objective)))
    return Facts(tuple(items))


def _recompute_text(plan: Plan) -> str:
    """Return the recompute policy, with what it costs and saves."""
    if plan.recompute is Recompute.NEVER:
        return str(plan.recompute)
    work, saved = plan.predicted.more_work, plan.predicted.less_kept
    return f"{plan.recompute}: {work:.1%} more work, {saved:.0%} fewer activations saved"


def _stage_table(plan: Plan) -> Table:
    """Return the layers and ranks of every stage."""
    rows: list[tuple[Value, ...]] = []
    peaks = plan.predicted.peak_memory
    for stage, (start, end) in enumerate(plan.bounds):
        ranks = plan.schedule.ranks_of_stage[stage]
        rows.append(
            (
                stage,
                ", ".join(map(str, ranks)),
                end - start,
                plan.layer_names[start],
                plan.layer_names[end - 1],
                max(peaks[rank] for rank in ranks),
            )
        )
    columns = (
        Column("stage", "number"),
        Column("ranks"),
        Column("layers", "number"),
        Column("first layer"),
        Column("last layer"),
        Column("peak memory", "bytes", about="of the fullest rank of the stage, all its stages"),
    )
    return Table("stages", "Stages", columns, tuple(rows))


def _reasons(plan: Plan) -> tuple[Text | Table | Chart, ...]:
    """Return why the plan was chosen, and its alternatives."""
    blocks: list[Text | Table | Chart] = [Text(_reason(plan))]
    bound = _bound_text(plan)
    if bound:
        blocks.append(Text(bound))
    if plan.candidates:
        blocks.append(_candidate_table(plan))
    if len(plan.candidates) > 1:
        blocks.append(_candidate_chart(plan))
    return tuple(blocks)


def _reason(plan: Plan) -> str:
    """Return why the first candidate is the best."""
    if not plan.candidates:
        return f"The planner {plan.planner} made this plan by its own rule, without alternatives."
    best = plan.candidates[0]
    name = _configuration(best.schedule, best.stages, best.micro_batches)
    text = f"{name} takes {format_seconds(best.step_s)}; what limits it is {best.why}. "
    if len(plan.candidates) == 1:
        return text + "It was the only candidate that the settings and the memory allow."
    second = plan.candidates[1]
    second_name = _configuration(second.schedule, second.stages, second.micro_batches)
    difference = slowdown(second.step_s, best.step_s)
    if difference == "equal":
        return text + f"The next candidate, {second_name}, is as fast."
    if second.step_s < best.step_s:
        # A faster candidate is only in the table if it does not fit into memory.
        return text + (
            f"No other candidate fits into memory: {second_name} would take "
            f"{difference.removeprefix('-')} less, but {second.why}."
        )
    return text + (
        f"The next candidate, {second_name}, takes {difference.removeprefix('+')} longer; what "
        f"limits it is {second.why}."
    )


def _bound_text(plan: Plan) -> str:
    """Return how far the plan is from the best possible one, if that is known."""
    gap = plan.predicted.gap
    if gap is None:
        return ""
    bound = format_seconds(plan.predicted.lower_bound_s)
    if gap < 0.0005:
        return f"The plan is optimal in the search space: no candidate can take less than {bound}."
    return (
        f"No candidate of the search space can take less than {bound}: a better plan could save at "
        f"most {1 - 1 / (1 + gap):.1%} of the step."
    )


def _candidate_table(plan: Plan) -> Table:
    """Return the table of the evaluated configurations, best first."""
    rows: list[tuple[Value, ...]] = []
    for candidate in plan.candidates:
        rows.append(
            (
                candidate.schedule,
                candidate.stages,
                candidate.micro_batches,
                str(candidate.recompute),
                candidate.weights,
                replica_text(candidate, ", "),
                candidate.step_s,
                relative_change(plan.predicted.step_s, candidate.step_s),
                candidate.peak_bytes,
                candidate.why,
            )
        )
    columns = (
        Column("schedule"),
        Column("stages", "number"),
        Column("M", "number", about="micro-batches per batch"),
        Column("recompute"),
        Column("weights", about="weight rule"),
        Column("replicas", about="of the pipeline, or of each stage"),
        Column("step", "seconds", about="simulated"),
        Column("longer by", "percent", 1, about="than the plan"),
        Column("peak memory", "bytes", about="of the fullest rank"),
        Column("limited by"),
    )
    return Table(
        "candidates",
        "Candidates, best first",
        columns,
        tuple(rows),
        caption="One row for each schedule, number of stages and number of replicas: its best.",
        emphasis=(0,),
    )


def _candidate_chart(plan: Plan) -> Chart:
    """Return step time against memory of the candidates, one series per schedule."""
    bytes_unit, bytes_factor = scaled_bytes([c.peak_bytes for c in plan.candidates])
    seconds_unit, seconds_factor = scaled_seconds([c.step_s for c in plan.candidates])
    points: dict[str, tuple[list[float], list[float]]] = {}
    for index, candidate in enumerate(plan.candidates):
        name = f"{candidate.schedule}, the plan" if index == 0 else candidate.schedule
        x, y = points.setdefault(name, ([], []))
        x.append(candidate.peak_bytes / bytes_factor)
        y.append(candidate.step_s / seconds_factor)
    series = [Series(name, tuple(x), tuple(y)) for name, (x, y) in points.items()]
    return Chart(
        "candidates",
        "Step time against memory",
        f"peak memory of the fullest rank, {bytes_unit}",
        f"step, {seconds_unit}",
        tuple(series),
        kind="scatter",
        caption="Below and to the left is better.",
    )


def _memory_blocks(plan: Plan) -> tuple[Table | Chart, ...]:
    """Return what the memory of each rank holds at its peak, if it is known."""
    parts = [dict(rank_parts) for rank_parts in plan.predicted.memory_parts]
    if not parts:
        return ()
    holders = [holder for holder in parts[0] if any(row.get(holder) for row in parts)]
    rows: list[tuple[Value, ...]] = []
    for rank, row in enumerate(parts):
        sizes = [row.get(holder, 0) for holder in holders]
        rows.append((rank, *sizes, plan.predicted.peak_memory[rank]))
    columns = [Column("rank", "number"), *(Column(holder, "bytes") for holder in holders)]
    table = Table(
        "memory-by-holder",
        "Peak memory of each rank",
        (*columns, Column("total", "bytes")),
        tuple(rows),
        caption="Predicted bytes at the moment of the peak.",
    )
    if len(parts) > _MAX_BAR_RANKS:
        return (table,)
    unit, factor = scaled_bytes(list(plan.predicted.peak_memory))
    ranks = tuple(float(rank) for rank in range(len(parts)))
    series = []
    for holder in holders:
        series.append(Series(holder, ranks, tuple(row.get(holder, 0) / factor for row in parts)))
    chart = Chart(
        "memory-by-holder",
        "Memory by holder",
        "",
        f"memory, {unit}",
        tuple(series),
        kind="bar",
        categories=tuple(f"rank {rank}" for rank in range(len(parts))),
    )
    return table, chart


def _suggestion_table(plan: Plan) -> Table:
    """Return the changes that would help, best first."""
    rows: list[tuple[Value, ...]] = []
    for remedy in plan.remedies:
        change = relative_change(plan.predicted.step_s, remedy.step_s)
        rows.append((remedy.change, remedy.step_s, change))
    columns = (
        Column("change"),
        Column("step", "seconds", about="simulated with the change"),
        Column("difference", "percent", 1, about="from the plan's step"),
    )
    return Table("suggestions", "Suggestions, best first", columns, tuple(rows))
