"""Time limits of tests that wait for other processes and threads."""

from __future__ import annotations

#: Seconds after which what a test waits for hangs. Programs that import torch take a minute while ten
#: others run on two cores; nothing that ends takes longer than this.
HANG_S = 300.0
