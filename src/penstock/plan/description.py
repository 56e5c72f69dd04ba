"""Describe a plan as text: prediction, partition, memory, traffic, candidates and suggestions."""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.plan.plan import Plan
from penstock.plan.prediction import Candidate
from penstock.schedule.recompute import Recompute
from penstock.text_table import table
from penstock.units import format_bytes, format_count, format_seconds

#: Most ranks whose memory is listed; of more ranks, those with the largest memory.
MOST_ROWS = 32
#: Most links whose traffic is listed.
_MOST_LINKS = 8
#: Indentation of the tables.
_INDENT = "    "


def describe(plan: Plan) -> str:
    """Describe a plan in lines for a terminal."""
    lines = [_summary(plan), _prediction(plan)]
    if plan.sharding.words:
        lines.append(f"  {_sharding(plan)}")
    if not plan.synchronous:
        lines.append(_asynchrony(plan))
    if plan.planner != "auto":
        lines.append(f"  by planner {plan.planner}{_objective(plan)}")
    lines += _recomputed(plan)
    lines += _bound(plan)
    lines += [f"  {plan.search_note}"] if plan.search_note else []
    lines += _pipeline(plan)
    if plan.devices and plan.ranks <= MOST_ROWS:
        lines.append(f"  on devices {', '.join(map(str, plan.devices))}")
    head = ("stage", "rank", "layers", "from", "to", "peak memory of rank")
    lines.append(table(head, _stage_rows(plan), _INDENT))
    lines += _memory(plan)
    lines += _traffic(plan)
    lines += _candidates(plan)
    lines += _suggestions(plan)
    return "\n".join(lines)


def _summary(plan: Plan) -> str:
    """Write schedule, ranks, stages, batch, recompute and weight rule."""
    micro_batches = format_count(plan.micro_batches, "micro-batch", "micro-batches")
    return (
        f"{plan.schedule_name} on {plan.ranks} of {plan.cluster_ranks} ranks of {plan.cluster}: "
        f"{format_count(plan.stages, 'stage')}{_replicas(plan)}, "
        f"batch {plan.batch} in {micro_batches}, "
        f"recompute {plan.recompute}, weights {plan.weights}"
    )


def _sharding(plan: Plan) -> str:
    """Write how devices share stages, and where such a plan runs."""
    devices = plan.ranks * plan.tensor_parallel
    group = f"; each rank is {plan.tensor_parallel} devices" if plan.tensor_parallel > 1 else ""
    return f"{plan.sharding.words}, {devices} devices{group}; runs in torchtitan or Megatron: export it"


def _prediction(plan: Plan) -> str:
    """Write the predicted time, throughput and speed-up."""
    predicted = plan.predicted
    step = "a step" if plan.synchronous else "a batch in the steady state"
    return (
        f"  predicted: {format_seconds(predicted.step_s)} {step}, "
        f"{predicted.samples_per_s:.4g} samples/s, "
        f"{predicted.speed_up:.2f} times one device{_data_parallel_speed_up(plan)}, "
        f"bubble {predicted.bubble_ratio:.0%}"
    )


def _replicas(plan: Plan) -> str:
    """Write the number of replicas per stage, if there are any."""
    counts = [len(ranks) for ranks in plan.schedule.ranks_of_stage]
    if max(counts) == 1:
        return ""
    if len(set(counts)) == 1:
        return f" with {counts[0]} replicas"
    return f" with {', '.join(map(str, counts))} replicas"


def _data_parallel_speed_up(plan: Plan) -> str:
    """Write the speed-up relative to data parallelism, if it is known."""
    predicted = plan.predicted
    if predicted.data_parallel_s is None or not predicted.step_s:
        return ""
    return f" and {predicted.data_parallel_s / predicted.step_s:.2f} times data parallelism"


def _objective(plan: Plan) -> str:
    """Write the objective of the planner's paper, if it differs from the simulated step."""
    return "" if plan.objective is None else f", which minimises its {plan.objective}"


def _bound(plan: Plan) -> list[str]:
    """Write the lower bound and the gap, if they are known."""
    gap = plan.predicted.gap
    if gap is None:
        return []
    bound = format_seconds(plan.predicted.lower_bound_s)
    return [f"  lower bound over the search space: {bound} (gap {max(gap, 0.0):.1%})"]


