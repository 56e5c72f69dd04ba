"""Check that the visible cards work: run a kernel on each, and query what ranks on them need.

Ranks need memory, peer access, NCCL and CUDA IPC.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol, final

import torch
import torch.distributed as dist

from penstock.errors import RunError
from penstock.measure.card_ipc import sum_in_another_process
from penstock.transport.devices.device_assignment import Card
from penstock.transport.devices.device_discovery import visible_cards
from penstock.units import format_bytes

#: Rows and columns of the matrices that a card multiplies: sums of this many ones are exact in
#: every dtype of a matmul.
_SIDE: Final = 64

#: What torch raises when a driver or a kernel fails.
_FAILURES: Final = (RuntimeError, AssertionError, OSError)


class CardDriver(Protocol):
    """Queries to the cards of this process.

    Each may raise RuntimeError, AssertionError or OSError.
    """

    def cards(self) -> tuple[str, tuple[Card, ...]]:
        """Return the device type of the visible cards in torch's notation, and the cards.

        The type is empty if there are none.
        """
        ...

    def compute(self, index: int) -> None:
        """Run a small kernel and wait for it."""
        ...

    def memory(self, index: int) -> tuple[int, int]:
        """Return the free and the total bytes of the card."""
        ...

    def has_peer_access(self, index: int, other: int) -> bool:
        """Return whether a card can read the memory of another directly, not through the host."""
        ...

    def share_memory(self, index: int) -> None:
        """Read a tensor of the card in another process (CUDA IPC)."""
        ...

    def nccl_version(self) -> str:
        """Return the version, such as "2.28.9"; empty without NCCL."""
        ...


@final
class TorchDriver:
    """A `CardDriver` that queries torch."""

    def cards(self) -> tuple[str, tuple[Card, ...]]:
        """See `CardDriver.cards`."""
        return visible_cards()

    def compute(self, index: int) -> None:
        """See `CardDriver.compute`.

        Raises:
            RunError: the result is wrong.
        """
        device = _device(index)
        ones = torch.ones(_SIDE, _SIDE, device=device)
        total = (ones @ ones).sum()
        # Kernels run asynchronously: an error of this one would appear in a later call.
        torch.accelerator.synchronize(device)
        if total.item() != _SIDE**3:
            raise RunError(f"a product of matrices sums to {total.item():g} instead of {_SIDE**3}")

    def memory(self, index: int) -> tuple[int, int]:
        """See `CardDriver.memory`."""
        device = _device(index)
        if device.type == "cuda":
            return torch.cuda.mem_get_info(device)
        return torch.accelerator.get_memory_info(device)

    def has_peer_access(self, index: int, other: int) -> bool:
        """See `CardDriver.has_peer_access`."""
        return _device(index).type == "cuda" and torch.cuda.can_device_access_peer(index, other)

    def share_memory(self, index: int) -> None:
        """See `CardDriver.share_memory`.

        Raises:
            RunError: the other process reads something else.
        """
        device = _device(index)
        if device.type != "cuda":
            raise RunError(f"{device.type} has no CUDA IPC")
        storage = torch.ones(_SIDE, device=device).untyped_storage()
        # Numbers and bytes, which the other process gets as text: it needs nothing else of this one.
        handle = storage._share_cuda_()  # type: ignore[no-untyped-call]
        total = sum_in_another_process("_new_shared_cuda", handle)
        if total != _SIDE:
            raise RunError(f"another process reads a sum of {total:g} instead of {_SIDE}")

    def nccl_version(self) -> str:
        """See `CardDriver.nccl_version`."""
        if not (dist.is_nccl_available() and torch.cuda.is_available()):
            return ""
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        return ".".join(map(str, version))


@dataclass(frozen=True)
class CardReport:
    """The results of one card.

    Attributes:
        device: in torch's notation.
        name, uuid, mig: see `Card`.
        kernel: "works", or the error of a small kernel.
        free_bytes, total_bytes: of its memory; None if unavailable.
        peers: indices of the cards whose memory it reads directly.
        ipc: "works" if another process reads memory of the card, or the error.
    """

    device: str
    name: str
    uuid: str
    mig: bool
    kernel: str
    free_bytes: int | None
    total_bytes: int | None
    peers: tuple[int, ...]
    ipc: str

    @property
    def sound(self) -> bool:
        """Whether it computes correctly."""
        return self.kernel == "works"

    def __str__(self) -> str:
        """Return one line for people."""
        peers = ", ".join(map(str, self.peers)) or "none"
        memory = "memory unknown"
        if self.free_bytes is not None and self.total_bytes is not None:
            memory = f"{format_bytes(self.free_bytes)} free of {format_bytes(self.total_bytes)}"
        parts = (
            self.name,
            f"UUID {self.uuid}" if self.uuid else "",
            "a slice (MIG)" if self.mig else "",
            memory,
            f"kernel: {self.kernel}",
            f"peers: {peers}",
            f"CUDA IPC: {self.ipc}",
        )
        return "; ".join(filter(None, parts))


@dataclass(frozen=True)
class CardsReport:
    """The results of all cards of this process.

    Attributes:
        cards: by index.
        nccl: its version; empty without it.
        problem: why the cards could not be listed; empty if they could.
    """

    cards: tuple[CardReport, ...]
    nccl: str
    problem: str = ""

    @property
    def sound(self) -> bool:
        """Whether all cards compute correctly; true without any."""
        return not self.problem and all(card.sound for card in self.cards)


def check_cards(driver: CardDriver) -> CardsReport:
    """Run a kernel on every visible card and query what ranks need.

    Failures are part of the report; nothing is raised.
    """
    try:
        kind, cards = driver.cards()
        nccl = driver.nccl_version()
    except _FAILURES as error:
        return CardsReport((), "", _text(error))
    return CardsReport(tuple(_check_card(driver, kind, card, len(cards)) for card in cards), nccl)


def _check_card(driver: CardDriver, kind: str, card: Card, count: int) -> CardReport:
    """Return the report on one card: its driver, memory, peers and messages between processes."""
    return CardReport(
        f"{kind}:{card.index}",
        card.name,
        card.uuid,
        card.mig,
        _kernel(driver, card.index),
        *_memory(driver, card.index),
        _peers(driver, card.index, count),
        _ipc(driver, card.index),
    )


def _kernel(driver: CardDriver, index: int) -> str:
    """Return "works", or the error of a small kernel."""
    try:
        driver.compute(index)
    except _FAILURES as error:
        return f"fails: {_text(error)}"
    return "works"


def _memory(driver: CardDriver, index: int) -> tuple[int | None, int | None]:
    """Return free and total bytes, or None if unavailable."""
    try:
        return driver.memory(index)
    except _FAILURES:
        return None, None


def _peers(driver: CardDriver, index: int, count: int) -> tuple[int, ...]:
    """Return the cards whose memory this one reads directly; a failing query counts as no."""
    peers = []
    for other in range(count):
        try:
            if other != index and driver.has_peer_access(index, other):
                peers.append(other)
        except _FAILURES:
            continue
    return tuple(peers)


def _ipc(driver: CardDriver, index: int) -> str:
    """Return "works", or the error of another process that reads memory of the card."""
    try:
        driver.share_memory(index)
    except _FAILURES as error:
        return f"fails: {_text(error)}"
    return "works"


def _text(error: BaseException) -> str:
    """Return an error's first line; further lines of CUDA's errors are advice for debugging."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def _device(index: int) -> torch.device:
    """Return a card of the accelerator that torch uses."""
    accelerator = torch.accelerator.current_accelerator()
    return torch.device("cuda" if accelerator is None else accelerator.type, index)
