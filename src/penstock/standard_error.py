"""Lines on standard error, which several ranks share."""

from __future__ import annotations

import sys
from typing import TextIO


def write_line(text: str, stream: TextIO | None = None) -> None:
    """Write a line by one write, so that the lines of several processes do not mix.

    `print` writes the end of the line by itself where Python does not buffer, and torchrun starts
    its ranks that way (`python -u`). Another rank may write in between.

    Args:
        text: without the end of its last line.
        stream: where to write; standard error if it is None.
    """
    target = sys.stderr if stream is None else stream
    target.write(f"{text}\n")
    target.flush()
