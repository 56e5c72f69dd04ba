"""Output of tracing: messages of torch.export are suppressed; long traces are announced."""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.standard_error import write_line

_LOG = logging.getLogger("penstock")

#: Seconds of tracing after which a line is written to stderr.
_ANNOUNCE_AFTER_S = 2.0

#: Loggers in which torch.export reports errors that Penstock reports with the user's line.
_CHATTY = (
    "torch.fx.experimental.symbolic_shapes",
    "torch._export",
    "torch.export",
    "torch._subclasses.fake_tensor",
)


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress the warnings, log records and partial graphs that torch.export writes.

    Only those from this thread.
    """
    thread = threading.get_ident()
    loggers = [logging.getLogger(name) for name in _CHATTY]

    def others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    def unprinted(*values: object, **options: Any) -> None:
        if threading.get_ident() != thread:
            print(*values, **options)

    module: Any = importlib.import_module("torch.export._trace")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.addFilter(others)
        # In the module of torch.export this name takes the place of the builtin.
        module.print = unprinted
        try:
            yield
        finally:
            del module.print
            for logger in loggers:
                logger.removeFilter(others)


@contextmanager
def announced(message: str) -> Iterator[None]:
    """Log the work in this context; after 2 s, write one line to stderr as well.

    Of several ranks the first writes it.
    """
    _LOG.info("%s", message)
    timer = threading.Timer(_ANNOUNCE_AFTER_S, _say, [message])
    timer.daemon = True
    start = time.perf_counter()
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    _LOG.info("%s: %.1f s", message, time.perf_counter() - start)


def _say(message: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        write_line(f"penstock: {message}")
