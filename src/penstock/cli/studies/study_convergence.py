"""`penstock study convergence`: its flags, its run and its progress."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from penstock.cli.flags.options import refuse_flags
from penstock.cli.progress_bar import bar_with_lines
from penstock.cluster.local import available_cores
from penstock.errors import RunError, SettingError

if TYPE_CHECKING:
    from penstock.study.convergence.experiment import Experiment
    from penstock.study.convergence.runner import Report

#: The study that has flags, records and reports of its own.
NAME = "convergence"
#: Settings of --quick: a smoke test, too short to say anything about the rules.
QUICK_BATCHES, QUICK_SEEDS, QUICK_DEPTHS = 12, 2, "2"


@dataclass(frozen=True)
class Flags:
    """Flags that only this study has, as on the command line; None or False: not passed."""

    tasks: str | None = None
    rules: str | None = None
    depths: str | None = None
    seeds: int | None = None
    epochs: float | None = None
    optimizer: str | None = None
    lr_scale: float | None = None
    micro_batches: str | None = None
    measure: bool | None = None
    quick: bool = False

    def refuse_all(self) -> None:
        """Refuse flags that were passed, because another study runs.

        Raises:
            SettingError: one was passed.
        """
        refuse_flags(f"is a flag of the study {NAME} only", **vars(self))


def _experiment(flags: Flags) -> Experiment:
    """Return the experiment of some flags.

    Raises:
        PenstockError: a flag is not valid.
    """
    from penstock.study.convergence.experiment import Experiment

    default_depths, default_seeds = (QUICK_DEPTHS, QUICK_SEEDS) if flags.quick else ("2,4,8", 3)
    return Experiment(
        tasks=_parse_names("digits,gpt" if flags.tasks is None else flags.tasks),
        rules=_parse_names(flags.rules or ""),
        depths=_parse_depths(flags.depths or default_depths),
        seeds=default_seeds if flags.seeds is None else flags.seeds,
        epochs=flags.epochs,
        optimizer="sgd" if flags.optimizer is None else flags.optimizer,
        lr_scale=1.0 if flags.lr_scale is None else flags.lr_scale,
        micro_batches=flags.micro_batches or "least",  # type: ignore[arg-type]  # checked there
        most_batches=QUICK_BATCHES if flags.quick and flags.epochs is None else None,
    )


def print_cases(flags: Flags, *, json: bool) -> None:
    """Print the cases of the experiment without running any."""
    cases, _ = _experiment(flags).cases()
    if json:
        print(json_module.dumps([asdict(case) for case in cases], indent=1))
        return
    for case in cases:
        print(case)
    typer.echo(f"{len(cases)} cells", err=True)


def run(flags: Flags, out: Path | None, jobs: int | None, *, json: bool) -> None:
    """Train the same model on the same batches under every weight rule, and report which rules lose
    accuracy, and when.
    """
    from penstock.study.convergence.report import text
    from penstock.study.convergence.study import Study

    experiment = _experiment(flags)
    folder = out or Path("runs") / (f"{NAME}-quick" if flags.quick else NAME)
    cores = available_cores()
    measured = not flags.quick if flags.measure is None else flags.measure
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
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    from penstock.study.convergence.records import Record
    from penstock.study.convergence.runner import Failed
    from penstock.study.convergence.tasks import study_task

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with bar_with_lines(*columns, quiet=quiet) as (bar, say):

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
