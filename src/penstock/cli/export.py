"""`penstock export`: a plan or a schedule for another library."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import options
from penstock.cli.options import CsvFile, MicroBatches, ScheduleName, ScheduleOption, Stages
from penstock.errors import RunError, SettingError


def export(
    plan: Annotated[
        Path | None,
        typer.Argument(
            help="A plan from `penstock plan --out`; without it, a schedule by its flags."
        ),
    ] = None,
    library: Annotated[
        str | None,
        typer.Option(
            "--as",
            help="torchgpipe, fairscale, deepspeed, megatron, torchtitan, torch, pipedream, or csv: the schedule alone.",
        ),
    ] = None,
    schedule: ScheduleName = None,
    stages: Stages = None,
    micro_batches: MicroBatches = None,
    csv: CsvFile = None,
    option: ScheduleOption = None,
    to: Annotated[
        Path | None,
        typer.Option(help="File to write; for torch without a suffix a folder. Without: here."),
    ] = None,
    communication: Annotated[
        bool,
        typer.Option(
            "--communication",
            help="With transfers: torch's 'compute_comms' instead of 'compute_only'.",
        ),
    ] = False,
) -> None:
    """Write a plan for another library, or a schedule for torch.distributed.pipelining; or say why
    it cannot run it.

    Example: penstock export plan.json --as megatron

    Example: penstock export --schedule zb-v --stages 8 --micro-batches 8 --to schedule.csv
    """
    if plan is not None:
        if schedule or stages or micro_batches or csv or option or communication:
            raise SettingError(
                f"{plan} has the whole schedule: leave out the flags that make one, and --communication"
            )
        _export_plan(plan, library, to)
        return
    if library not in (None, "csv"):
        raise SettingError(
            f"--as {library} needs a plan, which has layers: penstock export plan.json --as {library}"
        )
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
    typer.echo(
        f"wrote {to}: load it with _PipelineScheduleRuntime._load_csv({str(to)!r}, format={form!r})",
        err=True,
    )
    for rank, held in enumerate(made.stages_of_rank):
        typer.echo(
            f"  rank {rank} holds stage{'s' * (len(held) != 1)} {' '.join(map(str, held))}",
            err=True,
        )


def _export_plan(path: Path, library: str | None, to: Path | None) -> None:
    """Print or write the plan in the library's form; how it is used, and what it leaves out, goes
    to standard error.
    """
    from penstock.export.catalogue import EXPORTERS, exported
    from penstock.plan.plan import Plan
    from penstock.verify.verify import verify

    if library is None:
        raise SettingError(f"say for which library: --as {', --as '.join(EXPORTERS.entries())}")
    made = Plan.load(path)
    verify(made.schedule)
    found = exported(made, library)
    if to is None:
        print(found.text.rstrip("\n"))
    else:
        found.write(to)
        typer.echo(f"wrote {to}", err=True)
    typer.echo(f"use: {found.use}", err=True)
    for note in found.left_out:
        typer.echo(f"left out: {note}", err=True)
