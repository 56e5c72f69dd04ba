"""`penstock verify`: is a schedule sound, and does a pipeline under it train as one device does?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import options
from penstock.cli.options import (
    CsvFile,
    Json,
    MicroBatches,
    ModelOption,
    ScheduleName,
    ScheduleOption,
    Stages,
)
from penstock.cli.self_check import Wanted, held_against_one_device
from penstock.errors import ScheduleError


def verify(
    schedule: ScheduleName = None,
    stages: Stages = None,
    micro_batches: MicroBatches = None,
    csv: CsvFile = None,
    option: ScheduleOption = None,
    weights: Annotated[
        str | None, typer.Option(help="Weight rule; else the one that the schedule is made for.")
    ] = None,
    in_flight_limit: Annotated[
        int | None, typer.Option(help="Most micro-batches that a rank may hold.")
    ] = None,
    train: Annotated[
        str | None,
        typer.Option(help="A model of the zoo: run a batch of it on ranks and on one device."),
    ] = None,
    model_option: ModelOption = None,
    plan: Annotated[
        Path | None, typer.Option(help="With --train: a plan to run, instead of a schedule.")
    ] = None,
    batch: Annotated[int, typer.Option(help="With --train: samples in the batch.")] = 16,
    recompute: Annotated[
        str | None, typer.Option(help="With --train: never, except_last or always.")
    ] = None,
    autocast: Annotated[str | None, typer.Option(help="With --train: bfloat16 or float16.")] = None,
    tolerance: Annotated[
        float, typer.Option(help="With --train: largest difference, as a share of what it is of.")
    ] = 1e-3,
    threads: Annotated[
        bool, typer.Option("--threads", help="With --train: ranks as threads, not processes.")
    ] = False,
    json: Json = False,
) -> None:
    """Prove a schedule sound, or say all that is wrong with it (exit status 1).

    With --train, run a batch of a model under it too, and hold gradients, buffers, outputs and loss
    against plain training.

    Example: penstock verify --csv my_schedule.csv

    Example: penstock verify --train gpt --schedule zb-h1 --stages 2 --micro-batches 4
    """
    if train is not None:
        if plan is None:
            made = options.the_schedule(
                schedule or (None if csv else "1f1b"),
                stages or (None if csv else 2),
                micro_batches or (None if csv else 4),
                csv,
                option,
            )
        else:
            made = None
        settings = {
            "model": train,
            "model_options": options.named_values("model-option", model_option),
            "batch": batch,
            "autocast": autocast,
        }
        words = {"recompute": recompute, "weights": weights}
        agrees = held_against_one_device(
            made, plan, settings, words, Wanted(tolerance, threads, json)
        )
        raise typer.Exit(0 if agrees else 1)
    from penstock.schedule.csv import load_csv
    from penstock.verify.lowered import verify_lowered
    from penstock.verify.verify import verify as prove

    if csv is None or schedule or stages or micro_batches or option:
        made, lowered = options.the_schedule(schedule, stages, micro_batches, csv, option), None
    else:
        made, lowered = load_csv(csv)
    try:
        if lowered is None:
            report = prove(made, in_flight_limit, weights)
        else:
            report = verify_lowered(lowered, in_flight_limit, made, weights)
    except ScheduleError as error:
        if json:
            options.print_json(
                {"sound": False, "findings": [asdict(finding) for finding in error.findings]}
            )
        else:
            typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    if json:
        options.print_json({"sound": True, **asdict(report)})
        return
    batches = "" if made.stream is None else f" a batch, {made.batches} batches shown"
    parts = f"{made.micro_batches} micro-batch{'' if made.micro_batches == 1 else 'es'}"
    print(f"{made.name} is sound: {made.stages} stages on {made.ranks} ranks, {parts}{batches}")
    means = (f"{mean:.4g}" for mean in report.staleness_mean)
    print(
        f"staleness per stage       max {options.row(report.staleness_max)}, mean {options.row(means)}, by weights {report.weights}"
    )
    if any(report.staleness_across):
        print(f"lacking of other copies   {options.row(report.staleness_across)} batches at most")
    print(f"weight versions per stage {options.row(report.versions)}")
    print(
        f"peak in flight per stage  {options.row(report.peak_in_flight)}, per rank {options.row(report.peak_on_rank)}"
    )
    print(
        f"channel depth             {report.channel_depth} (messages a blocking channel must buffer)"
    )
