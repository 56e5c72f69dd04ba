"""torchtitan's `module_fqns_per_model_part`: the names of the modules of every stage."""

from __future__ import annotations

import json

from penstock.export.catalogue import Exported, register
from penstock.export.pipelines import (
    Pipelines,
    pipelines_of,
    refuse,
    selective_layers,
    stage_names,
    uneven_batch,
    why_not_pipelines,
)
from penstock.plan.plan import Plan
from penstock.schedule.csv_export import why_not

#: Schedules that torch has itself, by their names here.
ITS_OWN = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "breadth-first": "LoopedBFS",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}


@register(
    "torchtitan",
    source="torchtitan 0.3.0, distributed/pipeline_parallel.py; config parallelism.module_fqns_per_model_part",
)
def torchtitan(plan: Plan) -> Exported:
    """A list of lists of names, which is JSON, TOML and Python: one list for every stage, in the
    model's order.

    torchtitan places stage k on rank k mod p, or as a V where the schedule is called ZBVZeroBubble
    or DualPipeV. Of a schedule that torch does not have, "csv" makes the file that
    `pipeline_parallel_schedule_csv` reads.

    Raises:
        PlanError: stages stand on other ranks; the plan has stages with copies of their own, or
        micro-batches of several sizes, or is
            asynchronous, or runs some layers again and not others; or its schedule is neither
            torch's own nor can be said in its CSV.
    """
    found = pipelines_of(plan)
    reasons = [] if found is not None else [why_not_pipelines(plan)]
    if found is not None:
        reasons += _why_not(plan, found)
    if (uneven := uneven_batch(plan)) is not None:
        reasons.append(uneven)
    if plan.recomputed:
        reasons.append(
            f"layers {selective_layers(plan)} run again: there activation_checkpoint chooses by op, or every n-th block, and "
            "cannot be told which layers"
        )
    refuse("torchtitan", reasons)
    assert found is not None
    text = json.dumps(stage_names(plan))
    own = ITS_OWN.get(plan.schedule_name)
    schedule = f'pipeline_parallel_schedule = "{own or "PipelineScheduleMulti"}"'
    if own is None:
        schedule += ', pipeline_parallel_schedule_csv = "…" (the same plan, exported to csv)'
    use = (
        f"module_fqns_per_model_part = {text if plan.layers < 8 else '…'}, pipeline_parallel_degree = {len(found.placement)}, "
        f"pipeline_parallel_microbatch_size = {plan.batch // plan.micro_batches}, {schedule}"
    )
    notes = []
    if plan.devices and plan.devices != tuple(range(plan.ranks)):
        notes.append(
            f"the devices: rank r belongs on device {list(plan.devices)} of {plan.cluster}"
        )
    if found.count > 1:
        notes.append(f"{found.count} pipelines: data_parallel_replicate_degree = {found.count}")
    if plan.recompute in ("except_last", "always"):
        notes.append(f'recomputation ({plan.recompute}): activation_checkpoint.mode = "full"')
    return Exported(text, use, tuple(notes))


def _why_not(plan: Plan, found: Pipelines) -> list[str]:
    reasons = []
    placed_as_vee = ITS_OWN.get(plan.schedule_name) in ("ZBVZeroBubble", "DualPipeV")
    if not (found.vee if placed_as_vee else found.loop):
        reasons.append(
            f"{plan.schedule_name} has stages {', '.join(map(str, found.placement))} on its ranks: there stage k is on rank "
            f"k mod {len(found.placement)}"
        )
    if (reason := why_not(found.schedule)) is not None:
        reasons.append(reason)
    return reasons
