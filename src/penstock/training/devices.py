"""Devices of a training run: the CPU cores of this host, or its CUDA cards.

On cards every rank is a process with a card of its own. More ranks than cards are refused, except
on a host with a single card: there the ranks are threads of one process that share it. A pipeline
that shares one card is slower than plain training; it is useful to try out a plan for several
cards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, final

import torch

from penstock.cluster.cluster import Cluster, cluster
from penstock.cluster.device import Device, Link
from penstock.cluster.local import available_cores
from penstock.errors import SettingError
from penstock.measure.card_choice import CardMemory, DeviceType
from penstock.training.config import TrainConfig, read_settings

#: Ranks on one card pass tensors without a copy; the latency is the wake-up of a thread.
_SHARED_CARD_LINK = Link(50e-6, 1e12, "assumed: threads that share a card")
#: The slowest common link between cards of one host, as preset PCIe3; NVLink is faster.
_CARD_LINK = Link(10e-6, 15.75e9, "assumed: PCI Express 3.0, 16 lanes")


@final
@dataclass(frozen=True)
class Devices:
    """Devices of the ranks of a run.

    Attributes:
        cards: the visible CUDA cards, all of one model, and their memory; () for the CPU.

    Raises:
        SettingError: the cards are of several models.
    """

    cards: tuple[CardMemory, ...] = ()

    def __post_init__(self) -> None:
        """Refuse cards that one profile cannot describe."""
        names = sorted({memory.card.name for memory in self.cards})
        if len(names) > 1:
            raise SettingError(
                f"the visible CUDA cards are of several models ({', '.join(names)}), and a run is "
                "planned from the profile of one. Choose cards of one model by "
                "CUDA_VISIBLE_DEVICES, or device cpu"
            )

    @property
    def type(self) -> DeviceType:
        """The type as torch names it."""
        return "cuda" if self.cards else "cpu"

    @property
    def name(self) -> str:
        """The name for display: "cpu", or that of a card's model."""
        return self.cards[0].card.name if self.cards else "cpu"

    @property
    def default_ranks(self) -> int:
        """The number of ranks if neither ranks nor stages are set: one per core, or per card."""
        return len(self.cards) or available_cores()

    def check_ranks(self, ranks: int) -> None:
        """Refuse more ranks than there are cards, unless all of them share a single card.

        Raises:
            SettingError: there are 2 cards or more, and more ranks than cards.
        """
        if 1 < len(self.cards) < ranks:
            raise SettingError(
                f"{ranks} ranks need {ranks} CUDA cards, and {len(self.cards)} are visible: set "
                f"ranks or stages to at most {len(self.cards)}, or device cpu. On one card "
                "(CUDA_VISIBLE_DEVICES=0) ranks run as threads that share it"
            )

    def shares_card(self, ranks: int) -> bool:
        """Whether several ranks share a single card."""
        return len(self.cards) == 1 and ranks > 1

    def executor(self, ranks: int) -> Literal["processes", "threads"]:
        """Return how the ranks of a pipeline run, as `Pipeline` takes it."""
        return "threads" if self.shares_card(ranks) else "processes"

    def processes(self, ranks: int) -> int:
        """Return the number of processes for a number of ranks."""
        return 1 if self.shares_card(ranks) else ranks

    def of_process(self, number: int) -> torch.device:
        """Return the device of a process.

        Args:
            number: of the process on this host, from 0.
        """
        if not self.cards:
            return torch.device("cpu")
        return torch.device("cuda", self.cards[number].card.index)

    def cluster(self, ranks: int) -> Cluster:
        """Return the cluster to plan for; its links are assumptions.

        A card's memory is what no process uses now; ranks that share a card get equal parts of it.
        """
        if not self.cards:
            return cluster(f"local:{ranks}")
        if self.shares_card(ranks):
            share_bytes = self.cards[0].free_bytes // ranks
            share = Device(self.name, share_bytes, source="an equal part of one card")
            link = _SHARED_CARD_LINK
            return Cluster(f"{ranks} parts of {self.name}", (share,) * ranks, ranks, link, link)
        devices = tuple(Device(self.name, memory.free_bytes) for memory in self.cards[:ranks])
        return Cluster(f"{ranks} x {self.name}", devices, ranks, _CARD_LINK, _CARD_LINK)

    def description(self, ranks: int) -> str:
        """Return a line that describes a run's cards."""
        gib = ", ".join(f"{memory.free_bytes / 2**30:.1f}" for memory in self.cards[:ranks])
        line = f"device: {self.name} ({gib} GiB free)"
        if self.shares_card(ranks):
            line += (
                f", shared by {ranks} ranks, which are threads of one process: the plan and its "
                f"prediction are for {ranks} such cards with 1/{ranks} of the memory each; this "
                "card does their work in turn"
            )
        return line


def with_device(config: TrainConfig, devices: Devices) -> TrainConfig:
    """Return the configuration with the device that the run uses, as its folder records it.

    On cards `stages: cores` becomes the number of cards.
    """
    config = replace(config, device=devices.type)
    if devices.cards and config.stages == "cores":
        return replace(config, stages=len(devices.cards))
    return config


def device_change(config: TrainConfig, devices: Devices) -> str | None:
    """Return a notice if a resumed run was started on another type of device, else None.

    Args:
        config: of the resumed run; its folder contains its previous configuration.
        devices: of the resumed run.

    Raises:
        FileError: the configuration in the folder cannot be read.
    """
    if not config.resume:
        return None
    previous = read_settings(Path(str(config.out)) / "config.yaml").get("device")
    if previous not in ("cpu", "cuda") or previous == devices.type:
        return None
    return (
        f"the run was on {previous} and continues on {devices.type}: weights and optimizer state "
        "are loaded there. Sums are rounded in another order and random layers draw other numbers, "
        "so it does not repeat the run on one device to the bit"
    )
