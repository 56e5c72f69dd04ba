"""Standard output that is discarded, as `penstock --quiet` asks for."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout


@contextmanager
def discarded_output() -> Iterator[None]:
    """Discard what this process, and processes that it starts, write to standard output."""
    sys.stdout.flush()
    saved = os.dup(1)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # noqa: PTH123 - no path
        os.dup2(nowhere.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(saved, 1)
            os.close(saved)
