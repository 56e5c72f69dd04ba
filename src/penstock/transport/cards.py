"""Which device every rank computes on, and what carries messages: a pure function of the facts of
all ranks.

Every rank states its facts, all ranks get the facts of all, and each evaluates `assign_devices` on
the same list: so all come to the same result, or all raise the same error. The rules, in their
order:

    device="cpu"        the CPU
    device="cuda:1"     that card; refused if it is not visible
    device="cuda"       a visible card, by the local rank modulo the number of visible cards;
                        refused if none is visible
    device=None         the same where a card of `AUTOMATIC` is visible, else the CPU
    types               all ranks compute on one type of device; refused otherwise, since ranks
                        would differ in their numbers
    transport           NCCL where every rank has a physical card that no other rank has, told apart
                        by UUID; else host memory

The local rank is LOCAL_RANK (torchrun, `penstock.launch`), else SLURM_LOCALID where Slurm started
the rank itself, else the place of the rank among the ranks of its host. NCCL refuses two ranks on
one card ("Duplicate GPU detected") and does not serve slices of a card (MIG), so these exchange
messages through host memory. An index says nothing about which card it is: under Slurm every task
may see a single card as index 0, and CUDA_VISIBLE_DEVICES permutes indices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from penstock.errors import SettingError

TransportName = Literal["nccl", "host memory"]

#: Types of accelerators that are chosen where no device is asked for. Others are used where
#: `device=` names them: clocks and
#: random states are implemented for CUDA (and ROCm, which torch calls "cuda").
AUTOMATIC: Final = ("cuda",)

#: Environment variables that say where a rank stands, or change what it sees.
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
        uuid: of the card, or of the slice; empty where the driver gives none.
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
        host: identity of the running kernel; containers of one machine share it, two machines of
        one name do not. environment: those of `VARIABLES` that are set, with their values.
        accelerator: torch's type of the visible cards, such as "cuda"; empty if torch supports none
        here. cards: the visible ones, by index. asked: the `device=` of the caller, such as
        "cuda:1"; None if there is none. nccl: whether torch has NCCL here. problem: what torch
        raised when it was asked for the cards; empty if nothing.
    """

    hostname: str
    host: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    accelerator: str = ""
    cards: tuple[Card, ...] = ()
    asked: str | None = None
    nccl: bool = False
    problem: str = ""


