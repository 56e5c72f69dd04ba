"""A plan in words: what it is, what is expected of it, why it won, and what would help."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.plan.plan import Candidate, Plan
from penstock.units import format_bytes, format_seconds

#: Ranks whose memory and traffic are told one by one; of more only the fullest.
MOST_ROWS = 32


def describe(plan: Plan) -> str:
    """All of it, in lines that fit a terminal."""
    expected = plan.predicted
    parts = f"{plan.micro_batches} micro-batch{'es' if plan.micro_batches > 1 else ''}"
    what = (
        f"{plan.schedule_name} on {plan.ranks} of {plan.cluster_ranks} ranks of {plan.cluster}: {plan.stages} "
        f"stage{'s' * (plan.stages > 1)}{_copies(plan)}, batch {plan.batch} in {parts}, recompute {plan.recompute}, "
        f"weights {plan.weights}"
    )
    step = "a step" if plan.synchronous else "a batch once it is full"
    time = (
        f"  predicted: {format_seconds(expected.step_s)} {step}, {expected.samples_per_s:.4g} samples/s, "
        f"{expected.speed_up:.2f} times one device{_against_data_parallel(plan)}, bubble {expected.bubble_ratio:.0%}"
    )
    lines = [what, time]
    lines += [] if plan.synchronous else [_asynchrony(plan)]
    lines += [] if plan.planner == "auto" else [f"  by planner {plan.planner}{_objective(plan)}"]
    lines += _recomputed(plan)
    lines += _bound(plan)
    lines += (
        [f"  on devices {', '.join(map(str, plan.devices))}"]
        if plan.devices and plan.ranks <= MOST_ROWS
        else []
    )
    lines += table(
        ("stage", "rank", "layers", "from", "to", "peak memory of rank"), _stage_rows(plan)
    )
    lines += _memory(plan)
    lines += _traffic(plan)
    lines += _candidates(plan)
    lines += _remedies(plan)
    return "\n".join(lines)


def _copies(plan: Plan) -> str:
    counts = [len(ranks) for ranks in plan.schedule.ranks_of_stage]
    if max(counts) == 1:
        return ""
    return (
        f" of {counts[0]} copies"
        if len(set(counts)) == 1
        else f" of {', '.join(map(str, counts))} copies"
    )


def _against_data_parallel(plan: Plan) -> str:
    other = plan.predicted.data_parallel_s
    return (
        ""
        if other is None or not plan.predicted.step_s
        else f" and {other / plan.predicted.step_s:.2f} times data parallelism"
    )


def _objective(plan: Plan) -> str:
    return "" if plan.objective is None else f", which makes least its {plan.objective}"


def _bound(plan: Plan) -> list[str]:
    gap = plan.predicted.gap
    if gap is None:
        return []
    bound = format_seconds(plan.predicted.lower_bound_s)
    return [
        f"  lower bound: nothing of what was weighed can take less than {bound}; the gap is {max(gap, 0.0):.1%}"
    ]


def _recomputed(plan: Plan) -> list[str]:
    """What recompute runs again, what that takes, and what it is good for."""
    if plan.recompute == "never":
        return []
    layers = (
        f"all {plan.layers} layers"
        if plan.recompute != "selective"
        else f"{len(plan.recomputed)} of {plan.layers} layers"
    )
    found = [
        segment for first, end in plan.bounds for segment in plan.selection.of_stage(first, end)
    ]
    pieces = f" in {len(found)} segment{'s' * (len(found) > 1)}" if found else ""
    but = " but of the last micro-batch" if plan.recompute == "except_last" else ""
    work, kept = plan.predicted.more_work, plan.predicted.less_kept
    return [
        f"  runs {layers} again{pieces}{but}: {work:.1%} more work, {kept:.0%} less activations kept for a backward"
    ]


def _asynchrony(plan: Plan) -> str:
    """How old gradients get, and what that takes."""
    from penstock.weights.choice import rule_of  # NumPy, which is not loaded to import penstock
    from penstock.weights.uses import readings

    rule = rule_of(plan.schedule, plan.weights)
    given = "".join(f", {name} {value:g}" for name, value in plan.weights_options)
    found = readings(plan.schedule, rule)
    versions, oldest = max(found.versions), max(map(max, found.ages))
    kept = "1 version" if versions == 1 else f"up to {versions} versions"
    more = f" and {rule.extra:g} more of their size" if rule.extra else ""
    return f"  asynchronous: weights {rule.name}{given}, staleness at most {oldest}, {kept}{more}"


def _stage_rows(plan: Plan) -> list[tuple[str, ...]]:
    held, peaks = plan.schedule.ranks_of_stage, plan.predicted.peak_memory
    return [
        (
            str(stage),
            _runs(held[stage]),
            str(end - start),
            plan.layer_names[start],
            plan.layer_names[end - 1],
            _range([peaks[rank] for rank in held[stage]]),
        )
        for stage, (start, end) in enumerate(plan.bounds)
    ]


def _runs(ranks: tuple[int, ...]) -> str:
    """`"0, 1"`, and of many `"0, 8, 16, … 56"`."""
    if len(ranks) <= 8:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:3]))}, … {ranks[-1]}"


def _range(sizes: list[int]) -> str:
    if len(sizes) <= 4:
        return ", ".join(map(format_bytes, sizes))
    low, high = format_bytes(min(sizes)), format_bytes(max(sizes))
    return low if low == high else f"{low} to {high}"


def _optimizer(plan: Plan) -> str:
    """The optimizer that memory was planned for."""
    states = plan.optimizer_states
    numbers = f"{states:g} number{'s' * (states != 1)} for each parameter"
    if plan.optimizer:
        return f"optimizer {plan.optimizer}, {numbers}"
    return f"optimizer not named, {numbers}{', as SGD with momentum' if states == 1 else ''}"


def _memory(plan: Plan) -> list[str]:
    parts = plan.predicted.memory_parts
    if not parts:
        return []
    shown = sorted(range(len(parts)), key=lambda rank: -plan.predicted.peak_memory[rank])[
        :MOST_ROWS
    ]
    holders = [name for name, _ in parts[0] if any(dict(parts[rank]).get(name) for rank in shown)]
    rows = [
        (str(rank), *(format_bytes(dict(parts[rank]).get(name, 0)) for name in holders))
        for rank in sorted(shown)
    ]
    # Ranks alike are one row: of 64 that hold the same nobody reads the second.
    kinds: dict[tuple[str, ...], list[str]] = {}
    for rank, *sizes in rows:
        kinds.setdefault(tuple(sizes), []).append(rank)
    alike = [
        (ranks[0] if len(ranks) == 1 else f"{ranks[0]} and {len(ranks) - 1} more", *sizes)
        for sizes, ranks in kinds.items()
    ]
    head = f"  memory of a rank at its fullest ({_optimizer(plan)}):"
    return [head, *table(("rank", *holders), alike)]


def _traffic(plan: Plan) -> list[str]:
    links: dict[tuple[int, int], int] = {}
    for each in plan.predicted.traffic:
        pair = min(each.from_rank, each.to_rank), max(each.from_rank, each.to_rank)
        links[pair] = links.get(pair, 0) + each.bytes
    if not links:
        return []
    busiest = sorted(links.items(), key=lambda item: (-item[1], item[0]))[:8]
    told = ", ".join(f"{low}↔{high} {format_bytes(count)}" for (low, high), count in busiest)
    more = f" and {len(links) - len(busiest)} more" if len(links) > len(busiest) else ""
    return [f"  traffic of a step, both ways: {told}{more}"]


def _candidates(plan: Plan) -> list[str]:
    if not plan.candidates:
        return []
    head: list[str] = ["schedule", "stages", "M", "recompute", "step", "", "peak memory", "why"]
    rows = [list(row) for row in _candidate_rows(plan)]
    extra = (
        ("weights", [each.weights for each in plan.candidates], {"flush"}),
        ("copies", [_replicas(each) for each in plan.candidates], {"1"}),
    )
    for place, (name, column, plain) in enumerate(extra, start=1):
        if set(column) - plain:  # told where it tells something
            head.insert(min(place, len(head)), name)
            for row, cell in zip(rows, column, strict=True):
                row.insert(min(place, len(row)), cell)
    return ["  weighed, best first:", *table(tuple(head), [tuple(row) for row in rows])]


def _replicas(each: Candidate) -> str:
    return (
        str(each.replicas) if isinstance(each.replicas, int) else ",".join(map(str, each.replicas))
    )


def _candidate_rows(plan: Plan) -> list[tuple[str, ...]]:
    best = plan.predicted.step_s
    return [
        (
            each.schedule,
            str(each.stages),
            str(each.micro_batches),
            each.recompute,
            format_seconds(each.step_s),
            against(each.step_s, best) if i else "",
            format_bytes(each.peak_bytes),
            each.why,
        )
        for i, each in enumerate(plan.candidates)
    ]


def _remedies(plan: Plan) -> list[str]:
    if not plan.remedies:
        return []
    best = plan.predicted.step_s
    rows = [
        (each.change, format_seconds(each.step_s), against(each.step_s, best))
        for each in plan.remedies
    ]
    return ["  what would help:", *table(("change", "step", ""), rows)]


def against(seconds: float, best: float) -> str:
    """How much slower: `"+12.3%"`, or `"equal"` where that would round to nothing."""
    return f"{seconds / best - 1:+.1%}" if best and abs(seconds / best - 1) >= 0.0005 else "equal"


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines of a table, columns aligned, four spaces in."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "    "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
