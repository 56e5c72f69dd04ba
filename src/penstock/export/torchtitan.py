"""Export to torchtitan: `module_fqns_per_model_part`, the names of the modules of each stage."""

from __future__ import annotations

import json

from penstock.export.catalogue import Exported, register
from penstock.export.pipelines import (
    Pipelines,
    csv_reasons,
    device_notes,
    not_in_loop,
    require_pipelines,
    selective_layers,
    stage_names,
    uneven_batch_reasons,
)
from penstock.plan.plan import Plan

#: Torch's names of the schedules that it implements, by Penstock's names.
TORCH_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "interleaved-zero-bubble": "InterleavedZeroBubble",
    "breadth-first": "LoopedBFS",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}


@register(
    "torchtitan",
    source="torchtitan 0.3.0, distributed/pipeline_parallel.py; config parallelism.module_fqns_per_model_part",
    shards_stages=True,
)
def torchtitan(plan: Plan) -> Exported:
    """Export as a list of lists of names, valid in JSON, TOML and Python: one list per stage, in
    the order of the model.

    torchtitan puts stage k on rank k mod p, or in V shape for the schedules ZBVZeroBubble and
    DualPipeV. For a schedule that torch does not have, "csv" exports the file that
    `pipeline_parallel_schedule_csv` reads.

    Raises:
        PlanError: stages are on other ranks, single stages have replicas, micro-batches have
            several sizes, the plan is asynchronous or recomputes only some layers, or the schedule
            is neither one of torch's nor can its CSV express it.
    """
    reasons = uneven_batch_reasons(plan)
    if plan.recomputed:
        reasons.append(
            f"layers {selective_layers(plan)} are recomputed, but activation_checkpoint selects "
            "ops, or every n-th block, not given layers"
        )
    pipelines = require_pipelines("torchtitan", plan, reasons, _schedule_reasons)
    text = json.dumps(stage_names(plan))
    torch_name = TORCH_SCHEDULES.get(plan.schedule_name)
    schedule = f'pipeline_parallel_schedule = "{torch_name or "PipelineScheduleMulti"}"'
    if torch_name is None:
        schedule += ', pipeline_parallel_schedule_csv = "…" (the same plan, exported to csv)'
    use = (
        f"module_fqns_per_model_part = {text if plan.layers < 8 else '…'}, "
        f"pipeline_parallel_degree = {len(pipelines.placement)}, "
        f"pipeline_parallel_microbatch_size = {plan.batch // plan.micro_batches}, {schedule}"
    )
    if plan.tensor_parallel > 1:
        use += f", tensor_parallel_degree = {plan.tensor_parallel}"
    if plan.zero:
        reshard = "always" if plan.zero == 3 else "never"
        use += (
            f", data_parallel_shard_degree = {pipelines.count}, data_parallel_replicate_degree = "
            "1, "
            f'fsdp_reshard_after_forward = "{reshard}"'
        )
    return Exported(text, use, tuple(_notes(plan, pipelines)))


def _notes(plan: Plan, pipelines: Pipelines) -> list[str]:
    """Return what torchtitan runs otherwise than the plan says, a sentence each."""
    notes = device_notes(plan)
    if plan.tensor_parallel > 1 and not plan.sequence_parallel:
        notes.append("no sequence parallelism: torchtitan's tensor parallelism includes it")
    if plan.zero == 1:
        notes.append(
            "ZeRO 1: torchtitan's fully_shard also shards gradients and, between steps, parameters"
        )
    if pipelines.count > 1 and not plan.zero:
        notes.append(
            f"{pipelines.count} pipelines: data_parallel_replicate_degree = {pipelines.count}"
        )
    if plan.recompute.whole:
        notes.append(f'recomputation ({plan.recompute}): activation_checkpoint.mode = "full"')
    return notes


def _schedule_reasons(plan: Plan, pipelines: Pipelines) -> list[str]:
    """Return the reasons why torchtitan cannot run the schedule with its placement."""
    reasons = []
    is_v_shaped = TORCH_SCHEDULES.get(plan.schedule_name) in ("ZBVZeroBubble", "DualPipeV")
    if not (pipelines.vee if is_v_shaped else pipelines.loop):
        reasons.append(not_in_loop(plan, pipelines, "torchtitan"))
    return reasons + csv_reasons(plan, pipelines)
