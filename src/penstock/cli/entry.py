"""Start of the `penstock` command: what must hold before its modules are imported.

Importing the command line takes tenths of a second, in which Ctrl-C must not print a traceback.
"""

from __future__ import annotations

import sys


def run() -> None:
    """Run the command line with the arguments of this process, and exit.

    The exit status after Ctrl-C is 130, also while modules are imported.
    """
    try:
        from penstock.cli.ascii_output import replace_unencodable
        from penstock.cli.main import status

        replace_unencodable()
        code = status(sys.argv[1:])
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        code = 130
    sys.exit(code)
