"""Evaluate a placed schedule: its memory and time, with as little recompute as it needs to fit, and
the error where nothing fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from penstock.errors import PlanError
from penstock.plan.prediction import Candidate
from penstock.schedule.recompute import Recompute
from penstock.search.instantiate import Evaluated, PlacedSchedule, by_memory, by_time, first_of_kind
from penstock.search.recompute.min_time_recompute import COARSE, FINE, Precision
from penstock.search.recompute.selective_recompute import Infeasible, select_recompute
from penstock.search.request import PlanRequest
from penstock.simulate.simulate import peak_memory
from penstock.units import format_bytes

#: Number of candidates that the error shows when nothing fits.
INFEASIBLE_ROWS = 4


def evaluate(placed: PlacedSchedule, cutoff_s: float = math.inf) -> list[Evaluated]:
    """Return the variants that do not fit, and last the simulated variant that fits, if any does.

    Variants differ in recompute. Where that is left to the planner: never, if it fits; else the
    faster of "except_last" and "selective"; else always. Variants that certainly take more than
    `cutoff_s` seconds may be left out.
    """
    requested = placed.request.recompute
    recompute = placed.proposal.recompute if requested == "auto" else requested
    if recompute != "auto":
        return _variants(placed, recompute)
    variants = _variants(placed, Recompute.NEVER)
    if variants[-1].memory_shortfall:
        try:
            variants += _variants(placed, Recompute.SELECTIVE, COARSE, cutoff_s)
        except Infeasible:
            # Any selection that fits is slower than the cutoff.
            return variants
        variants += _variants(placed, Recompute.EXCEPT_LAST)
        # `always` recomputes the last micro-batch as well: less memory than except_last, and more
        # time.
        if all(variant.memory_shortfall for variant in variants):
            variants += _variants(placed, Recompute.ALWAYS)
    infeasible = [variant for variant in variants if variant.memory_shortfall]
    feasible = [variant for variant in variants if not variant.memory_shortfall]
    return infeasible + sorted(feasible, key=by_time)[:1]


def refine_recompute(chosen: Evaluated) -> Evaluated:
    """Return the same candidate with its selective recompute searched at fine precision, if that
    makes it faster.
    """
    if chosen.recompute is not Recompute.SELECTIVE:
        return chosen
    (variant,) = _variants(replace(chosen.placed, selection=None), Recompute.SELECTIVE)
    return variant if not variant.memory_shortfall and variant.step_s < chosen.step_s else chosen


def _variants(
    placed: PlacedSchedule,
    recompute: Recompute,
    precision: Precision = FINE,
    cutoff_s: float = math.inf,
) -> list[Evaluated]:
    """Return the variant with this recompute, simulated if it fits; empty where selective recompute
    is not possible.
    """
    variant: PlacedSchedule | None = placed
    if recompute is Recompute.SELECTIVE:
        variant = select_recompute(placed, precision, cutoff_s)
    if variant is None:
        return []
    memory = peak_memory(variant.schedule, variant.costs, recompute) or ()
    ratio, shortfall = _compare_memory(placed.request, memory)
    evaluated = Evaluated(variant, recompute, memory, ratio, shortfall)
    return [evaluated if shortfall else evaluated.simulated()]


def _compare_memory(request: PlanRequest, memory: Sequence[int]) -> tuple[float, str]:
    """Return peak / capacity of the fullest rank, and if it does not fit what it needs and has."""
    capacity = [request.memory_bytes(rank) for rank in range(len(memory))]
    ratios = [peak / limit for peak, limit in zip(memory, capacity, strict=True)]
    rank = max(range(len(memory)), key=lambda rank: ratios[rank])
    text = f"needs {format_bytes(memory[rank])}, has {format_bytes(capacity[rank])} on rank {rank}"
    return ratios[rank], text if ratios[rank] > 1 else ""


def infeasible_error(
    request: PlanRequest, infeasible: list[Evaluated], rejected: list[str], note: str = ""
) -> PlanError:
    """Return the error for a search in which nothing fits.

    Args:
        request: the request.
        infeasible: candidates that do not fit the memory.
        rejected: why other proposals could not be made; used if there is no candidate at all.
        note: what cut the search short; empty if nothing did.
    """
    notes = [note] if note else []
    if not infeasible:
        reasons = [*rejected[:12], *notes]
        return PlanError("\n  ".join(["no schedule can be made for these numbers", *reasons]))
    nearest = first_of_kind(sorted(infeasible, key=by_memory))
    lines = [
        f"nothing fits the memory of {request.cluster.name} at batch {request.batch}; nearest first"
    ]
    lines += [_configuration_text(entry.candidate) for entry in nearest[:INFEASIBLE_ROWS]]
    free = request.recompute == "auto" and request.stages is None and request.micro_batches is None
    advice = "Use more ranks, or ranks with more memory, or a smaller batch"
    if not free:
        advice += ", or leave recompute, stages and micro_batches to the planner"
    return PlanError("\n  ".join([*lines, *notes, advice]))


def _configuration_text(row: Candidate) -> str:
    """Return a line on a configuration and why it is infeasible."""
    stages = f"{row.stages} stage{'' if row.stages == 1 else 's'}"
    micro_batches = f"{row.micro_batches} micro-batch{'' if row.micro_batches == 1 else 'es'}"
    copies = row.replicas if isinstance(row.replicas, tuple) else (row.replicas,)
    replicas = "" if set(copies) == {1} else f" with {', '.join(map(str, copies))} replicas"
    return (
        f"{row.schedule}, {stages} of {', '.join(map(str, row.lengths))} layers{replicas}, "
        f"{micro_batches}, recompute {row.recompute}: {row.why}"
    )
