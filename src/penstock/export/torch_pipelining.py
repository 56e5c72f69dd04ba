"""Export to torch.distributed.pipelining: split points, stages of each rank, and the schedule."""

from __future__ import annotations

import json

from penstock.export.catalogue import Exported, register
from penstock.export.pipelines import (
    Pipelines,
    csv_reasons,
    require_pipelines,
    stage_names,
    uneven_batch_reasons,
)
from penstock.plan.plan import Plan
from penstock.schedule.torch_csv.files import to_csv

#: Name of the schedule's file in a folder.
SCHEDULE = "schedule.csv"


@register(
    "torch",
    aliases=("pipelining",),
    source="torch 2.13, distributed/pipelining: _IR.pipeline, split_spec; schedules, _load_csv",
)
def torch(plan: Plan) -> Exported:
    """Export as JSON, or as a folder of `stages.json` and `schedule.csv`.

        split_spec          layer at which a stage begins: "BEGINNING"; for pipeline(model,
                            split_spec=…) its text becomes a SplitPoint
        modules_of_stage    names of the modules of each stage, to build PipelineStage by hand
        stages_of_rank      stages of each rank for `_PipelineScheduleRuntime`, ascending
        micro_batches       its n_microbatches
        pipelines           ranks of each data-parallel pipeline; each pipeline is a process group
                            of its own, and gradients are averaged over them
        schedule            the CSV of one pipeline, "compute_only"; in a folder, its file name
        recompute, batch, devices, fingerprint      of the plan
        recomputed          for selective recomputation: by stage, the names of the modules of each
                            recomputed segment

    Raises:
        PlanError: single stages have replicas, micro-batches have several sizes, the CSV cannot
            express the schedule, or the plan is asynchronous.
    """
    pipelines = require_pipelines(
        "torch.distributed.pipelining", plan, uneven_batch_reasons(plan), csv_reasons
    )
    micro_batches = pipelines.schedule.micro_batches
    facts: dict[str, object] = {
        "split_spec": {plan.layer_names[start]: "BEGINNING" for start, _ in plan.bounds[1:]},
        "modules_of_stage": stage_names(plan),
        "stages_of_rank": [list(stages) for stages in pipelines.placement],
        "micro_batches": micro_batches,
        "pipelines": [list(ranks) for ranks in pipelines.ranks],
        "batch": plan.batch,
        "recompute": plan.recompute,
    }
    if plan.recomputed:
        facts["recomputed"] = _segment_names(plan)
    facts["devices"] = list(plan.devices)
    facts["fingerprint"] = plan.fingerprint
    schedule = to_csv(pipelines.schedule)
    use = (
        "pipeline(model, mb_args, split_spec) or PipelineStage by hand, then "
        f"_PipelineScheduleRuntime(stages, n_microbatches={micro_batches})._load_csv({SCHEDULE!r})"
    )
    files = (
        ("stages.json", json.dumps({**facts, "schedule": SCHEDULE}, indent=1) + "\n"),
        (SCHEDULE, schedule),
    )
    text = json.dumps({**facts, "schedule": schedule}, indent=1) + "\n"
    return Exported(text, use, tuple(_notes(plan, pipelines)), files)


def _notes(plan: Plan, pipelines: Pipelines) -> list[str]:
    """Return notes on what is to be done by hand."""
    notes = []
    if plan.recomputed:
        notes.append(
            "recomputation (selective): wrap each list of modules under recomputed in "
            "torch.utils.checkpoint yourself"
        )
    elif plan.recompute.whole:
        notes.append(
            f"recomputation ({plan.recompute}): wrap the layers in torch.utils.checkpoint yourself"
        )
    if pipelines.schedule.splits_backward:
        notes.append(
            "frozen layers: in torch 2.13, I and W of a stage whose input needs no gradient leave "
            "it without gradients; replace them by B there"
        )
    return notes


def _segment_names(plan: Plan) -> list[list[list[str]]]:
    """Return by stage the names of the modules of each recomputed segment."""
    stages = []
    for first, end in plan.bounds:
        segments = plan.selection.of_stage(first, end)
        stages.append([list(plan.layer_names[start:stop]) for start, stop in segments])
    return stages
