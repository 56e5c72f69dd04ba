"""A plan's memory under the optimizer that a run really has."""

from __future__ import annotations

from torch.optim import Optimizer

from penstock.errors import PlanError, SettingError
from penstock.model.chain import Chain
from penstock.plan.plan import Plan
from penstock.search.optimizer_kind import optimizer_kind
from penstock.units import format_bytes


def check_optimizer_memory(plan: Plan, description: Chain, optimizer: Optimizer) -> None:
    """Refuse an optimizer that keeps so much more than the one planned for that a rank's memory no
    longer suffices.

    An optimizer whose numbers are not known passes, and so does every optimizer where the plan does
    not say what ranks may hold.

    Args:
        plan: what is to be run.
        description: the model's chain.
        optimizer: as every stage will have one.

    Raises:
        PlanError: some ranks would hold more than they may.
    """
    try:
        kind = optimizer_kind(optimizer)
    except SettingError:
        return
    more = kind.states - plan.optimizer_states
    if more <= 0 or not plan.memory_limits:
        return
    weights = description.weights
    sizes = [sum(each.parameter_bytes for each in weights[first:end]) for first, end in plan.bounds]
    lines = []
    for rank, stages in enumerate(plan.schedule.stages_of_rank):
        needs = plan.predicted.peak_memory[rank] + more * sum(sizes[stage] for stage in stages)
        if needs > plan.memory_limits[rank]:
            lines.append(
                f"rank {rank} would hold {format_bytes(round(needs))} and may hold {format_bytes(plan.memory_limits[rank])}"
            )
    if lines:
        planned = plan.optimizer or "SGD with momentum"
        detail = "\n  ".join(lines)
        raise PlanError(
            f"the plan is for an optimizer that keeps {plan.optimizer_states:g} number"
            f"{'s' * (plan.optimizer_states != 1)} for each parameter ({planned}), and "
            f"{type(optimizer).__name__} keeps {kind.states:g}:\n  {detail}\nPlan for this optimizer: ps.plan(…, optimizer={kind.name.lower()!r})"
        )