def _pipeline(plan: Plan) -> list[str]:
    """Write the best pipeline beside a plan that is none, and why the plan is faster."""
    pipeline = plan.pipeline
    if pipeline is None:
        return []
    replicas = ""
    if pipeline.replicas != 1:
        replicas = f" with {replica_text(pipeline)} replicas"
    plural = "es" if pipeline.micro_batches > 1 else ""
    slower = slowdown(pipeline.step_s, plan.predicted.step_s)
    plan_peak = format_bytes(max(plan.predicted.peak_memory))
    return [
        (
            f"  best pipeline: {pipeline.schedule}, {pipeline.stages} stages of "
            f"{', '.join(map(str, pipeline.lengths))} layers{replicas}, {pipeline.micro_batches} "
            f"micro-batch{plural}: {format_seconds(pipeline.step_s)} a step ({slower}), at most "
            f"{format_bytes(pipeline.peak_bytes)} on a rank instead of {plan_peak}"
        ),
        f"    {plan.pipeline_note}",
    ]


def _recomputed(plan: Plan) -> list[str]:
    """Write how many layers are recomputed, the extra work, and the memory that it saves."""
    if plan.recompute is Recompute.NEVER:
        return []
    layers = f"all {plan.layers} layers"
    if plan.recompute is Recompute.SELECTIVE:
        layers = f"{len(plan.recomputed)} of {plan.layers} layers"
    count = sum(len(plan.selection.of_stage(first, end)) for first, end in plan.bounds)
    segments = f" in {format_count(count, 'segment')}" if count else ""
    exception = " except in the last micro-batch" if plan.recompute is Recompute.EXCEPT_LAST else ""
    work, less_memory = plan.predicted.more_work, plan.predicted.less_kept
    return [
        (
            f"  recomputes {layers}{segments}{exception}: {work:.1%} more work, "
            f"{less_memory:.0%} fewer activations saved for the backward"
        )
    ]


def _asynchrony(plan: Plan) -> str:
    """Write the weight rule, its staleness and the weight versions."""
    # Imported late: it loads NumPy, which `import penstock` does not need.
    from penstock.weights.weight_uses import readings

    options = "".join(f", {name} {value:g}" for name, value in plan.weights_options)
    try:
        weight_uses = readings(plan.schedule, plan.rule)
    except ScheduleError:  # a plan that was read from a file may have unsound programs
        return f"  asynchronous: weights {plan.weights}{options}; unsound programs, see penstock verify"
    versions, staleness = max(weight_uses.versions), max(weight_uses.max_staleness)
    versions_text = "1 version" if versions == 1 else f"up to {versions} versions"
    extra = f" and extra state of {plan.rule.extra:g} times the weights" if plan.rule.extra else ""
    return (
        f"  asynchronous: weights {plan.weights}{options}, staleness at most {staleness}, "
        f"{versions_text}{extra}"
    )


def _stage_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Return a table row per stage: its ranks, layers and memory."""
    peaks = plan.predicted.peak_memory
    rows: list[tuple[str, ...]] = []
    for stage, (start, end) in enumerate(plan.bounds):
        ranks = plan.schedule.ranks_of_stage[stage]
        rows.append(
            (
                str(stage),
                _rank_list(ranks),
                str(end - start),
                plan.layer_names[start],
                plan.layer_names[end - 1],
                _byte_list([peaks[rank] for rank in ranks]),
            )
        )
    return rows


def _rank_list(ranks: tuple[int, ...]) -> str:
    """Write ranks: `"0, 1"`; of more than 8, `"0, 8, 16, … 56"`."""
    if len(ranks) <= 8:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:3]))}, … {ranks[-1]}"


def _byte_list(sizes: list[int]) -> str:
    """Write sizes in bytes; of more than 4, their range."""
    if len(sizes) <= 4:
        return ", ".join(map(format_bytes, sizes))
    low, high = format_bytes(min(sizes)), format_bytes(max(sizes))
    return low if low == high else f"{low} to {high}"


def _optimizer(plan: Plan) -> str:
    """Write the optimizer that memory was planned for."""
    states = plan.optimizer_states
    numbers = f"{format_count(states, 'number')} per parameter"
    if plan.optimizer:
        return f"optimizer {plan.optimizer}, {numbers}"
    return f"optimizer not named, {numbers}{', as SGD with momentum' if states == 1 else ''}"


def _memory(plan: Plan) -> list[str]:
    """Write a table of what each rank's memory consists of; ranks that are alike share a row."""
    parts = [dict(rank_parts) for rank_parts in plan.predicted.memory_parts]
    if not parts:
        return []
    peaks = plan.predicted.peak_memory
    by_peak = sorted(range(len(parts)), key=lambda rank: -peaks[rank])
    listed_ranks = sorted(by_peak[:MOST_ROWS])
    holders = [
        holder for holder in parts[0] if any(parts[rank].get(holder) for rank in listed_ranks)
    ]
    ranks_of_sizes: dict[tuple[str, ...], list[int]] = {}
    for rank in listed_ranks:
        sizes = tuple(format_bytes(parts[rank].get(holder, 0)) for holder in holders)
        ranks_of_sizes.setdefault(sizes, []).append(rank)
    rows = []
    for sizes, ranks in ranks_of_sizes.items():
        others = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
        rows.append((f"{ranks[0]}{others}", *sizes))
    head = f"  peak memory of a rank ({_optimizer(plan)}):"
    return [head, table(("rank", *holders), rows, _INDENT)]


