"""Devices of random ranks against a slow reference; tests/devices/test_assignment.py has a table of the
ways in which programs are started.
"""

from __future__ import annotations

import random

import pytest

from penstock.errors import SettingError
from penstock.transport.devices.device_assignment import (
    VARIABLES,
    Card,
    RankFacts,
    _number,
    assign_devices,
    assign_local_device,
)


def listed(ranks):
    """Ranks as messages list them."""
    return f"rank{'s' if len(ranks) != 1 else ''} " + ", ".join(str(rank) for rank in ranks)


def visible(facts):
    """The cards of a rank as messages count them."""
    count = len(facts.cards)
    return f"{count} {facts.accelerator} card{'' if count == 1 else 's'} visible"


def refusal(facts):
    """Why a rank cannot have what it requests; None if it can."""
    if facts.requested is not None and facts.requested.split(":")[0] == "cpu":
        return None
    if facts.problem:
        return (
            f"torch cannot list the accelerators: {facts.problem}. Repair the driver, or compute on "
            "the CPU with device='cpu'"
        )
    if facts.requested is None:
        return None
    kind, *index = facts.requested.split(":")
    count = len(facts.cards) if facts.accelerator == kind else 0
    if count == 0:
        return f"device='{facts.requested}' is requested, and no {kind} device is visible"
    if index and int(index[0]) >= count:
        shown = "1 K card is visible, index 0" if count == 1 else f"{count} K cards are visible, "
        shown += "" if count == 1 else f"index 0 to {count - 1}"
        return f"device='{facts.requested}' is requested, and {shown.replace('K', kind)}"
    return None


def position(ranks, rank):
    """The place of a rank on its host and where it is known from, or the text of a refusal."""
    values = dict(ranks[rank].environment)
    sources = ["LOCAL_RANK"]
    if values.get("SLURM_PROCID") == str(rank):
        sources.append("SLURM_LOCALID")
    for name in sources:
        if name in values:
            if values[name] not in [str(number) for number in range(100)]:
                return (
                    f"{name}={values[name]!r} is not the number of a rank on its host: 0, 1, 2, …"
                )
            return int(values[name]), name
    count = 0
    for earlier in range(rank):
        same_name = ranks[earlier].hostname == ranks[rank].hostname
        count += same_name and ranks[earlier].host == ranks[rank].host
    return count, "place among the ranks of its host"


def choice(ranks, rank):
    """Device, reason and card of a rank, or the text of a refusal."""
    facts = ranks[rank]
    if text := refusal(facts):
        return text
    asked = facts.requested
    if asked is not None and asked.startswith("cpu"):
        suffix = f", with {visible(facts)}" if facts.cards else ""
        return asked, f"as device={asked!r} asks{suffix}", None
    if asked is not None and ":" in asked:
        return asked, f"as device={asked!r} asks", facts.cards[int(asked.split(":")[1])]
    if not facts.cards:
        return "cpu", "no accelerator is visible", None
    if asked is None and facts.accelerator != "cuda":
        unused = f"{visible(facts)}, which device='{facts.accelerator}' would use"
        return "cpu", unused, None
    place = position(ranks, rank)
    if isinstance(place, str):
        return place
    number, source = place
    count = len(facts.cards)
    modulo = f" modulo {count}" if number >= count else ""
    reason = f"by {source} {number}{modulo}, of {visible(facts)}"
    card = facts.cards[number % count]
    return f"{facts.accelerator}:{card.index}", reason, card


def shares(ranks, choices, one, other):
    """Whether two ranks have one card, or may have."""
    first, second = choices[one][2], choices[other][2]
    if one == other or first is None or second is None:
        return False
    if first.uuid or second.uuid:
        return first.uuid == second.uuid
    visible_to = [
        dict(ranks[rank].environment).get("CUDA_VISIBLE_DEVICES") for rank in (one, other)
    ]
    return (
        (visible_to[0] or "") == (visible_to[1] or "")
        and ranks[one].hostname == ranks[other].hostname
        and ranks[one].host == ranks[other].host
        and choices[one][0] == choices[other][0]
    )


def transport_of(ranks, choices, sharers):
    """The transport and its reason."""
    everyone = range(len(ranks))
    if len(ranks) == 1:
        return "host memory", "no other rank"
    kind = choices[0][0].split(":")[0]
    if kind == "cpu":
        return "host memory", "messages through host memory"
    if kind != "cuda":
        return "host memory", "messages through host memory: NCCL serves CUDA devices alone"
    obstacles = {
        "torch has no NCCL on": [rank for rank in everyone if not ranks[rank].nccl],
        "NCCL does not serve MIG slices, which are the devices of": [
            rank for rank in everyone if choices[rank][2].mig
        ],
        "no UUID identifies the cards of": [
            rank for rank in everyone if choices[rank][2].uuid == ""
        ],
        "cards are shared by": [rank for rank in everyone if sharers[rank]],
    }
    for text, numbers in obstacles.items():
        if numbers:
            return "host memory", f"messages through host memory: {text} {listed(numbers)}"
    return "nccl", "messages by NCCL: every rank has a card that no other rank has"


