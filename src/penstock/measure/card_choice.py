"""List the CUDA cards that this process can use with their memory, and choose between them and the
CPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, final, get_args

import torch

from penstock.cluster.device import DeviceRequest
from penstock.cluster.local import available_memory_bytes
from penstock.errors import SettingError
from penstock.transport.devices.device_assignment import Card
from penstock.transport.devices.device_discovery import cuda_card

DeviceType = Literal["cpu", "cuda"]


@final
@dataclass(frozen=True)
class CardMemory:
    """A CUDA card and its unused memory.

    Attributes:
        card: the card.
        free_bytes: memory of the card that no process uses, less the context of one process.
    """

    card: Card
    free_bytes: int


def count_cards() -> int:
    """Return the number of visible CUDA cards; 0 where torch is built without CUDA."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def list_cards() -> tuple[CardMemory, ...]:
    """Describe every visible CUDA card and its unused memory.

    This makes a CUDA context of several hundred megabytes on every card, which lasts as long as the
    process: call it in a process that ends soon.
    """
    return tuple(
        CardMemory(cuda_card(index), torch.cuda.mem_get_info(index)[0])
        for index in range(count_cards())
    )


def free_memory_bytes(device: torch.device) -> int:
    """Return the memory that is free now: on a card, or on the host of a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory_bytes()


def choose_device_type(request: str, card_count: int) -> DeviceType:
    """Return where to compute.

    Args:
        request: "auto" uses the cards if there are any; "cpu" and "cuda" force one.
        card_count: number of visible CUDA cards.

    Raises:
        SettingError: "cuda" is requested and no card is visible, or the request is not one of
            these.
    """
    if request not in get_args(DeviceRequest):
        raise SettingError(f"device is 'auto', 'cpu' or 'cuda', not {request!r}")
    if request == "cuda" and card_count == 0:
        raise SettingError(no_card())
    if request == "cpu" or card_count == 0:
        return "cpu"
    return "cuda"


def no_card() -> str:
    """Return the message for a request of CUDA without a visible card."""
    build = torch.version.cuda
    facts = [
        "this torch is built without CUDA" if build is None else f"torch is built for CUDA {build}"
    ]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        facts.append(f"CUDA_VISIBLE_DEVICES is {visible!r}")
    return (
        f"device cuda: no CUDA device is visible ({'; '.join(facts)}). Use device cpu, or auto; or "
        "install a CUDA build of torch and make a card visible"
    )
