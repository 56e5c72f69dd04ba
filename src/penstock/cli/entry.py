"""Start of the `penstock` command: what must hold before its modules are imported.

Importing the command line takes tenths of a second, in which Ctrl-C must not print a traceback.
"""

from __future__ import annotations

import atexit
import os
import sys

#: Exit status after Ctrl-C: that of a process which SIGINT ends, as shells report it.
STOPPED = 130


def run() -> None:
    """Run the command line with the arguments of this process, and exit.

    The exit status after Ctrl-C is 130, also while modules are imported.
    """
    try:
        from penstock.cli.ascii_output import replace_unencodable
        from penstock.cli.main import CLOSED_PIPE, status

        replace_unencodable()
        code = status(sys.argv[1:])
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            code = CLOSED_PIPE
        if code == CLOSED_PIPE:
            _discard_output()
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        code = STOPPED
    if code == STOPPED:
        _end_at_once()
    sys.exit(code)


def _end_at_once() -> None:
    """End the process with status `STOPPED`, without tearing down the modules that are loaded.

    With torch that takes seconds on a busy machine, in which Ctrl-C seems to have no effect.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(STOPPED)


def _discard_output() -> None:
    """Send what is still in the buffer of standard output nowhere, so that its flush at the end of
    the process does not fail.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.__stdout__.fileno() if sys.__stdout__ is not None else 1)
    os.close(nowhere)
