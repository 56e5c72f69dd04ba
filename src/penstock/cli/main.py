"""The `penstock` command line: its commands, error messages and exit statuses."""

from __future__ import annotations

import errno
import functools
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from typing import Annotated

import typer

import penstock
from penstock.cli.discarded_output import discarded_output
from penstock.cli.doctor import doctor
from penstock.cli.draw import draw
from penstock.cli.entry import STOPPED
from penstock.cli.explore import explore
from penstock.cli.export import export
from penstock.cli.export_weights import export_weights
from penstock.cli.list import list_names
from penstock.cli.partition import partition
from penstock.cli.plan import plan
from penstock.cli.profile import profile
from penstock.cli.report import report
from penstock.cli.resize import resize
from penstock.cli.schedules import schedules
from penstock.cli.show import show
from penstock.cli.simulate import simulate
from penstock.cli.study import study
from penstock.cli.train import train
from penstock.cli.usage_errors import UsageError, usage_message
from penstock.cli.verify import verify
from penstock.errors import PenstockError, RunError, missing_torch
from penstock.files.text import shorten

app = typer.Typer(
    name="penstock",
    help="Pipeline-parallel training for PyTorch: "
    "profile, partition, schedule, verify, simulate, draw, train.",
    no_args_is_help=True,
    # Panels cut the names of flags on narrow terminals.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    """Print the version and exit, if the flag is given."""
    if requested:
        typer.echo(f"penstock {penstock.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    _quiet: Annotated[
        bool,
        typer.Option(
            "--quiet", "-q", help="Print no results, only warnings and errors; for every command."
        ),
    ] = False,
    _verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            "-v",
            help="Print where in the code an error was raised; for every command.",
        ),
    ] = False,
) -> None:
    """Pipeline-parallel training for PyTorch: profile, partition, schedule, verify, simulate, draw,
    train.
    """


#: Exit status after the reader of the output, such as `head`, has ended: that of a process which
#: SIGPIPE ends, as other tools have it.
CLOSED_PIPE = 141

#: What any write may meet. Other errors of the system are defects, and show where they come from.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


#: What a name from outside may meet: it is too long, or the user may not go there.
_NAME_ERRORS = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM)


def _report_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that it prints an error as one message and exits.

    The exit status is 1 if the work failed, 2 if the input was wrong, 130 after Ctrl-C.
    """

    @functools.wraps(command)
    def run(*args: object, **kwargs: object) -> None:
        """Run the command; print an error on one line, and exit with its status."""
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt as stop:
            raise SystemExit(STOPPED) from stop
        except Exception as error:
            outcome = _status_and_message(error)
            if outcome is None:
                raise
            status, message = outcome
            typer.echo(f"error: {message}", err=True)
            raise SystemExit(status) from error

    return run


def _status_and_message(error: Exception) -> tuple[int, str] | None:
    """Return exit status and message for an error; None for a defect of this program."""
    if isinstance(error, PenstockError):
        return 1 if isinstance(error, RunError) else 2, str(error)
    if isinstance(error, OSError):
        if error.errno in _NAME_ERRORS and error.filename:
            return 2, f"cannot open {shorten(os.fsdecode(error.filename))}: {error.strerror}"
        if error.errno in _DISK_ERRORS:
            place = f" ({error.filename})" if error.filename else ""
            return 1, f"a file cannot be written{place}: {error.strerror}"
    if isinstance(error, ModuleNotFoundError):
        reason = missing_torch(error, "this command")
        return None if reason is None else (2, str(reason))
    if isinstance(error, (MemoryError, RuntimeError)) and _is_out_of_memory(error):
        cause = shorten(str(error) or type(error).__name__, 200)
        return 1, f"there is not enough memory: {cause}. Use smaller sizes"
    return None


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is exhausted. Torch raises a RuntimeError if it is."""
    if "torch" not in sys.modules:
        return isinstance(error, MemoryError)
    from penstock.runtime.out_of_memory import is_out_of_memory

    return is_out_of_memory(error)


#: The commands, each with its line in the list of commands.
_COMMANDS: tuple[tuple[Callable[..., None], str], ...] = (
    (train, "Train a model through a pipeline, here or over hosts."),
    (resize, "Continue a run on another number of ranks."),
    (profile, "Measure the layers of a model, or a cluster."),
    (partition, "Cut a profiled model into stages."),
    (plan, "Search the fastest plan that fits into memory."),
    (simulate, "Simulate a schedule with given costs."),
    (draw, "Draw a schedule, a plan or a run."),
    (verify, "Verify that a schedule is sound."),
    (schedules, "List the schedules, or compare them by simulation."),
    (list_names, "List planners, partitioners, models and other entries."),
    (show, "Print what a plan, profile or cluster file contains."),
    (explore, "Open a page to play with a pipeline."),
    (export, "Write a plan for another library."),
    (export_weights, "Write a checkpoint's weights for other programs."),
    (report, "Write a page on a training run or a plan."),
    (study, "Run a study of many training runs."),
    (doctor, "Test this installation and its devices."),
)

for _command, _summary in _COMMANDS:
    _name = _command.__name__.removesuffix("_names").replace("_", "-")
    app.command(name=_name, short_help=_summary)(_report_errors(_command))


#: Flags of the program, which may also follow the command.
_QUIET, _VERBOSE = frozenset({"-q", "--quiet"}), frozenset({"-v", "--verbose"})


def status(arguments: list[str]) -> int:
    """Run one command and return its exit status.

    0: success; 1: the work failed; 2: the input was wrong; 130: Ctrl-C; 141: the reader of its
    output has closed the pipe.
    """
    flags = [word for word in arguments if word in _QUIET | _VERBOSE]
    words = flags + [word for word in arguments if word not in flags]
    code = _run(words, quiet=bool(_QUIET.intersection(flags)))
    if code == STOPPED:
        typer.echo("stopped", err=True)
    return code


def _run(words: list[str], *, quiet: bool) -> int:
    """Run one command and return its exit status, `STOPPED` after Ctrl-C."""
    try:
        with discarded_output() if quiet else nullcontext():
            # Commands return None, and `typer.Exit` becomes the status that is returned.
            return int(app(words, standalone_mode=False) or 0)
    except UsageError as error:
        if error.format_message().startswith("Usage:"):  # the help, if there is no command
            error.show()
        else:
            typer.echo(f"error: {usage_message(error, words)}", err=True)
        return 2
    except typer.Abort:  # Ctrl-C before the command begins, in older versions of typer
        return STOPPED
    except SystemExit as stop:
        # Typer turns a closed pipe into status 1, while it handles the error.
        if isinstance(stop.__context__, BrokenPipeError):
            return CLOSED_PIPE
        if _VERBOSE.intersection(words) and stop.code != STOPPED:
            _print_origin(stop)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)


def _print_origin(stop: SystemExit) -> None:
    """Print the traceback of the error that ended a command, with that of the rank that raised it."""
    error = stop.__cause__
    if error is not None:
        typer.echo("".join(traceback.format_exception(error)).rstrip(), err=True)
