"""NCCL communicators: one for each directed link between two ranks, all created before the first
message.

NCCL matches the transfers of a communicator by their order alone, so each direction of a link has a
communicator of its own. A communicator that is created by its first transfer makes both hosts wait
for each other inside that transfer: two ranks that begin by sending to each other would wait
forever, where no deadline of ours can see it (pytorch#160210, Megatron-LM#5240). So all ranks
create all communicators in one order, and pass a barrier before they go on.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from penstock.schedule.lower import Link

#: A link, and whether the communicator carries what replicas exchange at an update (U).
LinkKey = tuple[Link, bool]

#: dtypes of torch that NCCL transfers (`ncclDataType_t`). All others are sent as bytes.
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

#: Timeout of NCCL's process groups. When it passes, torch's watchdog ends the process without
#: notifying the other ranks: our own deadline must always expire first.
GROUP_TIMEOUT = timedelta(days=7)

#: Tag of the receive that closes a group of gloo; no message has it.
_CLOSING_TAG = 2**31 - 1

#: Seconds to wait for each communicator's abort.
_ABORT_S = 10.0


def communicator_keys(links: Iterable[Link], copies: Iterable[Link]) -> list[LinkKey]:
    """Return the communicators of a run, in the order in which all ranks create them.

    Args:
        links: links of the programs' own messages.
        copies: links between replicas of a stage, and between ranks that hold a tied weight.
    """
    return sorted([(link, False) for link in set(links)] + [(link, True) for link in set(copies)])


def make_communicators(
    keys: Collection[LinkKey], rank: int, device: torch.device, barrier_group: dist.ProcessGroup
) -> dict[LinkKey, dist.ProcessGroup]:
    """Create all communicators. Every rank calls it with the same keys in the same order.

    Args:
        keys: the communicators, see `communicator_keys`.
        rank: this rank.
        device: its GPU, with an index.
        barrier_group: a gloo group of all ranks.

    Returns:
        The communicators that this rank is part of, connected.
    """
    options = _group_options(device)
    groups: dict[LinkKey, dist.ProcessGroup] = {}
    for link, at_update in keys:
        group = dist.new_group(list(link), GROUP_TIMEOUT, "nccl", **options)
        if rank in link:
            groups[link, at_update] = group
            _transfer_byte(group, link, rank, device)
    dist.barrier(group=barrier_group)
    return groups


def make_common_communicator(
    device: torch.device, ranks: Sequence[int]
) -> dist.ProcessGroup | None:
    """Create the communicator of all ranks of a pipeline, connected. Every process calls it.

    Args:
        device: the GPU of this process, with an index.
        ranks: of the pipeline's processes in the job.

    Returns:
        The communicator; None for a process of another pipeline.
    """
    group: dist.ProcessGroup = dist.new_group(
        list(ranks), GROUP_TIMEOUT, "nccl", **_group_options(device)
    )
    if dist.get_rank() not in ranks:
        return None
    work = dist.all_reduce(torch.zeros(1, device=device), group=group, async_op=True)
    if work is not None:
        work.wait()
    return group


def _group_options(device: torch.device) -> dict[str, Any]:
    """Return the options with which `new_group` connects a communicator when it is created.

    One transfer follows nevertheless, for versions of torch that do not connect it then, and for
    kernels that are loaded at their first launch.
    """
    eager = "device_id" in inspect.signature(dist.new_group).parameters
    return {"device_id": device} if eager else {}


def _transfer_byte(group: dist.ProcessGroup, link: Link, rank: int, device: torch.device) -> None:
    """Send one byte over a link."""
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    if rank == link.source:
        work = dist.isend(byte, link.target, group=group)
    else:
        work = dist.irecv(byte, link.source, group=group)
    if work is not None:
        work.wait()


def abort_communicators(groups: Iterable[dist.ProcessGroup]) -> None:
    """Abort all communicators concurrently: an abort may wait for the transfers of another
    communicator.
    """
    threads = [
        threading.Thread(target=group.abort, name="penstock-abort", daemon=True) for group in groups
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_ABORT_S)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor in a dtype that NCCL supports: itself, or a view of its bytes."""
    if tensor.dtype in NCCL_DTYPES:
        return tensor
    # Dimensions of one element may have any stride in a contiguous tensor, but not in such a view.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8)


def close_gloo_group(group: dist.ProcessGroup, rank: int) -> None:
    """End all waits in a group of gloo.

    gloo has no abort, but a receive that times out closes the whole context.

    Args:
        group: to close.
        rank: of this process in the job.
    """
    others = [other for other in dist.get_process_group_ranks(group) if other != rank]
    if not others:
        return
    with suppress(RuntimeError):
        receive = dist.irecv(torch.empty(1), others[0], group=group, tag=_CLOSING_TAG)
        if receive is not None:
            receive.wait(timedelta(milliseconds=1))
