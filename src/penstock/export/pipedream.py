"""PipeDream's configuration of its runtime: stages, their ranks, and how deep each runs ahead."""

from __future__ import annotations

import json
from itertools import takewhile

from penstock.export.catalogue import Exported, register
from penstock.export.pipelines import refuse, row, selective_layers
from penstock.plan.plan import Plan
from penstock.schedule.op import Kind


@register("pipedream", source="github.com/msr-fiddle/pipedream, runtime/runtime.py; LITERATURE 3.1")
def pipedream(plan: Plan) -> Exported:
    """JSON with `module_to_stage_map` (every stage is one generated module, and the last entry is
    the criterion, with the last stage), `stage_to_rank_map`, and `stage_to_depth_map`: forwards
    that run ahead of the first backward.

    PipeDream updates each stage after every minibatch of each of its ranks together, so a stage on
    k ranks k times less often than one on a single rank. The plan's batch, after which every stage
    updates once, is what of that they share: exactly PipeDream's only where no stage has copies and
    the batch is one micro-batch.

    Raises:
        PlanError: the plan is synchronous, keeps weights by another rule than "stash", or has
        several stages on a rank.
    """
    made, reasons = plan.schedule, []
    if made.stream is None:
        reasons.append(
            f"{plan.schedule_name} flushes after every batch: PipeDream's runtime never does"
        )
    elif plan.weights != "stash":
        reasons.append(
            f"weights {plan.weights!r}: PipeDream's runtime stashes them, and has no other rule but to take the newest"
        )
    if any(len(stages) > 1 for stages in made.stages_of_rank):
        reasons.append(f"{plan.schedule_name} has several stages on a rank: there each has one")
    if plan.recomputed:
        reasons.append(
            f"layers {selective_layers(plan)} run again: with --recompute there every stage runs again whole"
        )
    refuse("pipedream", reasons)
    depths = [
        len(list(takewhile(lambda op: op.kind is Kind.F, made.programs[ranks[0]]))) - 1
        for ranks in made.ranks_of_stage
    ]
    text = json.dumps(
        {
            "module_to_stage_map": [*range(plan.stages), plan.stages - 1],
            "stage_to_rank_map": {
                str(stage): list(ranks) for stage, ranks in enumerate(made.ranks_of_stage)
            },
            "stage_to_depth_map": {str(stage): depth for stage, depth in enumerate(depths)},
        }
    )
    copies = [len(ranks) for ranks in made.ranks_of_stage]
    notes = []
    if max(copies) > 1 or plan.micro_batches > 1:
        notes.append(
            f"when weights are updated: there a stage on k ranks is after every k minibatches (copies {copies}), here every one "
            f"after {plan.micro_batches} micro-batches"
        )
    if plan.devices and plan.devices != tuple(range(plan.ranks)):
        notes.append(f"the devices: rank r belongs on device {row(plan.devices)} of {plan.cluster}")
    if plan.recompute in ("except_last", "always"):
        notes.append(f"recomputation ({plan.recompute}): --recompute")
    layers = ", ".join(f"Stage{stage} of {length}" for stage, length in enumerate(plan.lengths))
    return Exported(
        text + "\n",
        f"main_with_runtime.py --config_path FILE, with modules {layers} layers",
        tuple(notes),
    )
