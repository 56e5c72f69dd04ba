"""Export to PipeDream: stages, their ranks, and the warm-up forwards of each stage."""

from __future__ import annotations

import json
from itertools import takewhile

from penstock.export.catalogue import Exported, register
from penstock.export.pipelines import device_notes, refuse, selective_layers
from penstock.plan.plan import Plan
from penstock.schedule.op import Kind


@register(
    "pipedream",
    source="github.com/msr-fiddle/pipedream, runtime/runtime.py; docs/literature/pipedream.md",
)
def pipedream(plan: Plan) -> Exported:
    """Export as JSON with three maps.

    - `module_to_stage_map`: every stage is one generated module; the last entry is the criterion,
      with the last stage.
    - `stage_to_rank_map`: the ranks of each stage.
    - `stage_to_depth_map`: forwards that run before the first backward.

    PipeDream updates a stage on k ranks after every k minibatches, k times less often than a stage
    on one rank. The plan updates every stage once per batch. The two are identical only if no stage
    has replicas and the batch is one micro-batch.

    Raises:
        PlanError: the plan is synchronous, has another weight rule than "stash", or has several
            stages on a rank.
    """
    schedule = plan.schedule
    refuse("pipedream", _reasons_against(plan))
    rank_map = {}
    depth_map = {}
    for stage, ranks in enumerate(schedule.ranks_of_stage):
        rank_map[str(stage)] = list(ranks)
        warm_up = list(takewhile(lambda op: op.kind is Kind.F, schedule.programs[ranks[0]]))
        # PipeDream counts the forward right before the first backward to the steady state.
        depth_map[str(stage)] = len(warm_up) - 1
    text = json.dumps(
        {
            "module_to_stage_map": [*range(plan.stages), plan.stages - 1],
            "stage_to_rank_map": rank_map,
            "stage_to_depth_map": depth_map,
        }
    )
    replicas = [len(ranks) for ranks in schedule.ranks_of_stage]
    notes = []
    if max(replicas) > 1 or plan.micro_batches > 1:
        notes.append(
            "when weights are updated: PipeDream updates a stage on k ranks after every k "
            f"minibatches (replicas {replicas}), the plan every stage after {plan.micro_batches} "
            "micro-batches"
        )
    notes += device_notes(plan)
    if plan.recompute.whole:
        notes.append(f"recomputation ({plan.recompute}): --recompute")
    layers = ", ".join(f"Stage{stage} of {length}" for stage, length in enumerate(plan.lengths))
    return Exported(
        text + "\n",
        f"main_with_runtime.py --config_path FILE, with modules {layers} layers",
        tuple(notes),
    )


def _reasons_against(plan: Plan) -> list[str]:
    """Return the reasons why PipeDream cannot run a plan."""
    reasons = []
    if plan.schedule.stream is None:
        reasons.append(
            f"{plan.schedule_name} flushes after every batch, but PipeDream's runtime never does"
        )
    elif plan.weights != "stash":
        reasons.append(
            f"weights {plan.weights!r}: PipeDream's runtime can only stash weights or use the "
            "latest"
        )
    if any(len(stages) > 1 for stages in plan.schedule.stages_of_rank):
        reasons.append(
            f"{plan.schedule_name} has several stages on a rank, but in PipeDream a rank has one"
        )
    if plan.recomputed:
        reasons.append(
            f"layers {selective_layers(plan)} are recomputed, but PipeDream's --recompute "
            "recomputes every stage whole"
        )
    return reasons
