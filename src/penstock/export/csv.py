"""Export the schedule alone as the CSV of torch.distributed.pipelining."""

from __future__ import annotations

from penstock.export.catalogue import Exported, register
from penstock.export.pipelines import pipelines_of
from penstock.plan.plan import Plan
from penstock.schedule.op import Schedule
from penstock.schedule.torch_csv.files import to_csv


def export_schedule(schedule: Schedule) -> Exported:
    """Export a schedule as CSV in the format "compute_only".

    Raises:
        ScheduleError: torch's CSV cannot express it.
    """
    placement = ", ".join(
        f"rank {rank}: {' '.join(map(str, stages))}"
        for rank, stages in enumerate(schedule.stages_of_rank)
    )
    return Exported(
        to_csv(schedule),
        f"_PipelineScheduleRuntime(stages, n_microbatches={schedule.micro_batches}, …)"
        f"._load_csv(path); stages of {placement}",
    )


@register(
    "csv",
    of_schedule=export_schedule,
    source="torch 2.13, distributed/pipelining/schedules.py, _PipelineScheduleRuntime._load_csv",
)
def csv(plan: Plan) -> Exported:
    """Export the schedule as a row of ops per rank.

    Of several identical pipelines one is exported; each has a process group of its own.

    Raises:
        ScheduleError: torch's CSV cannot express the schedule: single stages with replicas, an
            asynchronous schedule, slices, activations moved between ranks, or what else
            `schedule.torch_csv.actions` lists.
    """
    pipelines = pipelines_of(plan)
    return export_schedule(plan.schedule if pipelines is None else pipelines.schedule)
