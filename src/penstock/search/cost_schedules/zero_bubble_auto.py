"""Zero-bubble schedules by a heuristic: the number of warm-up forwards and the place of every
weight gradient follow from the costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from numbers import Real
from typing import TypeGuard

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Kind, Op, Schedule
from penstock.search.schedules import register
from penstock.search.stage_seconds import StageSeconds, stages_of
from penstock.search.zero_bubble_rounds import STYLES, Memory, draft
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule

#: Schedules for equal stages that a heuristic for unequal ones is compared with.
_HANDMADE = ("zb-h1", "zb-h2")
#: Relative rounding error of sums of seconds and of activations.
_ROUNDING = 1e-9
_SOURCE = "Qi et al. 2024, Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 3"


@register(
    "zb-1p", synchronous=True, stages_per_rank="1", splits_backward=True, source=f"{_SOURCE}, ZB-1p"
)
def zb_1p(costs: Costs, micro_batches: int, kept_for_weight_grad: float | None = None) -> Schedule:
    """`zb-auto` in the memory of 1F1B: the activations of p micro-batches on each of p stages.

    For f = i = w on all stages and free links it takes the time of `zb-h1`, and for more than p
    micro-batches it is `zb-h1`. In this example stage 2 waits for the slow stage 1, and runs W in
    the meantime:

    >>> from penstock.search.schedules import schedule
    >>> print(schedule("zb-1p", micro_batches=4, costs=Costs(forward=[1, 2, 1], input_grad=[1, 2, 1], weight_grad=1)))
    rank 0 | 0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3 0U1
    rank 1 | 1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1I3 1W1 1W2 1W3 1U1
    rank 2 | 2F0 2I0 2F1 2I1 2W0 2W1 2F2 2I2 2W2 2F3 2I3 2W3 2U1
    """
    return zb_auto(costs, micro_batches, stages_of(costs), kept_for_weight_grad)


@register(
    "zb-2p", synchronous=True, stages_per_rank="1", splits_backward=True, source=f"{_SOURCE}, ZB-2p"
)
def zb_2p(costs: Costs, micro_batches: int, kept_for_weight_grad: float | None = None) -> Schedule:
    """`zb-auto` in twice the memory of 1F1B: for most costs enough that a stage has almost no
    bubble between its first and its last op.

    For f = i = w on all stages, free links, and 2p - 1 micro-batches or more it has none, as in
    `zb-h2`; for fewer it still takes the time of `zb-h1`. In this example stage 0 runs one more
    forward early, and ends sooner:

    >>> from penstock.search.schedules import schedule
    >>> print(schedule("zb-2p", micro_batches=4, costs=Costs(forward=[1, 2, 1], input_grad=[1, 2, 1], weight_grad=1)))
    rank 0 | 0F0 0F1 0F2 0F3 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 0U1
    rank 1 | 1F0 1F1 1I0 1F2 1I1 1F3 1I2 1I3 1W0 1W1 1W2 1W3 1U1
    rank 2 | 2F0 2I0 2F1 2I1 2W0 2W1 2F2 2I2 2W2 2F3 2I3 2W3 2U1
    """
    return zb_auto(costs, micro_batches, 2 * stages_of(costs), kept_for_weight_grad)


@register(
    "zb-auto",
    synchronous=True,
    stages_per_rank="1",
    splits_backward=True,
    source=f"{_SOURCE}, with any memory limit",
)
def zb_auto(
    costs: Costs,
    micro_batches: int,
    memory_limit: float | Sequence[float] | None = None,
    kept_for_weight_grad: float | None = None,
) -> Schedule:
    """The best of eight programs that the heuristic of `penstock.search.zero_bubble_rounds` makes;
    or `zb-h1` or `zb-h2` where these fit into memory and have a shorter span.

    The heuristic alone can be worse: for 6 stages, 13 micro-batches, f = 9 and i = w = 8 its span
    in twice the memory of 1F1B is 334, and that of `zb-h2` is 330. The best program has the
    shortest longest stage span, as in the paper; among equals, the shortest makespan. Links count
    as free: any number of messages may use one at the same time.

    Args:
        costs: `forward` with one entry per stage; the others in any form.
        micro_batches: at least 1.
        memory_limit: number of whole micro-batches whose activations a stage may hold, at least 1;
            one number for all stages, or one per stage; None for no limit.
        kept_for_weight_grad: the fraction of a micro-batch's activations that a stage still holds
            from I to W. In the paper's transformers it is 32h / (34h + 5as) for hidden size h, a
            heads and s tokens. None for what the costs say (`activation_bytes_after_input_grad` /
            `activation_bytes`), or else 1, which is how `verify` counts.

    Raises:
        ScheduleError: a limit is below 1, the number of limits is not that of stages, or the
            fraction is not between 0 and 1.
        SettingError: the costs are for different numbers of stages.
    """
    stages = stages_of(costs)
    memory = Memory(
        _limits(memory_limit, stages),
        _fraction_after_input_grad(kept_for_weight_grad, costs, stages),
    )
    seconds = StageSeconds.of(costs, micro_batches)
    drafts = [draft(seconds, micro_batches, memory, style) for style in STYLES]
    best = min(drafts, key=lambda candidate: (max(candidate.spans_s), candidate.makespan_s))
    programs = tuple(
        (*program, Op(Kind.U, stage, 1)) for stage, program in enumerate(best.programs())
    )
    shortest_s = max(best.spans_s)
    for name in _HANDMADE:
        handmade = schedule(name, stages, micro_batches)
        span_s = _span_s(handmade, costs)
        # By more than rounding: of equal programs the heuristic's stays.
        if span_s < shortest_s * (1 - _ROUNDING) and _fits(handmade, memory):
            shortest_s, programs = span_s, handmade.programs
    return Schedule(programs)


def _span_s(handmade: Schedule, costs: Costs) -> float:
    """Return the longest time of a stage from its first op to its last, updates left out."""
    timeline = simulate_schedule(handmade, replace(costs, update=0.0))
    work_s = sum(timeline.busy)
    return work_s / (timeline.ranks * (1.0 - timeline.span_bubble_ratio)) if work_s else 0.0


def _fits(handmade: Schedule, memory: Memory) -> bool:
    """Return whether no stage holds more activations than its limit."""
    stages = zip(memory.limits, memory.fraction_after_input_grad, handmade.programs, strict=True)
    for limit, fraction, program in stages:
        change = {Kind.F: 1.0, Kind.I: fraction - 1.0, Kind.W: -fraction, Kind.U: 0.0}
        if max(accumulate(change[op.kind] for op in program)) > limit * (1 + _ROUNDING):
            return False
    return True


def _limits(memory_limit: object, stages: int) -> tuple[float, ...]:
    """Return one limit per stage, each checked to be at least 1."""
    if memory_limit is None:
        return (math.inf,) * stages
    if isinstance(memory_limit, Sequence) and not isinstance(memory_limit, str):
        limits = [*memory_limit]
    else:
        limits = [memory_limit] * stages
    if len(limits) != stages:
        raise ScheduleError(
            f"memory_limit has {len(limits)} entries, there are {stages} stages: give one each, or "
            "one number"
        )
    for stage, limit in enumerate(limits):
        if not _is_number(limit) or not limit >= 1:
            raise ScheduleError(
                f"memory_limit of stage {stage} is {limit!r}: a stage holds 1 micro-batch or more "
                "while it works"
            )
    return tuple(map(float, limits))


def _fraction_after_input_grad(
    fraction: float | None, costs: Costs, stages: int
) -> tuple[float, ...]:
    """Return per stage the fraction of a micro-batch's activations that it holds from I to W."""
    if fraction is not None:
        if not _is_number(fraction) or not 0 <= fraction <= 1:
            raise ScheduleError(
                f"kept_for_weight_grad is {fraction!r}: it is the fraction of the activations that "
                "W needs, from 0 to 1"
            )
        return (fraction,) * stages
    full = costs.spread("activation_bytes", stages)
    after_input_grad = costs.spread("activation_bytes_after_input_grad", stages)
    if full is None or after_input_grad is None:
        return (1.0,) * stages
    return tuple(
        min(1.0, after / before) if before else 1.0
        for after, before in zip(after_input_grad, full, strict=True)
    )


def _is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a real number, and not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)
