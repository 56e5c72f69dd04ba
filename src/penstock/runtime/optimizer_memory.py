"""Check of a plan's memory against the optimizer of the run."""

from __future__ import annotations

from torch.optim import Optimizer

from penstock.errors import PlanError, SettingError
from penstock.model.chain import Chain
from penstock.plan.plan import Plan
from penstock.search.optimizer_kind import optimizer_kind
from penstock.units import format_bytes, format_count


def check_optimizer_memory(plan: Plan, description: Chain, optimizer: Optimizer) -> None:
    """Check that a plan's memory limits hold with an optimizer other than the planned one.

    Optimizers of unknown classes are accepted, and so is every optimizer if the plan has no memory
    limits.

    Args:
        plan: the plan of the run.
        description: the model's chain.
        optimizer: an optimizer of the class that every stage has.

    Raises:
        PlanError: the optimizer keeps so much more state that some ranks would exceed their limits.
    """
    try:
        kind = optimizer_kind(optimizer)
    except SettingError:
        # Its state is not known before it has stepped, so there is nothing to compare.
        return
    more_states = kind.states - plan.optimizer_states
    if more_states <= 0 or not plan.memory_limits:
        return
    lines = _shortfalls(plan, description, more_states)
    if lines:
        planned = plan.optimizer or "SGD with momentum"
        numbers = format_count(plan.optimizer_states, "number")
        detail = "\n  ".join(lines)
        raise PlanError(
            f"the plan is for an optimizer that keeps {numbers} for "
            f"each parameter ({planned}), and {type(optimizer).__name__} keeps {kind.states:g}:"
            f"\n  {detail}\nPlan for this optimizer: "
            f"ps.plan(…, optimizer={kind.name.lower()!r})"
        )


def _shortfalls(plan: Plan, description: Chain, more_states: float) -> list[str]:
    """Describe the ranks that would exceed their memory limits.

    Args:
        plan: the plan of the run.
        description: the model's chain.
        more_states: optimizer state per parameter beyond that of the plan, as a multiple of the
            parameter.
    """
    stage_bytes = []
    for first, end in plan.bounds:
        stage_bytes.append(sum(layer.parameter_bytes for layer in description.weights[first:end]))
    lines = []
    for rank, stages in enumerate(plan.schedule.stages_of_rank):
        parameter_bytes = sum(stage_bytes[stage] for stage in stages)
        needed = plan.predicted.peak_memory[rank] + more_states * parameter_bytes
        limit = plan.memory_limits[rank]
        if needed > limit:
            lines.append(
                f"rank {rank} would hold {format_bytes(round(needed))} and may hold "
                f"{format_bytes(limit)}"
            )
    return lines
