"""The `penstock` command."""

from __future__ import annotations

import os
import sys

import click
import typer

from penstock.cli.doctor import doctor
from penstock.cli.draw import draw
from penstock.cli.partition import partition
from penstock.cli.plan import plan
from penstock.cli.profile import profile
from penstock.cli.schedules import schedules
from penstock.cli.simulate import simulate
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
for verb in (train, profile, partition, plan, simulate, draw, verify, schedules, doctor):
    app.command()(verb)


def run() -> None:
    """Run the command line: exit status 0, 1 when the work failed, 2 when the words are off, 130 after Ctrl-C."""
    sys.exit(status())


def status(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status; what went wrong is one message on standard error."""
    try:
        return int(app(arguments, standalone_mode=False) or 0)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        print("stopped", file=sys.stderr)
        return 130
    except PenstockError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, RunError) else 2
    except BrokenPipeError:
        # Whoever read our output has gone; Python would complain once more when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    run()