@dataclass(frozen=True)
class Assignment:
    """What a rank gets.

    Attributes:
        device: as torch writes it, with its index, such as "cuda:1".
        transport: of messages between ranks; the same for all ranks.
        sharers: the other ranks on the same card.
        line: device, transport and their reasons in one line for the log.
        complete: whether no visible accelerator was left unused for want of `device=`.
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
    """The device of every rank and the transport between them.

    Args:
        ranks: the facts of all ranks, by rank.

    Returns:
        One assignment for each rank, by rank.

    Raises:
        SettingError: a device that was asked for is not visible, an environment variable is no
        number, torch could not list the
            cards of a rank, or ranks would compute on different types of devices. The message names
            the ranks.
    """
    choices = _choose(ranks)
    _check_types(ranks, choices)
    sharers = _sharers(ranks, choices)
    transport, reason = _transport(ranks, choices, sharers)
    assignments = []
    for rank, choice in enumerate(choices):
        line = _line(rank, choice, sharers[rank], reason)
        complete = choice.type != "cpu" or ranks[rank].asked is not None or not ranks[rank].cards
        assignments.append(Assignment(choice.device, transport, sharers[rank], line, complete))
    return tuple(assignments)


def choose_local_device(facts: RankFacts, current: int) -> str:
    """The device of a process that computes on one device alone: of all ranks as threads, or of a
    measurement.

    Args:
        facts: of this process.
        current: index of the calling thread's current card, which "cuda" without an index means, as
        everywhere in torch.

    Raises:
        SettingError: the device that is asked for is not visible.
    """
    refusal = _refusal(facts)
    if refusal:
        raise SettingError(refusal)
    kind, index = _split(facts.asked)
    if kind is None:
        kind = facts.accelerator if facts.cards and facts.accelerator in AUTOMATIC else "cpu"
    if kind == "cpu":
        return facts.asked or "cpu"
    return f"{kind}:{current if index is None else index}"


def join_ranks(ranks: Iterable[int]) -> str:
    """Ranks in words.

    >>> join_ranks([3]), join_ranks([0, 2])
    ('rank 3', 'ranks 0, 2')
    """
    numbers = [str(rank) for rank in ranks]
    return f"rank{'s' * (len(numbers) != 1)} {', '.join(numbers)}"


def _choose(ranks: Sequence[RankFacts]) -> list[_Choice]:
    """The device of every rank, each by its own facts.

    Raises:
        SettingError: a rank cannot have what it asks for; of all such ranks, by message.
    """
    choices: list[_Choice] = []
    refusals: dict[str, list[int]] = {}
    for rank, facts in enumerate(ranks):
        try:
            choices.append(_choice(ranks, rank))
        except SettingError as error:
            refusals.setdefault(f"on {facts.hostname}: {error}", []).append(rank)
    if refusals:
        lines = [f"{join_ranks(numbers)} {text}" for text, numbers in refusals.items()]
        raise SettingError("; ".join(lines))
    return choices


def _choice(ranks: Sequence[RankFacts], rank: int) -> _Choice:
    """The device of one rank. Raises as `_choose`."""
    facts = ranks[rank]
    refusal = _refusal(facts)
    if refusal:
        raise SettingError(refusal)
    kind, index = _split(facts.asked)
    count = len(facts.cards)
    visible = f"{count} {facts.accelerator} card{'s' * (count != 1)} visible"
    if kind == "cpu":
        reason = f"as device={facts.asked!r} asks" + (f", with {visible}" if count else "")
        return _Choice(str(facts.asked), reason)
    if index is not None:
        return _Choice(f"{kind}:{index}", f"as device={facts.asked!r} asks", facts.cards[index])
    if not count:
        return _Choice("cpu", "no accelerator is visible")
    if kind is None and facts.accelerator not in AUTOMATIC:
        name = facts.accelerator
        return _Choice("cpu", f"{visible}, which device='{name}' would use")
    local, source = _local_rank(ranks, rank)
    card = facts.cards[local % count]
    rule = f"{source} {local}" + (f" modulo {count}" if local >= count else "")
    return _Choice(f"{facts.accelerator}:{card.index}", f"by {rule}, of {visible}", card)


def _refusal(facts: RankFacts) -> str:
    """Why a process cannot have the device that it asks for; empty if it can."""
    kind, index = _split(facts.asked)
    if kind == "cpu":
        return ""
    if facts.problem:
        return (
            f"torch cannot list the accelerators: {facts.problem}. Repair the driver, or compute on the "
            "CPU with device='cpu'"
        )
    if kind is None:
        return ""
    count = len(facts.cards) if kind == facts.accelerator else 0
    if not count:
        return f"device={facts.asked!r} is asked for, and no {kind} device is visible"
    if index is not None and index >= count:
        last = f"0 to {count - 1}" if count > 1 else "0"
        return (
            f"device={facts.asked!r} is asked for, and {count} {kind} "
            f"card{'s are' if count > 1 else ' is'} visible, index {last}"
        )
    return ""


def _split(asked: str | None) -> tuple[str | None, int | None]:
    """Type and index of what the caller asked for."""
    if asked is None:
        return None, None
    kind, _, index = asked.partition(":")
    return kind, int(index) if index else None


def _local_rank(ranks: Sequence[RankFacts], rank: int) -> tuple[int, str]:
    """The number of a rank on its host, and where it comes from.

    SLURM_LOCALID counts only where SLURM_PROCID is the rank: processes that one Slurm task has
    started all inherit its number.

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
    before = [other for other in ranks[:rank] if (other.hostname, other.host) == host]
    return len(before), "place among the ranks of its host"


