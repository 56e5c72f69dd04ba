"""What a process reports of its devices, with torch's functions replaced: the machine may have none."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest
import torch

from penstock.transport.devices import device_discovery
from penstock.transport.devices.device_assignment import VARIABLES, Assignment, Card, RankFacts
from penstock.transport.devices.device_discovery import (
    assign_device,
    cuda_card,
    gather_assignment,
    host_identity,
    is_mig,
    local_device,
    rank_facts,
    set_current_device,
    visible_cards,
)

#: Of two cards of one machine: name, and UUID as torch reports it.
PROPERTIES = [
    SimpleNamespace(name="H100", uuid="1f-2e"),
    SimpleNamespace(name="A100 MIG 1g.5gb", uuid="00000000-0000"),
    SimpleNamespace(name="old"),
]


@pytest.fixture
def machine(monkeypatch):
    """A machine with three CUDA cards, which counts how often their properties are read."""
    machine = SimpleNamespace(type="cuda", read=[], current=[])

    def properties(index):
        machine.read.append(index)
        return PROPERTIES[index]

    def accelerator(*, check_available):
        assert check_available
        return torch.device(machine.type) if machine.type else None

    monkeypatch.setattr(torch.accelerator, "current_accelerator", accelerator)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", machine.current.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    machine.setenv = monkeypatch.setenv
    machine.setattr = monkeypatch.setattr
    return machine


def test_cards_have_names_and_uuids_but_zeros_are_none(machine):
    """Some virtual machines report zeros for all cards, and old versions of torch nothing."""
    machine.setenv("CUDA_VISIBLE_DEVICES", "3, 1 ,MIG-a")
    cards = (
        Card(0, "H100", "1f-2e"),
        Card(1, "A100 MIG 1g.5gb", "", mig=True),
        Card(2, "old", "", mig=True),
    )
    assert visible_cards() == ("cuda", cards)
    assert cuda_card(2) == cards[2]


def test_cards_are_described_only_if_they_may_be_used(machine):
    """That initialises CUDA, after which a process cannot fork."""
    counted = tuple(Card(index) for index in range(3))
    assert visible_cards(described=False) == ("cuda", counted)
    machine.type = "xpu"
    assert visible_cards() == ("xpu", counted)
    machine.type = None
    assert visible_cards() == ("", ())
    assert machine.read == []


@pytest.mark.parametrize(
    ("index", "visible", "expected"),
    [(0, None, False), (1, "MIG-a", False), (1, "0,MIG-a", True), (1, "MIG-a,0", False)],
)
def test_a_slice_is_known_by_the_entry_that_selected_it(index, visible, expected):
    """The one of its own index."""
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert is_mig(index, "MIGRATION H100", environment) is expected
    assert is_mig(index, "H100 MIG 1g", environment)


@pytest.mark.parametrize(
    ("requested", "described"),
    [
        (None, True),
        ("cuda", True),
        (torch.device("cuda:1"), True),
        ("cpu", False),
        ("cpu:0", False),
    ],
)
def test_facts_are_of_this_host_and_process(machine, requested, described):
    """Only variables that are set are in them, in a fixed order; an empty one may hide all cards."""
    machine.setenv("CUDA_VISIBLE_DEVICES", "")
    machine.setenv("WORLD_SIZE", "2")
    machine.setenv("RANK", "1")
    machine.setattr(device_discovery.dist, "is_nccl_available", lambda: "yes")
    facts = rank_facts(requested)
    assert facts.hostname == socket.gethostname()
    assert facts.host == host_identity()
    variables = (("RANK", "1"), ("WORLD_SIZE", "2"), ("CUDA_VISIBLE_DEVICES", ""))
    assert facts.environment == variables
    assert (facts.accelerator, len(facts.cards), facts.problem) == ("cuda", 3, "")
    assert facts.requested == (None if requested is None else str(requested))
    assert facts.nccl == "yes"
    assert machine.read == ([0, 1, 2] if described else [])


@pytest.mark.parametrize("error", [RuntimeError, AssertionError, OSError])
def test_an_error_of_the_driver_is_a_fact(machine, error):
    """If this rank raised, the others would wait for it."""

    def fail(_):
        raise error("driver")

    machine.setattr(torch.cuda, "get_device_properties", fail)
    facts = rank_facts()
    assert facts.problem == f"{error.__name__}: driver"
    assert (facts.accelerator, facts.cards) == ("", ())


def test_a_host_is_identified_by_its_running_kernel(machine, tmp_path):
    """Two machines may have one name. Where there is no such file, nothing identifies it."""
    file = tmp_path / "boot_id"
    file.write_text("ab-cd\n")
    machine.setattr(device_discovery, "Path", lambda _: file)
    assert host_identity() == "ab-cd"
    file.unlink()
    assert host_identity() == ""


def test_a_rank_takes_the_assignment_of_its_place_in_the_group(machine):
    """And not that of its rank in the job."""
    group, gathered = object(), []
    facts = [RankFacts(f"h{rank}") for rank in range(3)]

    def gather(value, kind, over):
        gathered.append((value, kind, over))
        return facts

    machine.setattr(device_discovery, "all_gather", gather)
    machine.setattr(device_discovery.dist, "get_rank", lambda over: 2 if over is group else 0)
    assert gather_assignment(facts[1], group).line.startswith("rank 2 ")
    assert gather_assignment(facts[1]).line.startswith("rank 0 ")
    assert gathered == [(facts[1], RankFacts, group), (facts[1], RankFacts, None)]


@pytest.mark.parametrize("complete", [True, False])
def test_an_assigned_device_is_logged_and_becomes_the_current_one(machine, caplog, complete):
    """As a warning if an accelerator is left unused."""
    group, given = object(), []

    def gather(facts, over):
        given.append((facts, over))
        return Assignment("cuda:2", "nccl", (), "100 % on cuda:2", complete)

    machine.setattr(device_discovery, "gather_assignment", gather)
    with caplog.at_level("INFO", "penstock"):
        assert assign_device("cuda", group).device == "cuda:2"
    (record,) = caplog.records
    assert record.message == "100 % on cuda:2"
    assert record.levelname == ("INFO" if complete else "WARNING")
    assert machine.current == [torch.device("cuda:2")]
    ((facts, over),) = given
    assert (facts.requested, over) == ("cuda", group)


def test_one_process_computes_on_the_current_card_and_logs_who(machine, caplog):
    """For the CPU not even the cards are counted."""
    with caplog.at_level("INFO", "penstock"):
        assert local_device() == torch.device("cuda:2")
        assert local_device("cuda:0", "the profile") == torch.device("cuda:0")
    assert caplog.messages == [
        "this process computes on cuda:2 (old), the current device, of 3 cuda cards visible",
        "the profile computes on cuda:0 (H100, 1f-2e), as device='cuda:0' asks",
    ]
    assert machine.current == []
    machine.setattr(torch.accelerator, "current_accelerator", None)
    machine.setattr(torch.accelerator, "current_device_index", None)
    assert local_device(torch.device("cpu")) == torch.device("cpu")
    assert local_device("cpu:0") == torch.device("cpu:0")


def test_without_a_card_the_current_one_is_not_asked_for(machine):
    """torch would raise an error."""
    machine.type = None
    machine.setattr(torch.accelerator, "current_device_index", None)
    assert local_device() == torch.device("cpu")


def test_the_cpu_is_no_current_device(machine):
    """torch has a current device of the accelerator alone."""
    set_current_device(torch.device("cpu"))
    assert machine.current == []
    set_current_device(torch.device("cuda:1"))
    assert machine.current == [torch.device("cuda:1")]
