"""The `penstock` command line: its commands, error messages and exit statuses."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import typer

from penstock.cli.doctor import doctor
from penstock.cli.draw import draw
from penstock.cli.export import export
from penstock.cli.partition import partition
from penstock.cli.plan import plan
from penstock.cli.profile import profile
from penstock.cli.schedules import schedules
from penstock.cli.simulate import simulate
from penstock.cli.study import study
from penstock.cli.train import train
from penstock.cli.verify import verify
from penstock.errors import PenstockError, RunError

app = typer.Typer(
    name="penstock",
    help="Pipeline-parallel training for PyTorch: "
    "profile, partition, schedule, verify, simulate, draw, train.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _report_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that it prints an error as one message and exits.

    The exit status is 1 if the work failed, 2 if the input was wrong, 130 after Ctrl-C.
    """

    @functools.wraps(command)
    def run(*args: object, **kwargs: object) -> None:
        try:
            command(*args, **kwargs)
        except PenstockError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1 if isinstance(error, RunError) else 2) from error
        except KeyboardInterrupt as stop:
            typer.echo("stopped", err=True)
            raise typer.Exit(130) from stop

    return run


for _command in (
    train,
    profile,
    partition,
    plan,
    simulate,
    draw,
    verify,
    schedules,
    export,
    study,
    doctor,
):
    app.command()(_report_errors(_command))


def status(arguments: list[str]) -> int:
    """Run one command and return its exit status.

    0: success; 1: the work failed; 2: the input was wrong; 130: Ctrl-C.
    """
    try:
        app(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def run() -> None:
    """Run the command line with the arguments of this process, and exit."""
    sys.exit(status(sys.argv[1:]))