def reference(ranks):
    """By rank device, transport, sharers, line and completeness; or parts of the refusal's text."""
    choices = [choice(ranks, rank) for rank in range(len(ranks))]
    refused = {}
    for rank, chosen in enumerate(choices):
        if isinstance(chosen, str):
            refused.setdefault((ranks[rank].hostname, chosen), []).append(rank)
    if refused:
        return [f"{listed(who)} on {host}: {text}" for (host, text), who in refused.items()]
    kinds = [device.split(":")[0] for device, _, _ in choices]
    if len(set(kinds)) > 1:
        groups = {}
        for rank, (facts, (_, why, card)) in enumerate(zip(ranks, choices, strict=True)):
            reason = why if card is None else "a card is visible"
            if facts.requested is not None:
                reason = f"device='{facts.requested}'"
            groups.setdefault((facts.hostname, kinds[rank], reason), []).append(rank)
        return ["these would not: "] + [
            f"{listed(who)} on {host} on {kind} ({reason})"
            for (host, kind, reason), who in groups.items()
        ]
    everyone = range(len(ranks))
    sharers = [
        tuple(other for other in everyone if shares(ranks, choices, rank, other))
        for rank in everyone
    ]
    transport, why = transport_of(ranks, choices, sharers)
    result = []
    for rank, (device, reason, card) in enumerate(choices):
        details = [] if card is None else [text for text in (card.name, card.uuid) if text]
        shown = f"{device} ({', '.join(details)})" if details else device
        shared = f"; shared with {listed(sharers[rank])}" if sharers[rank] else ""
        line = f"rank {rank} computes on {shown}, {reason}{shared}; {why}"
        unused = device == "cpu" and ranks[rank].requested is None and len(ranks[rank].cards) > 0
        result.append((device, transport, sharers[rank], line, not unused))
    return result


def random_ranks(choose):
    """One to five ranks of one or two hosts, which mostly can have what they request."""
    kind = choose.choice(["cuda", "cuda", "cuda", "xpu"])
    requests = choose.choice(
        [[None], [kind], [None, kind], ["cpu"], [None, "cuda:1", "cpu:0"], ["cuda:0", "cuda:2"]]
    )
    uuids, many = choose.random() < 0.8, choose.random() < 0.7
    ranks = []
    for rank in range(choose.randint(1, 5)):
        host = choose.choice("ab")
        count = choose.randint(2, 3) if many else choose.randint(0, 2)
        order = choose.sample(range(3), 3)
        cards = tuple(
            Card(
                index,
                choose.choice(["", "H100", "A100"]),
                f"{host}{order[index]}" if uuids or choose.random() < 0.5 else "",
                mig=choose.random() < 0.05,
            )
            for index in range(count)
        )
        values = {
            "LOCAL_RANK": str(choose.randint(0, 3)),
            "SLURM_LOCALID": str(choose.randint(0, 3)),
        }
        values["SLURM_PROCID"] = str(choose.choice([rank, rank, 0]))
        values["CUDA_VISIBLE_DEVICES"] = choose.choice(["", "0,1", "1,0"])
        environment = {name: value for name, value in values.items() if choose.random() < 0.5}
        if choose.random() < 0.03:
            environment["LOCAL_RANK"] = choose.choice(["-1", "first", "", "²"])
        ranks.append(
            RankFacts(
                hostname=choose.choice([host, "worker"]),
                host=choose.choice([host, host, ""]),
                environment=tuple(environment.items()),
                accelerator=kind if cards else "",
                cards=cards,
                requested=choose.choice(requests),
                nccl=choose.random() < 0.95,
                problem="no driver" if choose.random() < 0.03 else "",
            )
        )
    return ranks


@pytest.mark.parametrize("seed", range(20))
def test_devices_transport_and_reasons_are_those_of_a_slow_reference(seed):
    """Every word of the lines and of the refusals, for unlike ranks."""
    choose = random.Random(seed)
    for _ in range(50):
        ranks = random_ranks(choose)
        expected = reference(ranks)
        if isinstance(expected[0], str):
            with pytest.raises(SettingError) as raised:
                assign_devices(ranks)
            text = str(raised.value)
            if "these would not" not in text:
                assert text == "; ".join(expected)
            places = [text.index(part) for part in expected]
            assert places == sorted(places)
        else:
            assert [
                (one.device, one.transport, one.sharers, one.line, one.complete)
                for one in assign_devices(ranks)
            ] == expected


def test_in_one_process_the_current_card_is_taken_with_its_reason():
    """Its index is torch's, and not its place in the list."""
    cards = (Card(4, "A", "u4"), Card(6, "B", "u6"))
    facts = RankFacts("h", accelerator="cuda", cards=cards)
    assignment = assign_local_device(facts, 1)
    assert assignment.device == "cuda:6"
    assert assignment.line == (
        "computes on cuda:6 (B, u6), the current device, of 2 cuda cards visible"
    )
    assert (assignment.transport, assignment.sharers) == ("host memory", ())
    unused = assign_local_device(RankFacts("h", accelerator="xpu", cards=cards), 0)
    assert (unused.device, unused.complete) == ("cpu", False)


@pytest.mark.parametrize("text", ["", "-1", "1.0", " 1", "1 ", "²", "\u0661", "0x1"])
def test_only_digits_are_a_number(text):
    """`int` would take some of them."""
    with pytest.raises(SettingError, match=r"^X='.*' is not the number of a rank"):
        _number({"X": text}, "X")
    assert _number({"X": "007"}, "X") == 7


def test_the_variables_that_ranks_exchange_are_those_that_decide():
    """A variable that is left out is not seen by the others, who would come to another result."""
    assert {"LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID", "CUDA_VISIBLE_DEVICES"} <= set(VARIABLES)
