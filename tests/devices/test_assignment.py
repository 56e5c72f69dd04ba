"""Which device and transport ranks get: a table of the ways in which programs are started, and two
laws.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from tests.devices.facts import asking, card, cards, facts, torchrun

import penstock as ps
from penstock.errors import SettingError
from penstock.ranks.processes.launch import launch
from penstock.transport.devices import device_discovery
from penstock.transport.devices.device_assignment import (
    RankFacts,
    assign_devices,
    assign_local_device,
)
from penstock.transport.devices.device_discovery import gather_assignment, is_mig, rank_facts
from penstock.transport.process_group import join


def slurm(tasks_per_host, hosts, *, visible):
    """Slurm's tasks, of which each sees cards of its own: `visible(host, local)` gives them."""
    return [
        facts(
            visible(host, local),
            host=host,
            SLURM_PROCID=number * tasks_per_host + local,
            SLURM_LOCALID=local,
        )
        for number, host in enumerate(hosts)
        for local in range(tasks_per_host)
    ]


PERMUTED = [
    facts(
        tuple(card(index, f"a-{physical}") for index, physical in enumerate(order)),
        LOCAL_RANK=local,
        CUDA_VISIBLE_DEVICES=",".join(map(str, order)),
    )
    for local, order in enumerate([(3, 1, 0, 2), (3, 1, 0, 2), (3, 1, 0, 2), (3, 1, 0, 2)])
]

#: Index 0 of rank 0 and index 1 of rank 1 are one card, although the indices differ.
PERMUTED_APART = [
    facts((card(0, "a-0"), card(1, "a-1")), LOCAL_RANK=0, CUDA_VISIBLE_DEVICES="0,1"),
    facts((card(0, "a-1"), card(1, "a-0")), LOCAL_RANK=1, CUDA_VISIBLE_DEVICES="1,0"),
]

SAME_NAME = [
    facts((card(0, uuid),), host=host, hostname="worker", LOCAL_RANK=0)
    for host, uuid in (("a", "a-0"), ("b", "b-0"))
]

NO_VARIABLES = [facts(cards(2, host=host), host=host) for host in ("a", "a", "b", "b")]

SLICES = [
    facts((card(0, f"MIG-{rank}", mig=True),), CUDA_VISIBLE_DEVICES=f"MIG-{rank}", LOCAL_RANK=rank)
    for rank in range(2)
]

NCCL, HOST = "nccl", "host memory"

