"""`penstock export`: a schedule for another library."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import options
from penstock.cli.options import CsvFile, MicroBatches, ScheduleName, ScheduleOption, Stages
from penstock.errors import RunError


def export(
    schedule: ScheduleName = None,
    stages: Stages = None,
    micro_batches: MicroBatches = None,
    csv: CsvFile = None,
    option: ScheduleOption = None,
    to: Annotated[Path | None, typer.Option(help="File to write, .csv. Without: here.")] = None,
    communication: Annotated[
        bool, typer.Option("--communication", help="With transfers: torch's 'compute_comms' instead of 'compute_only'.")
    ] = False,
) -> None:
    """Write a schedule for torch.distributed.pipelining, or say why torch cannot express it.

    Example: penstock export --schedule zb-v --stages 8 --micro-batches 8 --to schedule.csv
    """
    from penstock.schedule.csv import to_csv
    from penstock.verify.verify import verify

    made = options.the_schedule(schedule, stages, micro_batches, csv, option)
    verify(made)
    text = to_csv(made, communication)
    if to is None:
        print(text, end="")
        return
    try:
        to.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot write {to}: {error.strerror or error}") from error
    form = "compute_comms" if communication else "compute_only"
    typer.echo(f"wrote {to}: load it with _PipelineScheduleRuntime._load_csv({str(to)!r}, format={form!r})", err=True)
    for rank, held in enumerate(made.stages_of_rank):
        typer.echo(f"  rank {rank} holds stage{'s' * (len(held) != 1)} {' '.join(map(str, held))}", err=True)
