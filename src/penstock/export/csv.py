"""torch.distributed.pipelining's CSV: the schedule alone."""

from __future__ import annotations

from penstock.export.catalogue import Exported, register
from penstock.export.pipelines import pipelines_of
from penstock.plan.plan import Plan
from penstock.schedule.csv import to_csv
from penstock.schedule.op import Schedule


def of_schedule(made: Schedule) -> Exported:
    """The CSV of a schedule, of the form "compute_only".

    Raises:
        ScheduleError: torch cannot express it.
    """
    held = ", ".join(
        f"rank {rank}: {' '.join(map(str, stages))}"
        for rank, stages in enumerate(made.stages_of_rank)
    )
    return Exported(
        to_csv(made),
        f"_PipelineScheduleRuntime(stages, n_microbatches={made.micro_batches}, …)._load_csv(path); stages of "
        f"{held}",
    )


@register(
    "csv",
    of_schedule=of_schedule,
    source="torch 2.13, distributed/pipelining/schedules.py, _PipelineScheduleRuntime._load_csv",
)
def csv(plan: Plan) -> Exported:
    """One row of ops for every rank. Of pipelines side by side, those of one: all have the same,
    and each its own process group.

    Raises:
        ScheduleError: torch cannot express it: stages with copies of their own, an asynchronous
        schedule, slices, activations handed
            over, or others that `schedule.csv_export` lists.
    """
    found = pipelines_of(plan)
    return of_schedule(plan.schedule if found is None else found.schedule)
