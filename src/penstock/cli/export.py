"""`penstock export`: write a plan or a schedule in the format of another library."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.flags import options
from penstock.cli.flags.options import CsvFile, MicroBatches, ScheduleName, ScheduleOption, Stages
from penstock.errors import SettingError
from penstock.store import write_file

if TYPE_CHECKING:
    from penstock.schedule.op import Schedule


def export(
    plan: Annotated[
        Path | None,
        typer.Argument(
            help="A plan from `penstock plan --out`; without it, the schedule that the flags name."
        ),
    ] = None,
    library: Annotated[
        str | None,
        typer.Option(
            "--as",
            help="Target library: torchgpipe, fairscale, deepspeed, megatron, torchtitan, torch, "
            "pipedream, or csv (the schedule alone).",
        ),
    ] = None,
    schedule: ScheduleName = None,
    stages: Stages = None,
    micro_batches: MicroBatches = None,
    csv: CsvFile = None,
    option: ScheduleOption = None,
    to: Annotated[
        Path | None,
        typer.Option(
            help="Output file, or for torch, without a suffix, a folder; default: the terminal."
        ),
    ] = None,
    communication: Annotated[
        bool,
        typer.Option(
            "--communication",
            help="Include transfers: torch's 'compute_comms' format instead of 'compute_only'.",
        ),
    ] = False,
) -> None:
    """Write a plan for another library, or a schedule for torch.distributed.pipelining. If the
    library cannot run it, report all reasons.

    Example: penstock export plan.json --as megatron

    Example: penstock export --schedule zb-v --stages 8 --micro-batches 8 --to schedule.csv
    """
    if plan is not None:
        options.refuse_schedule_as_file(plan, "export")
        flags = (schedule, stages, micro_batches, csv, option)
        if communication or any(flag is not None for flag in flags):
            raise SettingError(
                f"{plan} contains its schedule: "
                "leave out --communication and the flags that name a schedule"
            )
        _export_plan(plan, library, to)
        return
    if library not in (None, "csv"):
        raise SettingError(
            f"--as {library} needs a plan, because its format names layers: "
            f"penstock export plan.json --as {library}"
        )
    _export_schedule(
        options.resolve_schedule(schedule, stages, micro_batches, csv, option), to, communication
    )


def _export_schedule(schedule: Schedule, to: Path | None, communication: bool) -> None:
    """Verify a schedule and print or write it as torch's CSV.

    Raises:
        ScheduleError: the schedule is unsound, or torch's CSV cannot express it.
        FileError: the file cannot be written.
    """
    from penstock.schedule.torch_csv.files import to_csv
    from penstock.verify.verify import verify

    verify(schedule)
    text = to_csv(schedule, communication)
    if to is None:
        print(text, end="")
        return
    write_file(to, text)
    csv_format = "compute_comms" if communication else "compute_only"
    load_call = f"_PipelineScheduleRuntime._load_csv({str(to)!r}, format={csv_format!r})"
    typer.echo(f"wrote {to}: load it with {load_call}", err=True)
    for rank, stages in enumerate(schedule.stages_of_rank):
        plural = "" if len(stages) == 1 else "s"
        typer.echo(f"  rank {rank} holds stage{plural} {' '.join(map(str, stages))}", err=True)


def _export_plan(path: Path, library: str | None, to: Path | None) -> None:
    """Print or write a plan in the library's format; how to use it, and what it leaves out, goes to
    standard error.

    Raises:
        SettingError: no library is named.
        PenstockError: the plan cannot be read or exported; see `Plan.load` and `exported`.
    """
    from penstock.export.catalogue import EXPORTERS, exported
    from penstock.plan.plan import Plan
    from penstock.verify.verify import verify

    if library is None:
        raise SettingError(f"name the library: --as {', --as '.join(EXPORTERS.entries())}")
    plan = Plan.load(path)
    verify(plan.schedule)
    result = exported(plan, library)
    if to is None:
        print(result.text.rstrip("\n"))
    else:
        result.write(to)
        typer.echo(f"wrote {to}", err=True)
    typer.echo(f"use: {result.use}", err=True)
    for note in result.left_out:
        typer.echo(f"left out: {note}", err=True)