#: Title, ranks, the device of each, the transport, and words of the line of the last rank.
TABLE = [
    ("torchrun on one host", torchrun("a", 2, 2), ["cuda:0", "cuda:1"], NCCL, "NCCL"),
    ("more cards than ranks", torchrun("a", 2, 8), ["cuda:0", "cuda:1"], NCCL, "8 cuda cards"),
    (
        "torchrun on two hosts",
        torchrun("ab", 2, 2),
        ["cuda:0", "cuda:1"] * 2,
        NCCL,
        "cuda:1 (NVIDIA H100 80GB HBM3, b-1), by LOCAL_RANK 1",
    ),
    (
        "Slurm, one visible card for each task",
        slurm(2, "ab", visible=lambda host, local: (card(0, f"{host}-{local}"),)),
        ["cuda:0"] * 4,
        NCCL,
        "by SLURM_LOCALID 1 modulo 1",
    ),
    (
        "Slurm, all cards visible to every task",
        slurm(2, "ab", visible=lambda host, _: cards(2, host=host)),
        ["cuda:0", "cuda:1"] * 2,
        NCCL,
        "by SLURM_LOCALID 1",
    ),
    (
        "processes that one Slurm task has started inherit its number",
        [facts(cards(2), SLURM_PROCID=0, SLURM_LOCALID=0) for _ in range(2)],
        ["cuda:0", "cuda:1"],
        NCCL,
        "by place among the ranks of its host 1",
    ),
    (
        "permuted CUDA_VISIBLE_DEVICES",
        PERMUTED,
        ["cuda:0", "cuda:1", "cuda:2", "cuda:3"],
        NCCL,
        "a-2",
    ),
    (
        "permutations that differ, so that two indices are one card",
        PERMUTED_APART,
        ["cuda:0", "cuda:1"],
        HOST,
        "shared with rank 0",
    ),
    ("two hosts with one hostname", SAME_NAME, ["cuda:0", "cuda:0"], NCCL, "b-0"),
    (
        "fewer cards than ranks",
        torchrun("a", 4, 1),
        ["cuda:0"] * 4,
        HOST,
        "by LOCAL_RANK 3 modulo 1, of 1 cuda card visible; shared with ranks 0, 1, 2",
    ),
    (
        "fewer cards than ranks on one of two hosts",
        [*torchrun("ab", 2, 2)[:2], *torchrun("ab", 2, 1)[2:]],
        ["cuda:0", "cuda:1", "cuda:0", "cuda:0"],
        HOST,
        "cards are shared by ranks 2, 3",
    ),
    (
        "no environment variables",
        NO_VARIABLES,
        ["cuda:0", "cuda:1"] * 2,
        NCCL,
        "by place among the ranks of its host 1",
    ),
    ("MIG slices", SLICES, ["cuda:0", "cuda:0"], HOST, "NCCL does not serve MIG slices"),
    (
        "requested for the CPU while cards are visible",
        torchrun("a", 2, 2, requested="cpu"),
        ["cpu", "cpu"],
        HOST,
        "as device='cpu' asks, with 2 cuda cards visible",
    ),
    ("no card", torchrun("ab", 1, 0), ["cpu", "cpu"], HOST, "no accelerator is visible"),
    (
        "cuda requested",
        torchrun("a", 2, 2, requested="cuda"),
        ["cuda:0", "cuda:1"],
        NCCL,
        "by LOCAL",
    ),
    (
        "some ask for cuda and some for nothing",
        asking(torchrun("a", 2, 2), None, "cuda"),
        ["cuda:0", "cuda:1"],
        NCCL,
        "LOCAL_RANK 1",
    ),
    (
        "indices that are requested for",
        asking(torchrun("a", 2, 2), "cuda:1", "cuda:0"),
        ["cuda:1", "cuda:0"],
        NCCL,
        "as device='cuda:0' asks",
    ),
    (
        "one index for all",
        torchrun("a", 2, 2, requested="cuda:1"),
        ["cuda:1", "cuda:1"],
        HOST,
        "shared with rank 0",
    ),
    (
        "no UUIDs",
        [facts((card(0, ""), card(1, "")), LOCAL_RANK=local) for local in range(2)],
        ["cuda:0", "cuda:1"],
        HOST,
        "no UUID identifies the cards of ranks 0, 1",
    ),
    (
        "no NCCL on one rank",
        [torchrun("a", 2, 2)[0], replace(torchrun("a", 2, 2)[1], nccl=False)],
        ["cuda:0", "cuda:1"],
        HOST,
        "torch has no NCCL on rank 1",
    ),
    ("one rank", torchrun("a", 1, 2), ["cuda:0"], HOST, "no other rank"),
    (
        "another accelerator, requested",
        [replace(rank, accelerator="xpu", requested="xpu") for rank in torchrun("a", 2, 2)],
        ["xpu:0", "xpu:1"],
        HOST,
        "NCCL serves CUDA devices alone",
    ),
    (
        "another accelerator, not requested for",
        [replace(rank, accelerator="xpu") for rank in torchrun("a", 2, 2)],
        ["cpu", "cpu"],
        HOST,
        "2 xpu cards visible, which device='xpu' would use",
    ),
]


@pytest.mark.parametrize(
    ("ranks", "devices", "transport", "words"),
    [row[1:] for row in TABLE],
    ids=[row[0] for row in TABLE],
)
def test_n10_ranks_get_their_devices_and_one_transport(ranks, devices, transport, words):
    """Each row is a way of starting ranks that a rule by index, hostname or LOCAL_WORLD_SIZE takes
    for another.
    """
    assignments = assign_devices(ranks)
    assert [assignment.device for assignment in assignments] == devices
    assert {assignment.transport for assignment in assignments} == {transport}
    assert words in assignments[-1].line
    for rank, assignment in enumerate(assignments):
        assert assignment.line.startswith(f"rank {rank} computes on {assignment.device}")
        assert "\n" not in assignment.line


def test_an_accelerator_left_unused_without_a_word_of_the_caller_is_marked():
    """That line is a warning; where the caller asks for the CPU, or nothing else is there, it is
    not.
    """
    cuda = torchrun("a", 2, 2)
    other = [replace(rank, accelerator="xpu") for rank in cuda]
    assert not any(assignment.complete for assignment in assign_devices(other))
    for ranks in (cuda, asking(cuda, "cpu", "cpu"), torchrun("a", 2, 0)):
        assert all(assignment.complete for assignment in assign_devices(ranks))


