"""`penstock study`: experiments over many runs, and what they say."""

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
    from penstock.study.conduct import Told

#: What can be studied.
QUESTIONS = ("convergence",)
#: What --quick stands for: it shows that all works, and says nothing of the rules.
QUICK_BATCHES, QUICK_SEEDS, QUICK_DEPTHS = 12, 2, "2"


def study(
    question: Annotated[str, typer.Argument(help="What to study: convergence.")],
    tasks: Annotated[
        str, typer.Option(help="digits (VGG-11), gpt (characters), or both.")
    ] = "digits,gpt",
    rules: Annotated[
        str | None,
        typer.Option(help="Weight rules: stash,none. By default all; flush always runs too."),
    ] = None,
    depths: Annotated[
        str | None, typer.Option(help="Numbers of stages; 2,4,8 if not said.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Runs of each case, from seed 0 on; 3 if not said.")
    ] = None,
    epochs: Annotated[
        float | None,
        typer.Option(help="Times through the data; may be a fraction. Else the task's own."),
    ] = None,
    optimizer: Annotated[
        str,
        typer.Option(help="sgd, adam or adamw, for all rules whose paper has a formula for it."),
    ] = "sgd",
    lr_scale: Annotated[float, typer.Option(help="Times the task's own learning rate.")] = 1.0,
    micro_batches: Annotated[
        str,
        typer.Option(
            help="least: as few as a rule takes, so that gradients are oldest; stages: one for each stage."
        ),
    ] = "least",
    out: Annotated[
        Path | None, typer.Option(help="The study's folder. What it has already is not run again.")
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(help="Cases at a time, each on one thread; by default one per core."),
    ] = None,
    measure: Annotated[
        bool | None,
        typer.Option(
            "--measure/--no-measure", help="Time batches in real processes too; not with --quick."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few batches of everything, to see it work.")
    ] = False,
    json: Json = False,
) -> None:
    """Train the same model on the same batches under every weight rule, and say which rules lose
    accuracy, and when.

    Records are kept as they come: after an interrupt the same command goes on where it stopped.

    Example: penstock study convergence --tasks digits --rules stash,none,pipemare --depths 2,8
    --seeds 3
    """
    if question not in QUESTIONS:
        raise SettingError(
            f"there is no study called {question!r}: there is {', '.join(QUESTIONS)}"
        )
    if jobs is not None and jobs < 1:
        raise SettingError(f"--jobs {jobs}: there is at least 1")
    from penstock.study.question import Question
    from penstock.study.report import text
    from penstock.study.study import Study

    asked = Question(
        tasks=_names(tasks),
        rules=_names(rules or ""),
        depths=_depths(depths or (QUICK_DEPTHS if quick else "2,4,8")),
        seeds=seeds if seeds is not None else QUICK_SEEDS if quick else 3,
        epochs=epochs,
        optimizer=optimizer,
        lr_scale=lr_scale,
        micro_batches=micro_batches,  # type: ignore[arg-type]  # checked there
        most_batches=QUICK_BATCHES if quick and epochs is None else None,
    )
    folder = out or Path("runs") / (f"{question}-quick" if quick else question)
    cores = len(os.sched_getaffinity(0))
    with _progress(json) as (told, say):
        made = Study(
            asked, folder, jobs or cores, measured=not quick if measure is None else measure
        )
        results = made.run(told, say)
    print(results.as_json() if json else text(results))
    typer.echo(f"everything is in {folder}", err=True)
    if results.failed:
        case, reason = results.failed[0]
        raise RunError(f"{len(results.failed)} cases failed; the first: {case}: {reason}")


def _names(words: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in words.split(",") if word.strip()))


def _depths(words: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(word) for word in words.split(",")))
    except ValueError as error:
        raise SettingError(
            f"--depths {words}: write numbers of stages with commas, such as 2,4,8"
        ) from error


@contextmanager
def _progress(quiet: bool) -> Iterator[tuple[Callable[[int], Told], Callable[[str], None]]]:
    """A bar on a terminal, and a line for each case that ends."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from penstock.study.conduct import Failed
    from penstock.study.record import Record
    from penstock.study.tasks import study_task

    console = Console(file=sys.stderr)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as bar:

        def say(words: str) -> None:
            if not quiet:
                console.print(words, highlight=False, markup=False, soft_wrap=True)

        def begin(cases: int) -> Told:
            line = bar.add_task("cases", total=cases)

            def told(ended: Record | Failed) -> None:
                bar.advance(line)
                if isinstance(ended, Failed):
                    say(f"{ended.case}: failed: {ended.reason}")
                    return
                metric = study_task(ended.case.task).metric
                value = ended.test_accuracy if metric.higher else ended.test_loss
                result = ended.given_up if value is None else f"{metric.name} {metric.text(value)}"
                say(f"{ended.case}: {result}, {ended.seconds:.1f} s")

            return told

        yield begin, say
