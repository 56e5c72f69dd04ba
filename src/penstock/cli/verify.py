"""`penstock verify`: check that a schedule is sound, and that it trains as one device does."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.flags import options
from penstock.cli.flags.model_flags import ModelFlags, complete_models, with_model_flags
from penstock.cli.flags.options import (
    CsvFile,
    Json,
    MicroBatches,
    ScheduleName,
    ScheduleOption,
    Stages,
)
from penstock.cli.self_check import CheckOptions, compare_with_one_device
from penstock.errors import ScheduleError

if TYPE_CHECKING:
    from penstock.schedule.lower import LoweredSchedule
    from penstock.schedule.op import Schedule


@with_model_flags(omit=["model"])
def verify(
    schedule: ScheduleName = None,
    stages: Stages = None,
    micro_batches: MicroBatches = None,
    csv: CsvFile = None,
    option: ScheduleOption = None,
    weights: Annotated[
        str | None, typer.Option(help="Weight rule; default: the schedule's own rule.")
    ] = None,
    in_flight_limit: Annotated[
        int | None, typer.Option(help="Most micro-batches in flight that a rank may hold.")
    ] = None,
    train: Annotated[
        str | None,
        typer.Option(
            "--train",
            "--model",
            help="Instead, run one batch of this model on ranks and on one device: a model of the zoo, "
            "package.module:factory, or hf:config.json.",
            autocompletion=complete_models,
        ),
    ] = None,
    *,
    flags: ModelFlags,
    plan: Annotated[
        Path | None, typer.Option(help="With --train: a plan to run, instead of a schedule.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="With --train: samples in the batch; default: 16.")
    ] = None,
    recompute: Annotated[
        str | None,
        typer.Option(help="With --train: recompute policy: never, except_last or always."),
    ] = None,
    autocast: Annotated[
        str | None, typer.Option(help="With --train: mixed precision: bfloat16 or float16.")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(help="With --train: largest relative difference that passes; default: 0.001."),
    ] = None,
    threads: Annotated[
        bool,
        typer.Option("--threads", help="With --train: run the ranks as threads, not processes."),
    ] = False,
    json: Json = False,
) -> None:
    """Verify that a schedule is sound, or report all findings (exit status 1).

    With --train, instead run one batch of a model under it, and compare gradients, buffers, outputs
    and loss with plain training.

    Example: penstock verify --csv my_schedule.csv

    Example: penstock verify --train gpt --schedule zb-h1 --stages 2 --micro-batches 4

    Example: penstock verify --model my_model:make_model --data my_data:load --plan plan.json
    """
    model_settings = replace(flags, model=train).settings()
    if train is None:
        options.refuse_flags("belongs to --model, which is missing", **vars(flags))
        options.refuse_flags(
            "belongs to --train, which is missing",
            plan=plan,
            batch=batch,
            recompute=recompute,
            autocast=autocast,
            tolerance=tolerance,
            threads=threads,
        )
        checked, lowered = _schedule_to_check(schedule, stages, micro_batches, csv, option)
        _check(checked, lowered, in_flight_limit, weights, json)
        return
    options.refuse_flags("does not go with --train", in_flight_limit=in_flight_limit)
    trained_schedule = None
    if plan is None:
        trained_schedule = _schedule_to_train(schedule, stages, micro_batches, csv, option)
    else:
        options.refuse_flags(
            "does not go with --plan, which contains its schedule",
            schedule=schedule,
            stages=stages,
            micro_batches=micro_batches,
            csv=csv,
            option=option,
        )
    agrees = compare_with_one_device(
        trained_schedule,
        plan,
        {**model_settings, "batch": 16 if batch is None else batch, "autocast": autocast},
        {"recompute": recompute, "weights": weights},
        CheckOptions(1e-3 if tolerance is None else tolerance, threads, json),
    )
    raise typer.Exit(0 if agrees else 1)


def _schedule_to_check(
    name: str | None,
    stages: int | None,
    micro_batches: int | None,
    csv: Path | None,
    option: list[str] | None,
) -> tuple[Schedule, LoweredSchedule | None]:
    """Make the schedule of the flags; from a file, with its transfers if it has them."""
    from penstock.schedule.torch_csv.files import load_csv

    names_schedule = not all(flag is None for flag in (name, stages, micro_batches))
    if csv is None or names_schedule or option:
        # With --csv and another flag, this refuses the combination.
        return options.resolve_schedule(name, stages, micro_batches, csv, option), None
    return load_csv(csv)


def _schedule_to_train(
    name: str | None,
    stages: int | None,
    micro_batches: int | None,
    csv: Path | None,
    option: list[str] | None,
) -> Schedule:
    """Make the schedule of `--train`: without --csv, 1f1b with 2 stages and 4 micro-batches is the
    default.
    """
    if csv is None:
        name = name or "1f1b"
        stages = 2 if stages is None else stages
        micro_batches = 4 if micro_batches is None else micro_batches
    return options.resolve_schedule(name, stages, micro_batches, csv, option)


def _check(
    schedule: Schedule,
    lowered: LoweredSchedule | None,
    in_flight_limit: int | None,
    weights: str | None,
    json: bool,
) -> None:
    """Verify a schedule, or its lowered form with transfers, and print the report.

    Raises:
        typer.Exit: the schedule is unsound; all findings have been printed.
    """
    from penstock.verify.description import figures
    from penstock.verify.lowered import verify_lowered
    from penstock.verify.verify import verify as verify_schedule

    try:
        if lowered is None:
            report = verify_schedule(schedule, in_flight_limit, weights)
        else:
            report = verify_lowered(lowered, in_flight_limit, schedule, weights)
    except ScheduleError as error:
        if json:
            findings = [asdict(finding) for finding in error.findings]
            options.print_json({"sound": False, "findings": findings})
        else:
            typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    if json:
        options.print_json({"sound": True, **asdict(report)})
    else:
        print(options.schedule_summary(schedule, " is sound: "))
        print("\n".join(figures(report)))
