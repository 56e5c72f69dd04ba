"""NCCL communicators: one for each directed link between two ranks, all made before the first
message.

NCCL matches the transfers of a communicator by their order alone, so that each direction of a link
has its own. A communicator that is made by its first transfer makes both hosts wait for each other
inside that transfer: two ranks that begin by sending to each other would wait for ever, where no
deadline of ours can see it (pytorch#160210, Megatron-LM#5240). So all ranks make all communicators
in one order, and pass a barrier before they go on.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Collection, Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from penstock.schedule.lower import Link

#: A link, and whether the communicator is that of messages that copies exchange at a U.
LinkKey = tuple[Link, bool]

#: dtypes of torch that NCCL transfers (`ncclDataType_t`). All others travel as bytes.
NCCL_DTYPES = frozenset(
    {
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.bool,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)

#: Timeout of NCCL's process groups. torch's watchdog ends the process when it passes, without a
#: word to the other ranks: our own
#: deadline must always come first.
GROUP_TIMEOUT = timedelta(days=7)

#: Seconds to wait for all aborts of communicators.
_ABORT_S = 10.0


def communicator_keys(links: Iterable[Link], copies: Iterable[Link]) -> list[LinkKey]:
    """The communicators of a run, in the order in which all ranks make them.

    Args:
        links: links of the programs' own messages.
        copies: links between copies of a stage, and between holders of a tied weight.
    """
    return sorted([(link, False) for link in set(links)] + [(link, True) for link in set(copies)])


def communicators_per_rank(keys: Iterable[LinkKey], rank: int) -> int:
    """How many communicators a rank is in. Each takes device memory: hundreds of MB over NVLink
    (nccl#964).
    """
    return sum(rank in link for link, _ in keys)


def make_communicators(
    keys: Collection[LinkKey], rank: int, device: torch.device, barrier_group: dist.ProcessGroup
) -> dict[LinkKey, dist.ProcessGroup]:
    """Make all communicators. Every rank calls it with the same keys in the same order.

    Args:
        keys: which, see `communicator_keys`.
        rank: this rank.
        device: its GPU, with an index.
        barrier_group: a gloo group of all ranks.

    Returns:
        Those that this rank is in, connected.
    """
    # With a device torch connects a group when it is made; where it does not, and for kernels that
    # are loaded at their first
    # launch, one transfer follows.
    eager = "device_id" in inspect.signature(dist.new_group).parameters
    options: dict[str, Any] = {"device_id": device} if eager else {}
    groups: dict[LinkKey, dist.ProcessGroup] = {}
    for link, meets in keys:
        group = dist.new_group(list(link), GROUP_TIMEOUT, "nccl", **options)
        if rank in link:
            groups[link, meets] = group
            _transfer_byte(group, link, rank, device)
    dist.barrier(group=barrier_group)
    return groups


def _transfer_byte(group: dist.ProcessGroup, link: Link, rank: int, device: torch.device) -> None:
    """Send one byte over a link."""
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    if rank == link.source:
        work = dist.isend(byte, link.target, group=group)
    else:
        work = dist.irecv(byte, link.source, group=group)
    if work is not None:
        work.wait()


def abort_communicators(groups: Mapping[LinkKey, dist.ProcessGroup]) -> None:
    """Abort all communicators at once: an abort may wait for the transfers of another communicator."""
    threads = [
        threading.Thread(target=group.abort, name="penstock-abort", daemon=True)
        for group in groups.values()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_ABORT_S)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as NCCL can transfer it: itself, or its bytes where NCCL has no such
    dtype. It shares the memory.
    """
    return tensor if tensor.dtype in NCCL_DTYPES else tensor.reshape(-1).view(torch.uint8)
