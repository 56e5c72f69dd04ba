"""What this process sees of its devices, as torch reports it; and the device that it gets."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from penstock.transport.cards import (
    VARIABLES,
    Assignment,
    Card,
    RankFacts,
    assign_devices,
    choose_local_device,
)
from penstock.transport.exchange import all_gather

_LOG = logging.getLogger("penstock")

Asked = str | torch.device | None


def rank_facts(asked: Asked = None) -> RankFacts:
    """The facts of this process. Torch's errors become facts: a rank that raised here would leave
    the others waiting.

    Args:
        asked: the `device=` of the caller.
    """
    text = None if asked is None else str(asked)
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
        asked=text,
        nccl=dist.is_nccl_available(),
        problem=problem,
    )


def visible_cards(*, described: bool = True) -> tuple[str, tuple[Card, ...]]:
    """Type and cards of the accelerator that torch can use here; ("", ()) if there is none.

    Args:
        described: whether names and UUIDs are read, which initialises CUDA in this process.

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
    """A CUDA device of this process."""
    properties = torch.cuda.get_device_properties(index)
    uuid = str(getattr(properties, "uuid", ""))
    if not uuid.replace("-", "").strip("0"):
        uuid = ""  # some virtual machines report zeros, which tell no cards apart
    return Card(index, properties.name, uuid, is_mig(index, properties.name, os.environ))


def is_mig(index: int, name: str, environment: Mapping[str, str]) -> bool:
    """Whether a CUDA device is a slice: its name says so ("NVIDIA A100-SXM4-40GB MIG 1g.5gb"), or
    the entry that selected it.
    """
    entries = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    selected = entries[index].strip() if index < len(entries) else ""
    return "MIG" in name.split() or selected.startswith("MIG-")


def host_identity() -> str:
    """What all processes of a running kernel have in common, and no other's; empty if it does not
    say.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def gather_assignment(facts: RankFacts, group: dist.ProcessGroup | None = None) -> Assignment:
    """What this rank gets, by the facts of all ranks. All ranks call it in the same order.

    Args:
        facts: of this rank.
        group: what the facts travel by; by default all ranks' group.

    Raises:
        SettingError: see `assign_devices`; the same on every rank.
    """
    return assign_devices(all_gather(facts, RankFacts, group))[dist.get_rank(group)]


def assign_device(asked: Asked = None, group: dist.ProcessGroup | None = None) -> Assignment:
    """What this rank gets, made its current device and logged. Called by all ranks; raises as
    `gather_assignment`.
    """
    assignment = gather_assignment(rank_facts(asked), group)
    _LOG.log(logging.INFO if assignment.complete else logging.WARNING, "%s", assignment.line)
    set_current_device(torch.device(assignment.device))
    return assignment


def local_device(asked: Asked = None) -> torch.device:
    """The one device of a process without other ranks, with its index.

    Args:
        asked: by default the calling thread's current card if torch can use one of
        `cards.AUTOMATIC`, else the CPU.

    Raises:
        SettingError: the device that is asked for is not visible.
    """
    text = None if asked is None else str(asked)
    if text is not None and text.startswith("cpu"):
        return torch.device(text)
    facts = rank_facts(asked)
    current = torch.accelerator.current_device_index() if facts.cards else 0
    return torch.device(choose_local_device(facts, current))


def set_current_device(device: torch.device) -> None:
    """Make a device the calling thread's current one; nothing for the CPU. The current device is of
    a thread, not of a process.
    """
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
