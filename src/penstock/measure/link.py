"""Measure the link between two ranks: the seconds of a message by its size."""

from __future__ import annotations

from typing import Final

import torch
import torch.distributed as dist

from penstock.cluster.device import Link
from penstock.errors import RunError
from penstock.measure.fit import fit
from penstock.measure.messages import Wires, time_messages
from penstock.transport.process_group import naming_lost_ranks

#: Bytes of the messages that are timed.
SIZES: Final = (64, 2**16, 2**20, 2**22, 2**24, 2**26)


@naming_lost_ranks("could not measure the link to the other rank")
def measure_link(repeats: int = 3) -> Link:
    """Time messages between ranks 0 and 1 (ping-pong), and fit latency and bandwidth.

    Both ranks call it and get the same result. Messages are fresh tensors, as the runtime's are;
    for each of `SIZES` the result is `undisturbed_seconds` of `repeats`, after a warm-up.

    Raises:
        RunError: there are not exactly two ranks, a message was received corrupted, or the other rank
            is lost.
    """
    if dist.get_world_size() != 2:
        raise RunError(f"a link is between 2 ranks, but there are {dist.get_world_size()}")
    wires = Wires(None, torch.device("cpu"))
    times = time_messages(1 - dist.get_rank(), wires, repeats, SIZES, fresh_only=True)
    return fit(times.sizes, times.fresh_s).link()
