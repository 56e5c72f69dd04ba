"""Tracing says what it does in Penstock's own words, and in no others."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LOG = logging.getLogger("penstock")

#: Seconds of tracing after which a line on stderr says so.
_LONG_S = 2.0

#: torch.export reports here what Penstock reports with the user's line.
_CHATTY = ("torch.fx.experimental.symbolic_shapes", "torch._export", "torch.export")


@contextmanager
def quietly() -> Iterator[None]:
    """Drop the warnings, log records and partial graphs that torch.export writes from this thread."""
    own = threading.get_ident()
    loggers = [logging.getLogger(name) for name in _CHATTY]

    def others(record: logging.LogRecord) -> bool:
        return record.thread != own

    def unprinted(*values: object, **options: Any) -> None:
        if threading.get_ident() != own:
            print(*values, **options)

    module: Any = importlib.import_module("torch.export._trace")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.addFilter(others)
        module.print = unprinted
        try:
            yield
        finally:
            del module.print
            for logger in loggers:
                logger.removeFilter(others)


@contextmanager
def announced(what: str) -> Iterator[None]:
    """Log the work in here; where it takes more than 2 s, write one line to stderr as well, on the
    first rank of several.
    """
    _LOG.info("%s", what)
    timer = threading.Timer(_LONG_S, _say, [what])
    timer.daemon = True
    began = time.perf_counter()
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    _LOG.info("%s: %.1f s", what, time.perf_counter() - began)


def _say(what: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"penstock: {what}", file=sys.stderr, flush=True)