#: Title, ranks, and what the refusal says.
REFUSED = [
    (
        "index out of range",
        torchrun("a", 2, 2, requested="cuda:2"),
        "ranks 0, 1 on a: device='cuda:2' is requested, and 2 cuda cards are visible, index 0 to 1",
    ),
    (
        "index of the host under Slurm, where a task sees one card",
        [facts((card(0, f"a-{rank}"),), requested=f"cuda:{rank}") for rank in range(2)],
        "rank 1 on a: device='cuda:1' is requested, and 1 cuda card is visible, index 0",
    ),
    (
        "cuda without a card",
        torchrun("ab", 1, 0, requested="cuda"),
        "rank 0 on a: device='cuda' is requested, and no cuda device is visible; rank 1 on b",
    ),
    (
        "a type that is not this machine's",
        torchrun("a", 1, 2, requested="xpu"),
        "no xpu device is visible",
    ),
    (
        "the CPU on one rank and cuda on the other",
        asking(torchrun("a", 2, 2), "cpu", "cuda"),
        r"rank 0 on a on cpu \(device='cpu'\); rank 1 on a on cuda \(device='cuda'\)",
    ),
    (
        "cards on one of two hosts",
        [*torchrun("ab", 2, 2)[:2], *torchrun("ab", 2, 0)[2:]],
        r"ranks 0, 1 on a on cuda \(a card is visible\); ranks 2, 3 on b on cpu \(no accelerator",
    ),
    ("a variable that is no number", [facts(cards(2), LOCAL_RANK="first")], "LOCAL_RANK='first'"),
    (
        "a driver that fails",
        [replace(facts(), problem="RuntimeError: CUDA driver error")],
        "torch cannot list the accelerators: RuntimeError: CUDA driver error",
    ),
]


