"""The `penstock` command."""

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
    help="Pipeline-parallel training for PyTorch: measure, cut, schedule, prove, predict, draw, train.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _spoken(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb with its errors said in one message, and an exit status that tells wrong words (2)
    from failed work (1).
    """

    @functools.wraps(verb)
    def run(*args: object, **kwargs: object) -> None:
        try:
            verb(*args, **kwargs)
        except PenstockError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1 if isinstance(error, RunError) else 2) from error
        except KeyboardInterrupt as stop:
            typer.echo("stopped", err=True)
            raise typer.Exit(130) from stop

    return run


for _verb in (
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
    app.command()(_spoken(_verb))


def status(arguments: list[str]) -> int:
    """Run one command and return its exit status: 0, 1 when the work failed, 2 when the words are
    off, 130 after Ctrl-C.
    """
    try:
        app(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def run() -> None:
    """Run the command line."""
    sys.exit(status(sys.argv[1:]))