def _traffic(plan: Plan) -> list[str]:
    """Write the bytes per step of the busiest links, both directions together."""
    links: dict[tuple[int, int], int] = {}
    for traffic in plan.predicted.traffic:
        low, high = sorted((traffic.from_rank, traffic.to_rank))
        links[low, high] = links.get((low, high), 0) + traffic.bytes
    if not links:
        return []
    busiest = sorted(links.items(), key=lambda item: (-item[1], item[0]))[:_MOST_LINKS]
    entries = [f"{low}↔{high} {format_bytes(count)}" for (low, high), count in busiest]
    others = f" and {len(links) - len(busiest)} more" if len(links) > len(busiest) else ""
    return [f"  traffic of a step, both ways: {', '.join(entries)}{others}"]


def _candidates(plan: Plan) -> list[str]:
    """Write the table of the evaluated configurations."""
    if not plan.candidates:
        return []
    columns: dict[str, list[str]] = {
        "schedule": [],
        "weights": [],
        "replicas": [],
        "stages": [],
        "M": [],
        "recompute": [],
        "step": [],
        "": [],
        "peak memory": [],
        "why": [],
    }
    for index, candidate in enumerate(plan.candidates):
        columns["schedule"].append(candidate.schedule)
        columns["weights"].append(candidate.weights)
        columns["replicas"].append(replica_text(candidate))
        columns["stages"].append(str(candidate.stages))
        columns["M"].append(str(candidate.micro_batches))
        columns["recompute"].append(candidate.recompute)
        columns["step"].append(format_seconds(candidate.step_s))
        columns[""].append(slowdown(candidate.step_s, plan.predicted.step_s) if index else "")
        columns["peak memory"].append(format_bytes(candidate.peak_bytes))
        columns["why"].append(candidate.why)
    # Columns that have the usual value in all rows are left out.
    for name, usual in (("weights", "flush"), ("replicas", "1")):
        if set(columns[name]) <= {usual}:
            del columns[name]
    rows = list(zip(*columns.values(), strict=True))
    return ["  candidates, best first:", table(tuple(columns), rows, _INDENT)]


def replica_text(candidate: Candidate, separator: str = ",") -> str:
    """Write the number of replicas of a candidate, or of each of its stages."""
    if isinstance(candidate.replicas, int):
        return str(candidate.replicas)
    return separator.join(map(str, candidate.replicas))


def _suggestions(plan: Plan) -> list[str]:
    """Write the table of suggested changes."""
    if not plan.remedies:
        return []
    best_s = plan.predicted.step_s
    rows = [
        (remedy.change, format_seconds(remedy.step_s), slowdown(remedy.step_s, best_s))
        for remedy in plan.remedies
    ]
    return ["  suggestions:", table(("change", "step", ""), rows, _INDENT)]


def slowdown(seconds: float, best_s: float) -> str:
    """Write how much longer a step takes than the best: `"+12.3%"`, or `"equal"` within 0.05 %."""
    if not best_s or abs(seconds / best_s - 1) < 0.0005:
        return "equal"
    return f"{seconds / best_s - 1:+.1%}"
