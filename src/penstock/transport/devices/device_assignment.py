"""Assign every rank its device, and choose the transport, as a function of all ranks' facts alone.

The ranks gather their facts, and each evaluates `assign_devices` on the same list: so all reach the
same result, or all raise the same error. The rules, in order:

    device="cpu"        the CPU
    device="cuda:1"     that card; refused if it is not visible
    device="cuda"       a visible card, by the local rank modulo the number of visible cards;
                        refused if none is visible
    device=None         the same where a card of `AUTOMATIC` is visible, else the CPU
    types               all ranks compute on one type of device; refused otherwise, since types
                        round differently
    transport           NCCL if every rank has a physical card of its own, identified by UUID; else
                        host memory

The local rank is LOCAL_RANK (torchrun, `penstock.launch`), else SLURM_LOCALID where Slurm started
the rank itself, else the place of the rank among the ranks of its host. NCCL refuses two ranks on
one card ("Duplicate GPU detected") and does not serve slices of a card (MIG), so these exchange
messages through host memory. An index does not identify a card: under Slurm every task may see a
single card as index 0, and CUDA_VISIBLE_DEVICES permutes indices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from penstock.errors import SettingError
from penstock.units import format_count, format_ranks

TransportName = Literal["nccl", "host memory"]

#: Types of accelerators that are chosen where no device is requested. Others are used where
#: `device=` names them: clocks and random states are implemented for CUDA (and ROCm, which torch
#: calls "cuda").
AUTOMATIC: Final = ("cuda",)

#: Environment variables that give a rank's position, or change which devices it sees.
VARIABLES: Final = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "CUDA_VISIBLE_DEVICES",
)


@dataclass(frozen=True)
class Card:
    """An accelerator as one rank sees it.

    Attributes:
        index: torch's index of it in that process.
        name: its model, such as "NVIDIA H100 80GB HBM3".
        uuid: of the card, or of the slice; empty if the driver reports none.
        mig: whether it is a slice of a card (Multi-Instance GPU).
    """

    index: int
    name: str = ""
    uuid: str = ""
    mig: bool = False


@dataclass(frozen=True)
class RankFacts:
    """What a rank knows about its devices.

    Attributes:
        hostname: of its host or container.
        host: identifier of the running kernel; containers of one machine share it, two machines of
            one name do not.
        environment: those of `VARIABLES` that are set, with their values.
        accelerator: torch's type of the visible cards, such as "cuda"; empty if torch supports none
            here.
        cards: the visible ones, by index.
        requested: the `device=` of the caller, such as "cuda:1"; None if there is none.
        nccl: whether torch has NCCL here.
        problem: what torch raised when it listed the cards; empty if nothing.
    """

    hostname: str
    host: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    accelerator: str = ""
    cards: tuple[Card, ...] = ()
    requested: str | None = None
    nccl: bool = False
    problem: str = ""


@dataclass(frozen=True)
class Assignment:
    """Device and transport of a rank.

    Attributes:
        device: as torch writes it, with its index, such as "cuda:1".
        transport: of messages between ranks; the same for all ranks.
        sharers: the other ranks on the same card.
        line: device, transport and their reasons in one line for the log.
        complete: False if a visible accelerator was left unused because `device=` did not request
            it.
    """

    device: str
    transport: TransportName
    sharers: tuple[int, ...]
    line: str
    complete: bool = True


@dataclass(frozen=True)
class _Choice:
    """The device of one rank, before the transport is known."""

    device: str
    reason: str
    card: Card | None = None

    @property
    def type(self) -> str:
        """The part of the device in front of its index."""
        return self.device.partition(":")[0]


def assign_devices(ranks: Sequence[RankFacts]) -> tuple[Assignment, ...]:
    """Assign every rank its device and choose the transport between them.

    Args:
        ranks: the facts of all ranks, by rank.

    Returns:
        One assignment for each rank, by rank.

    Raises:
        SettingError: a requested device is not visible, an environment variable is no number, torch
            could not list the cards of a rank, or ranks would compute on different types of
            devices. The message names the ranks.
    """
    choices = _choose(ranks)
    _check_types(ranks, choices)
    sharers = _sharers(ranks, choices)
    transport, reason = _transport(ranks, choices, sharers)
    assignments = []
    for rank, choice in enumerate(choices):
        line = _line(rank, choice, sharers[rank], reason)
        complete = _is_complete(ranks[rank], choice)
        assignments.append(Assignment(choice.device, transport, sharers[rank], line, complete))
    return tuple(assignments)


def assign_local_device(facts: RankFacts, current: int) -> Assignment:
    """Assign the device of a process that computes on one device alone: of ranks as threads, or of
    a measurement.

    Args:
        facts: of this process.
        current: index of the calling thread's current card, which "cuda" without an index means, as
            everywhere in torch.

    Raises:
        SettingError: the requested device is not visible.
    """
    choice = _choice_without_position(facts)
    if choice is None:
        card = facts.cards[current]
        reason = f"the current device, of {_visible(facts)}"
        choice = _Choice(f"{facts.accelerator}:{card.index}", reason, card)
    complete = _is_complete(facts, choice)
    return Assignment(
        choice.device, "host memory", (), f"computes on {_location(choice)}", complete
    )


def _choose(ranks: Sequence[RankFacts]) -> list[_Choice]:
    """Choose the device of every rank, each by its own facts.

    Raises:
        SettingError: some ranks cannot have the devices that they request; the message names them
            all.
    """
    choices: list[_Choice] = []
    refusals: dict[str, list[int]] = {}
    for rank, facts in enumerate(ranks):
        try:
            choices.append(_choice(ranks, rank))
        except SettingError as error:
            refusals.setdefault(f"on {facts.hostname}: {error}", []).append(rank)
    if refusals:
        lines = [f"{format_ranks(numbers)} {text}" for text, numbers in refusals.items()]
        raise SettingError("; ".join(lines))
    return choices


def _choice(ranks: Sequence[RankFacts], rank: int) -> _Choice:
    """Choose the device of one rank. Raises as `_choose`."""
    facts = ranks[rank]
    choice = _choice_without_position(facts)
    if choice is not None:
        return choice
    local, source = _local_rank(ranks, rank)
    count = len(facts.cards)
    card = facts.cards[local % count]
    rule = f"{source} {local}" + (f" modulo {count}" if local >= count else "")
    reason = f"by {rule}, of {_visible(facts)}"
    return _Choice(f"{facts.accelerator}:{card.index}", reason, card)


def _choice_without_position(facts: RankFacts) -> _Choice | None:
    """Choose the device of a process where its position among the ranks does not matter: the CPU,
    or a card that is requested by its index.

    Returns:
        None if the process may choose between the visible cards.

    Raises:
        SettingError: the requested device is not visible.
    """
    refusal = _refusal(facts)
    if refusal:
        raise SettingError(refusal)
    kind, index = _split(facts.requested)
    requested = f"as device={facts.requested!r} asks"
    if kind == "cpu":
        reason = f"{requested}, with {_visible(facts)}" if facts.cards else requested
        return _Choice(str(facts.requested), reason)
    if index is not None:
        return _Choice(f"{kind}:{index}", requested, facts.cards[index])
    if not facts.cards:
        return _Choice("cpu", "no accelerator is visible")
    if kind is None and facts.accelerator not in AUTOMATIC:
        reason = f"{_visible(facts)}, which device='{facts.accelerator}' would use"
        return _Choice("cpu", reason)
    return None


def _visible(facts: RankFacts) -> str:
    """Return the number of visible cards as text."""
    return f"{format_count(len(facts.cards), f'{facts.accelerator} card')} visible"


def _is_complete(facts: RankFacts, choice: _Choice) -> bool:
    """Whether no visible accelerator is left unused without a request; see `Assignment`."""
    return choice.type != "cpu" or facts.requested is not None or not facts.cards


def _refusal(facts: RankFacts) -> str:
    """Return why a process cannot have the device that it requests; empty if it can."""
    kind, index = _split(facts.requested)
    if kind == "cpu":
        return ""
    if facts.problem:
        return (
            f"torch cannot list the accelerators: {facts.problem}. Repair the driver, or compute "
            "on the CPU with device='cpu'"
        )
    if kind is None:
        return ""
    count = len(facts.cards) if kind == facts.accelerator else 0
    if not count:
        return f"device={facts.requested!r} is requested, and no {kind} device is visible"
    if index is not None and index >= count:
        last = f"0 to {count - 1}" if count > 1 else "0"
        return (
            f"device={facts.requested!r} is requested, and {count} {kind} "
            f"card{'s are' if count > 1 else ' is'} visible, index {last}"
        )
    return ""


def _split(requested: str | None) -> tuple[str | None, int | None]:
    """Split a requested device into type and index."""
    if requested is None:
        return None, None
    kind, _, index = requested.partition(":")
    return kind, int(index) if index else None


def _local_rank(ranks: Sequence[RankFacts], rank: int) -> tuple[int, str]:
    """Return the number of a rank on its host, and its source.

    SLURM_LOCALID counts only if SLURM_PROCID is the rank: all processes that one Slurm task has
    started inherit its number.

    Raises:
        SettingError: a variable is no number.
    """
    facts = ranks[rank]
    environment = dict(facts.environment)
    if "LOCAL_RANK" in environment:
        return _number(environment, "LOCAL_RANK"), "LOCAL_RANK"
    if "SLURM_LOCALID" in environment and environment.get("SLURM_PROCID") == str(rank):
        return _number(environment, "SLURM_LOCALID"), "SLURM_LOCALID"
    host = (facts.hostname, facts.host)
    earlier = [peer for peer in ranks[:rank] if (peer.hostname, peer.host) == host]
    return len(earlier), "place among the ranks of its host"


def _number(environment: Mapping[str, str], name: str) -> int:
    """Return the value of a variable. Raises SettingError unless it is a whole number of 0 or
    more.
    """
    text = environment[name]
    if not (text.isascii() and text.isdigit()):
        raise SettingError(f"{name}={text!r} is not the number of a rank on its host: 0, 1, 2, …")
    return int(text)


def _check_types(ranks: Sequence[RankFacts], choices: Sequence[_Choice]) -> None:
    """Refuse ranks on different types of devices.

    Raises:
        SettingError: the types differ; the message lists the ranks by type, host and reason.
    """
    if len({choice.type for choice in choices}) == 1:
        return
    groups: dict[tuple[str, str, str], list[int]] = {}
    for rank, (facts, choice) in enumerate(zip(ranks, choices, strict=True)):
        reason = "a card is visible" if choice.card is not None else choice.reason
        if facts.requested is not None:
            reason = f"device={facts.requested!r}"
        groups.setdefault((choice.type, facts.hostname, reason), []).append(rank)
    parts = [
        f"{format_ranks(numbers)} on {hostname} on {kind} ({reason})"
        for (kind, hostname, reason), numbers in groups.items()
    ]
    raise SettingError(
        "all ranks of a run compute on one type of device, and these would not: "
        f"{'; '.join(parts)}. Give every rank the same device=, or make cards visible to all of "
        "them"
    )


def _sharers(ranks: Sequence[RankFacts], choices: Sequence[_Choice]) -> list[tuple[int, ...]]:
    """Return for every rank the other ranks on its card."""
    users: dict[tuple[str, ...], list[int]] = {}
    keys = [_key(facts, choice) for facts, choice in zip(ranks, choices, strict=True)]
    for rank, key in enumerate(keys):
        users.setdefault(key, []).append(rank)
    sharers = []
    for rank, (key, choice) in enumerate(zip(keys, choices, strict=True)):
        card_sharers = tuple(user for user in users[key] if user != rank)
        sharers.append(card_sharers if choice.card is not None else ())
    return sharers


def _key(facts: RankFacts, choice: _Choice) -> tuple[str, ...]:
    """Return what identifies a rank's card. Without a UUID it is a guess, with which NCCL is never
    chosen.
    """
    if choice.card is not None and choice.card.uuid:
        return (choice.card.uuid,)
    visible = dict(facts.environment).get("CUDA_VISIBLE_DEVICES", "")
    return (facts.hostname, facts.host, visible, choice.device)


def _transport(
    ranks: Sequence[RankFacts],
    choices: Sequence[_Choice],
    sharers: Sequence[tuple[int, ...]],
) -> tuple[TransportName, str]:
    """Choose the transport. Returns it, and the reason for the log's line."""
    if len(ranks) == 1:
        return "host memory", "no other rank"
    if choices[0].type == "cpu":
        return "host memory", "messages through host memory"
    if choices[0].type != "cuda":
        return "host memory", "messages through host memory: NCCL serves CUDA devices alone"
    for rank_numbers, text in _nccl_obstacles(ranks, choices, sharers):
        if rank_numbers:
            reason = f"messages through host memory: {text} {format_ranks(rank_numbers)}"
            return "host memory", reason
    return "nccl", "messages by NCCL: every rank has a card that no other rank has"