@pytest.mark.parametrize(
    ("ranks", "message"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_what_ranks_cannot_have_is_refused_by_rank_and_host(ranks, message):
    """All ranks raise the same, so that none waits for another."""
    with pytest.raises(SettingError, match=message):
        assign_devices(ranks)


def test_a_failing_driver_does_not_stop_who_asks_for_the_cpu():
    """The message says so."""
    ranks = [replace(facts(requested="cpu"), problem="RuntimeError: CUDA driver error")]
    assert assign_devices(ranks)[0].device == "cpu"


UUIDS = st.sampled_from(["", "u0", "u1", "u2", "u3"])
CARDS = st.lists(st.tuples(UUIDS, st.booleans()), max_size=3).map(
    lambda card_facts: tuple(
        card(index, uuid, mig=mig) for index, (uuid, mig) in enumerate(card_facts)
    )
)
FACTS = st.builds(
    RankFacts,
    hostname=st.sampled_from("ab"),
    host=st.sampled_from(["", "x", "y"]),
    environment=st.dictionaries(
        st.sampled_from(["LOCAL_RANK", "SLURM_LOCALID", "SLURM_PROCID", "CUDA_VISIBLE_DEVICES"]),
        st.sampled_from(["0", "1", "2", "5", "-1"]),
    ).map(lambda variables: tuple(variables.items())),
    accelerator=st.just("cuda"),
    cards=CARDS,
    requested=st.sampled_from([None, None, None, "cuda", "cuda", "cuda:0", "cuda:1", "cpu"]),
    nccl=st.sampled_from([True, True, True, False]),
)
#: Ranks of which each sees one to three cards with UUIDs: those that mostly are not refused.
SOUND = st.builds(
    RankFacts,
    hostname=st.sampled_from("ab"),
    environment=st.sampled_from([(), (("LOCAL_RANK", "0"),), (("LOCAL_RANK", "1"),)]),
    accelerator=st.just("cuda"),
    cards=st.lists(
        st.sampled_from(["u0", "u1", "u2", "u3"]), min_size=1, max_size=3, unique=True
    ).map(lambda uuids: tuple(card(index, uuid) for index, uuid in enumerate(uuids))),
    nccl=st.just(True),
)
RANKS = st.lists(FACTS, min_size=1, max_size=5) | st.lists(SOUND, min_size=2, max_size=3)


def outcome(ranks):
    """The assignments, or the refusal's text."""
    try:
        return assign_devices(ranks)
    except SettingError as error:
        return str(error)


@settings(max_examples=200, deadline=None)
@given(RANKS)
def test_n11_all_ranks_come_to_one_result_and_no_two_share_a_card_under_nccl(ranks):
    """N10 and N11: what a rank gets by the facts as they arrive there is what every other rank
    computes for it.
    """
    adapter = TypeAdapter(list[RankFacts])
    received = adapter.validate_json(adapter.dump_json(ranks))
    result = outcome(received)
    assert outcome(ranks) == result
    if isinstance(result, str):
        return
    assert len(result) == len(ranks)
    assert len({assignment.transport for assignment in result}) == 1
    assert len({assignment.device.partition(":")[0] for assignment in result}) == 1
    for rank, assignment in zip(ranks, result, strict=True):
        if rank.requested is not None and ":" in rank.requested:
            assert assignment.device == rank.requested
        if rank.cards and rank.requested != "cpu":
            assert assignment.device.startswith("cuda:")
    if result[0].transport == "nccl":
        chosen = [
            rank.cards[int(assignment.device.removeprefix("cuda:"))]
            for rank, assignment in zip(ranks, result, strict=True)
        ]
        assert all(one.uuid and not one.mig for one in chosen)
        assert len({one.uuid for one in chosen}) == len(ranks)
        assert all(assignment.sharers == () for assignment in result)


def meet(distinct):
    """One rank's assignment by facts that travel between processes: cards of their own, or one
    card.
    """
    join()
    rank = int(dict(rank_facts().environment)["RANK"])
    stated = replace(
        rank_facts(),
        accelerator="cuda",
        cards=(card(0, f"u{rank if distinct else 0}"),),
        nccl=True,
    )
    return gather_assignment(stated)


@pytest.mark.usefixtures("functions_by_value")
def test_n11_processes_agree_by_the_facts_of_all():
    """One visible card each: by their own facts alone, ranks cannot tell whether they share it."""
    for distinct, transport in ((True, NCCL), (False, HOST)):
        first, second = launch(meet, 2, distinct, threads=1)
        assert first.transport == second.transport == transport
        assert first.line.startswith("rank 0")
        assert second.line.startswith("rank 1")


def test_facts_of_this_process_hold_host_and_variables(monkeypatch):
    """What the function is given is what this machine has."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    rank = rank_facts("cpu")
    assert rank.hostname
    assert dict(rank.environment)["LOCAL_RANK"] == "3"
    assert dict(rank.environment)["CUDA_VISIBLE_DEVICES"] == "2,0"
    assert rank.requested == "cpu"
    assert rank.problem == ""


@pytest.mark.parametrize(
    ("index", "name", "visible", "expected"),
    [
        (0, "NVIDIA H100 80GB HBM3", "", False),
        (0, "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "", True),
        (0, "NVIDIA A100-SXM4-40GB", "MIG-3f1c", True),
        (1, "NVIDIA A100-SXM4-40GB", "MIG-3f1c", False),
        (1, "NVIDIA A100-SXM4-40GB", "GPU-1, MIG-3f1c", True),
    ],
)
def test_slices_are_recognised_by_name_or_by_what_selects_them(index, name, visible, expected):
    """NCCL refuses them, whatever their UUID."""
    assert is_mig(index, name, {"CUDA_VISIBLE_DEVICES": visible}) is expected


@pytest.mark.parametrize(
    ("requested", "current", "expected"),
    [
        (None, 1, "cuda:1"),
        ("cuda", 1, "cuda:1"),
        ("cuda:0", 1, "cuda:0"),
        ("cpu", 1, "cpu"),
    ],
)
def test_in_one_process_cuda_is_the_current_card(requested, current, expected):
    """A11: threads of ranks have a current card of their own, 0, so that the caller's is taken
    once, with its index.
    """
    assignment = assign_local_device(facts(cards(2), requested=requested), current)
    assert assignment.device == expected
    assert assignment.line.startswith(f"computes on {expected}")
    assert assignment.complete


def test_in_one_process_what_is_not_visible_is_refused():
    """As with several."""
    assert assign_local_device(facts(), 0).device == "cpu"
    with pytest.raises(SettingError, match="no cuda device is visible"):
        assign_local_device(facts(requested="cuda"), 0)
    with pytest.raises(SettingError, match="2 cuda cards are visible, index 0 to 1"):
        assign_local_device(facts(cards(2), requested="cuda:2"), 0)


def test_in_one_process_an_accelerator_left_unused_without_a_word_of_the_caller_is_a_warning(
    monkeypatch, caplog
):
    """Ranks as threads say it as ranks as processes do: training on the CPU beside an idle
    accelerator is a wrong result in the time it takes.
    """
    other = replace(facts(cards(1)), accelerator="xpu")
    monkeypatch.setattr(device_discovery, "rank_facts", lambda _: other)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    settings = {"balance": [1], "schedule": "gpipe", "micro_batches": 1, "executor": "threads"}
    settings["loss"] = torch.nn.functional.mse_loss
    with caplog.at_level("INFO", "penstock"):
        ps.Pipeline(torch.nn.Sequential(torch.nn.Linear(2, 2)), **settings).close()
    (record,) = [record for record in caplog.records if "computes on" in record.message]
    assert record.levelname == "WARNING"
    assert record.message == (
        "each rank is a thread of this process and computes on cpu, 1 xpu card visible, which "
        "device='xpu' would use"
    )
    caplog.clear()
    with caplog.at_level("INFO", "penstock"):
        ps.Pipeline(torch.nn.Sequential(torch.nn.Linear(2, 2)), device="cpu", **settings).close()
    assert "WARNING" not in {record.levelname for record in caplog.records}