def _number(environment: Mapping[str, str], name: str) -> int:
    """A variable's value. Raises SettingError if it is no number of 0 or more."""
    text = environment[name]
    if not (text.isascii() and text.isdigit()):
        raise SettingError(f"{name}={text!r} is no number of a rank on its host: 0, 1, 2, …")
    return int(text)


def _check_types(ranks: Sequence[RankFacts], choices: Sequence[_Choice]) -> None:
    """Refuse ranks on different types of devices.

    Raises:
        SettingError: the ranks by type, host and reason.
    """
    if len({choice.type for choice in choices}) == 1:
        return
    groups: dict[tuple[str, str, str], list[int]] = {}
    for rank, (facts, choice) in enumerate(zip(ranks, choices, strict=True)):
        reason = "a card is visible" if choice.card is not None else choice.reason
        if facts.asked is not None:
            reason = f"device={facts.asked!r}"
        groups.setdefault((choice.type, facts.hostname, reason), []).append(rank)
    parts = [
        f"{join_ranks(numbers)} on {hostname} on {kind} ({reason})"
        for (kind, hostname, reason), numbers in groups.items()
    ]
    raise SettingError(
        f"all ranks of a run compute on one type of device, and these would not: {'; '.join(parts)}. "
        "Give every rank the same device=, or make cards visible to all of them"
    )


def _sharers(ranks: Sequence[RankFacts], choices: Sequence[_Choice]) -> list[tuple[int, ...]]:
    """For every rank the other ranks on its card."""
    users: dict[tuple[str, ...], list[int]] = {}
    keys = [_key(facts, choice) for facts, choice in zip(ranks, choices, strict=True)]
    for rank, key in enumerate(keys):
        users.setdefault(key, []).append(rank)
    sharers = []
    for rank, (key, choice) in enumerate(zip(keys, choices, strict=True)):
        others = [other for other in users[key] if other != rank]
        sharers.append(tuple(others) if choice.card is not None else ())
    return sharers


def _key(facts: RankFacts, choice: _Choice) -> tuple[str, ...]:
    """What tells a card from all others. Without a UUID it is a guess, by which NCCL is never
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
    """What carries messages, and the end of the log's line, with the reason."""
    if len(ranks) == 1:
        return "host memory", "no other rank"
    if choices[0].type == "cpu":
        return "host memory", "messages through host memory"
    if choices[0].type != "cuda":
        return "host memory", "messages through host memory: NCCL serves CUDA devices alone"
    without = [rank for rank, facts in enumerate(ranks) if not facts.nccl]
    slices = [rank for rank, choice in enumerate(choices) if choice.card and choice.card.mig]
    unnamed = [rank for rank, choice in enumerate(choices) if choice.card and not choice.card.uuid]
    shared = [rank for rank, others in enumerate(sharers) if others]
    obstacles = (
        (without, "torch has no NCCL on"),
        (slices, "NCCL does not serve MIG slices, which are the devices of"),
        (unnamed, "no UUID tells the cards apart of"),
        (shared, "cards are shared by"),
    )
    for numbers, text in obstacles:
        if numbers:
            return "host memory", f"messages through host memory: {text} {join_ranks(numbers)}"
    return "nccl", "messages by NCCL: every rank has a card that no other rank has"


def _line(rank: int, choice: _Choice, sharers: tuple[int, ...], transport: str) -> str:
    """Device and transport of a rank, in words."""
    card = choice.card
    details = "" if card is None else ", ".join(filter(None, (card.name, card.uuid)))
    device = f"{choice.device} ({details})" if details else choice.device
    shared = f"; shared with {join_ranks(sharers)}" if sharers else ""
    return f"rank {rank} computes on {device}, {choice.reason}{shared}; {transport}"