def _nccl_obstacles(
    ranks: Sequence[RankFacts],
    choices: Sequence[_Choice],
    sharers: Sequence[tuple[int, ...]],
) -> tuple[tuple[list[int], str], ...]:
    """Return the reasons against NCCL, each with the ranks that it holds for."""
    cards = [(rank, choice.card) for rank, choice in enumerate(choices) if choice.card]
    without_nccl = [rank for rank, facts in enumerate(ranks) if not facts.nccl]
    on_slices = [rank for rank, card in cards if card.mig]
    without_uuid = [rank for rank, card in cards if not card.uuid]
    on_shared_cards = [rank for rank, others in enumerate(sharers) if others]
    return (
        (without_nccl, "torch has no NCCL on"),
        (on_slices, "NCCL does not serve MIG slices, which are the devices of"),
        (without_uuid, "no UUID identifies the cards of"),
        (on_shared_cards, "cards are shared by"),
    )


def _line(rank: int, choice: _Choice, sharers: tuple[int, ...], transport: str) -> str:
    """Return device and transport of a rank as a line for the log."""
    shared = f"; shared with {format_ranks(sharers)}" if sharers else ""
    return f"rank {rank} computes on {_location(choice)}{shared}; {transport}"


def _location(choice: _Choice) -> str:
    """Return a device, its card, and the reason for it as text."""
    card = choice.card
    details = "" if card is None else ", ".join(filter(None, (card.name, card.uuid)))
    device = f"{choice.device} ({details})" if details else choice.device
    return f"{device}, {choice.reason}"
