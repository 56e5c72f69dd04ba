"""torch.distributed.pipelining: where to split the model, which stages each rank has, and the
schedule.
"""

from __future__ import annotations

import json

from penstock.export.catalogue import Exported, register
from penstock.export.pipelines import (
    pipelines_of,
    refuse,
    stage_names,
    uneven_batch,
    why_not_pipelines,
)
from penstock.plan.plan import Plan
from penstock.schedule.csv import to_csv
from penstock.schedule.csv_export import why_not

#: The file of the schedule, where the form is a folder.
SCHEDULE = "schedule.csv"


@register(
    "torch",
    aliases=("pipelining",),
    source="torch 2.13, distributed/pipelining: _IR.pipeline, split_spec; schedules, _load_csv",
)
def torch(plan: Plan) -> Exported:
    """JSON, or a folder of `stages.json` and `schedule.csv`.

        split_spec          layer at which a stage begins: "BEGINNING"; for pipeline(model,
                            split_spec=…) its text becomes a SplitPoint
        modules_of_stage    names of the modules of every stage, for whoever builds PipelineStage by
                            hand
        stages_of_rank      what `_PipelineScheduleRuntime` is given on every rank, ascending
        micro_batches       its n_microbatches
        pipelines           copies of the whole; each is a process group of its own, and gradients
                            are averaged over them
        schedule            the CSV of one pipeline, "compute_only"; in a folder, the name of its
                            file
        recompute, batch, devices, fingerprint      of the plan
        recomputed          of selective recomputation: by stage, the names of the modules of every
                            segment that runs again

    Raises:
        PlanError: the plan has stages with copies of their own, micro-batches of several sizes, or
        a schedule that the CSV cannot say;
            or it is asynchronous.
    """
    found = pipelines_of(plan)
    reasons = [] if found is not None else [why_not_pipelines(plan)]
    if found is not None and (reason := why_not(found.schedule)) is not None:
        reasons.append(reason)
    if (uneven := uneven_batch(plan)) is not None:
        reasons.append(uneven)
    refuse("torch.distributed.pipelining", reasons)
    assert found is not None
    schedule = to_csv(found.schedule)
    facts: dict[str, object] = {
        "split_spec": {plan.layer_names[start]: "BEGINNING" for start, _ in plan.bounds[1:]},
        "modules_of_stage": stage_names(plan),
        "stages_of_rank": [list(stages) for stages in found.placement],
        "micro_batches": found.schedule.micro_batches,
        "pipelines": [list(ranks) for ranks in found.ranks],
        "batch": plan.batch,
        "recompute": plan.recompute,
        **({"recomputed": _segments(plan)} if plan.recomputed else {}),
        "devices": list(plan.devices),
        "fingerprint": plan.fingerprint,
    }
    notes = []
    if plan.recomputed:
        notes.append(
            "recomputation (selective): wrap each list of modules under recomputed in torch.utils.checkpoint yourself"
        )
    elif plan.recompute in ("except_last", "always"):
        notes.append(
            f"recomputation ({plan.recompute}): wrap the layers in torch.utils.checkpoint yourself"
        )
    if found.schedule.splits_backward:
        notes.append(
            "frozen layers: I and W of a stage whose input needs no gradient leave it without gradients in torch 2.13; replace "
            "them by B there"
        )
    return Exported(
        json.dumps({**facts, "schedule": schedule}, indent=1) + "\n",
        "pipeline(model, mb_args, split_spec) or PipelineStage by hand, then _PipelineScheduleRuntime(stages, n_microbatches="
        f"{found.schedule.micro_batches})._load_csv({SCHEDULE!r})",
        tuple(notes),
        (
            ("stages.json", json.dumps({**facts, "schedule": SCHEDULE}, indent=1) + "\n"),
            (SCHEDULE, schedule),
        ),
    )


def _segments(plan: Plan) -> list[list[list[str]]]:
    return [
        [list(plan.layer_names[a:b]) for a, b in plan.selection.of_stage(first, end)]
        for first, end in plan.bounds
    ]
