"""Peak memory of a process, and its limit."""

from __future__ import annotations

import subprocess
import sys

LIMITED = """
from penstock.peers.memory import limit_memory
limit_memory(64 * 2**20)
kept = bytearray(32 * 2**20)
try:
    bytearray(96 * 2**20)
except MemoryError:
    print("refused")
"""

PEAK = """
from penstock.peers.memory import Peak
peak = Peak()
peak.reset()
block = bytearray(b"x") * (64 * 2**20)
del block
print(peak.read() // 2**20)
"""


def _run(code):
    """What a process of its own prints."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout


def test_memory_above_the_limit_is_refused_and_below_it_is_not():
    """A process that is killed for its memory could not say what it needed it for."""
    assert _run(LIMITED) == "refused\n"


def test_the_peak_counts_memory_that_has_been_freed():
    """The most that a step needs is what a device must have."""
    # Pages that the imports had freed are used first.
    assert 63 <= int(_run(PEAK)) < 80
