"""What this process sees of its devices, as torch reports it; and the device that it is
assigned.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from penstock.transport.collectives import all_gather
from penstock.transport.devices.device_assignment import (
    VARIABLES,
    Assignment,
    Card,
    RankFacts,
    assign_devices,
    assign_local_device,
)

_LOG = logging.getLogger("penstock")

DeviceLike = str | torch.device | None


def rank_facts(requested: DeviceLike = None) -> RankFacts:
    """Return the facts of this process. Errors of torch become facts: if this rank raised here, the
    others would wait for it.

    Args:
        requested: the `device=` of the caller.
    """
    text = None if requested is None else str(requested)
    accelerator, problem = "", ""
    cards: tuple[Card, ...] = ()
    try:
        accelerator, cards = visible_cards(described=text is None or not text.startswith("cpu"))
    except (RuntimeError, AssertionError, OSError) as error:
        problem = f"{type(error).__name__}: {error}"
    return RankFacts(
        hostname=socket.gethostname(),
        host=host_identity(),
        environment=tuple((name, os.environ[name]) for name in VARIABLES if name in os.environ),
        accelerator=accelerator,
        cards=cards,
        requested=text,
        nccl=dist.is_nccl_available(),
        problem=problem,
    )


def visible_cards(*, described: bool = True) -> tuple[str, tuple[Card, ...]]:
    """Return type and cards of the accelerator that torch can use here; ("", ()) if there is none.

    Args:
        described: whether to read names and UUIDs, which initialises CUDA in this process.

    Raises:
        RuntimeError, AssertionError: the driver fails.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "", ()
    count = torch.accelerator.device_count()
    if accelerator.type != "cuda" or not described:
        return accelerator.type, tuple(Card(index) for index in range(count))
    return "cuda", tuple(cuda_card(index) for index in range(count))


def cuda_card(index: int) -> Card:
    """Describe a CUDA device of this process."""
    properties = torch.cuda.get_device_properties(index)
    uuid = str(getattr(properties, "uuid", ""))
    if not uuid.replace("-", "").strip("0"):
        uuid = ""  # some virtual machines report zeros, which do not identify a card
    return Card(index, properties.name, uuid, is_mig(index, properties.name, os.environ))


def is_mig(index: int, name: str, environment: Mapping[str, str]) -> bool:
    """Whether a CUDA device is a MIG slice.

    It is if its name ("NVIDIA A100-SXM4-40GB MIG 1g.5gb") or the entry of CUDA_VISIBLE_DEVICES that
    selected it says so.
    """
    entries = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    selected = entries[index].strip() if index < len(entries) else ""
    return "MIG" in name.split() or selected.startswith("MIG-")


def host_identity() -> str:
    """Return an identifier of the running kernel, common to all of its processes; empty if there is
    none.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        # Not on Linux. An empty text is of no host.
        return ""


def gather_assignment(facts: RankFacts, group: dist.ProcessGroup | None = None) -> Assignment:
    """Return the assignment of this rank, from the facts of all ranks. All ranks call it in the
    same order.

    Args:
        facts: of this rank.
        group: over which the facts are exchanged; by default all ranks' group.

    Raises:
        SettingError: see `assign_devices`; the same on every rank.
    """
    return assign_devices(all_gather(facts, RankFacts, group))[dist.get_rank(group)]


def assign_device(
    requested: DeviceLike = None, group: dist.ProcessGroup | None = None
) -> Assignment:
    """Assign this rank its device, make it the current one, and log it. All ranks call it; raises
    as `gather_assignment`.
    """
    assignment = gather_assignment(rank_facts(requested), group)
    _log(assignment, assignment.line)
    set_current_device(torch.device(assignment.device))
    return assignment


def local_device(requested: DeviceLike = None, user: str = "this process") -> torch.device:
    """Return the one device of a process without other ranks, with its index, and log it.

    Args:
        requested: the caller's `device=`; by default the calling thread's current card if torch
            can use one of `device_assignment.AUTOMATIC`, else the CPU.
        user: what computes on it, for the log.

    Raises:
        SettingError: the requested device is not visible.
    """
    if str(requested).startswith("cpu"):
        # Not even the number of cards is read: that would initialise CUDA, and a process that has
        # done so cannot fork ranks.
        facts = RankFacts(socket.gethostname(), requested=str(requested))
    else:
        facts = rank_facts(requested)
    current = torch.accelerator.current_device_index() if facts.cards else 0
    assignment = assign_local_device(facts, current)
    _log(assignment, f"{user} {assignment.line}")
    return torch.device(assignment.device)


def _log(assignment: Assignment, line: str) -> None:
    """Log an assignment; as a warning if a visible accelerator is left unused without a request."""
    _LOG.log(logging.INFO if assignment.complete else logging.WARNING, "%s", line)


def set_current_device(device: torch.device) -> None:
    """Make a device the calling thread's current one; nothing for the CPU. torch's current device
    is per thread, not per process.
    """
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
