"""`penstock study`: run experiments over many training runs and report their conclusions."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import Json
from penstock.errors import RunError, SettingError

if TYPE_CHECKING:
    from penstock.study.runner import Report

#: Experiments that can be run.
EXPERIMENTS = ("convergence",)
#: Settings of --quick: a smoke test, too short to say anything about the rules.
QUICK_BATCHES, QUICK_SEEDS, QUICK_DEPTHS = 12, 2, "2"


def study(
    question: Annotated[str, typer.Argument(help="The experiment to run: convergence.")],
    tasks: Annotated[
        str, typer.Option(help="digits (VGG-11), gpt (characters), or both.")
    ] = "digits,gpt",
    rules: Annotated[
        str | None,
        typer.Option(help="Weight rules, such as stash,none; default: all. flush always runs."),
    ] = None,
    depths: Annotated[str | None, typer.Option(help="Numbers of stages; default: 2,4,8.")] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Runs per case, with seeds 0, 1, ...; default: 3.")
    ] = None,
    epochs: Annotated[
        float | None,
        typer.Option(help="Passes through the data, may be a fraction; default: the task's own."),
    ] = None,
    optimizer: Annotated[
        str,
        typer.Option(
            help="sgd, adam or adamw; a rule whose paper has no formula for it uses another."
        ),
    ] = "sgd",
    lr_scale: Annotated[
        float, typer.Option(help="Factor applied to the task's learning rate.")
    ] = 1.0,
    micro_batches: Annotated[
        str,
        typer.Option(
            help="least: the fewest that a rule supports, for the most stale gradients; "
            "stages: one per stage."
        ),
    ] = "least",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the results; cases that it already has are not run again."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(help="Cases to run in parallel, one thread each; default: one per core."),
    ] = None,
    measure: Annotated[
        bool | None,
        typer.Option(
            "--measure/--no-measure",
            help="Also time batches in real processes; default: unless --quick.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Smoke test: a few batches of every case.")
    ] = False,
    json: Json = False,
) -> None:
    """Train the same model on the same batches under every weight rule, and report which rules lose
    accuracy, and when.

    Each case is recorded when it ends: after an interrupt, the same command continues.

    Example: penstock study convergence --tasks digits --rules stash,none,pipemare --depths 2,8
    --seeds 3
    """
    if question not in EXPERIMENTS:
        raise SettingError(f"there is no study {question!r}; available: {', '.join(EXPERIMENTS)}")
    if jobs is not None and jobs < 1:
        raise SettingError(f"--jobs {jobs}: must be at least 1")
    from penstock.study.experiment import Experiment
    from penstock.study.report import text
    from penstock.study.study import Study

    default_depths, default_seeds = (QUICK_DEPTHS, QUICK_SEEDS) if quick else ("2,4,8", 3)
    experiment = Experiment(
        tasks=_parse_names(tasks),
        rules=_parse_names(rules or ""),
        depths=_parse_depths(depths or default_depths),
        seeds=default_seeds if seeds is None else seeds,
        epochs=epochs,
        optimizer=optimizer,
        lr_scale=lr_scale,
        micro_batches=micro_batches,  # type: ignore[arg-type]  # checked there
        most_batches=QUICK_BATCHES if quick and epochs is None else None,
    )
    folder = out or Path("runs") / (f"{question}-quick" if quick else question)
    cores = len(os.sched_getaffinity(0))
    measured = not quick if measure is None else measure
    with _progress(json) as (start_cases, say):
        results = Study(experiment, folder, jobs or cores, measured).run(start_cases, say)
    print(results.as_json() if json else text(results))
    typer.echo(f"results are in {folder}", err=True)
    if results.failed:
        case, reason = results.failed[0]
        raise RunError(f"{len(results.failed)} cases failed; the first: {case}: {reason}")


def _parse_names(text: str) -> tuple[str, ...]:
    """Split names at commas, without blanks and repetitions."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _parse_depths(text: str) -> tuple[int, ...]:
    """Split numbers of stages at commas, without repetitions.

    Raises:
        SettingError: one of them is no whole number.
    """
    try:
        return tuple(dict.fromkeys(int(number) for number in text.split(",")))
    except ValueError as error:
        raise SettingError(
            f"--depths {text}: write numbers of stages with commas, such as 2,4,8"
        ) from error


@contextmanager
def _progress(quiet: bool) -> Iterator[tuple[Callable[[int], Report], Callable[[str], None]]]:
    """Show a progress bar on a terminal, and print a line for each case that ends.

    Yields:
        A function that takes the number of cases and returns the one to call with each result; and
        a function that prints a message.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from penstock.study.records import Record
    from penstock.study.runner import Failed
    from penstock.study.tasks import study_task

    console = Console(file=sys.stderr)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as bar:

        def say(message: str) -> None:
            """Print a message."""
            if not quiet:
                console.print(message, highlight=False, markup=False, soft_wrap=True)

        def start_cases(cases: int) -> Report:
            """Start the bar for a number of cases."""
            progress_task = bar.add_task("cases", total=cases)

            def report(result: Record | Failed) -> None:
                """Advance the bar and print the result of a case."""
                bar.advance(progress_task)
                if isinstance(result, Failed):
                    say(f"{result.case}: failed: {result.reason}")
                    return
                metric = study_task(result.case.task).metric
                value = result.test_accuracy if metric.higher else result.test_loss
                outcome = f"{metric.name} {metric.text(value)}" if value is not None else None
                say(f"{result.case}: {outcome or result.given_up}, {result.seconds:.1f} s")

            return report

        yield start_cases, say
