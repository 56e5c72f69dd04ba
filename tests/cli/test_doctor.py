"""`penstock doctor`: does this machine work?"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import torch

from penstock.cli.doctor import EXTRAS, machine_facts, table
from penstock.measure.card_check import check_cards
from penstock.transport.devices.device_assignment import Card

ROOT = Path(__file__).parents[2]


def test_doctor_finds_this_machine_sound_and_measures_its_link(penstock):
    """Its output belongs in every report of a problem."""
    result = penstock("doctor", "--json")
    facts = json.loads(result.out)
    assert result.status == 0
    assert facts["sound"] is True
    assert facts["two processes"].startswith("talk: ")
    assert "gloo" in facts["backends"]


def test_doctor_fails_when_two_processes_cannot_talk(penstock, monkeypatch):
    """A report that says all is well when it is not would be worse than none."""
    from penstock.errors import RunError
    from penstock.ranks import local_link as link

    def broken() -> None:
        raise RunError("rank 1 was killed")

    monkeypatch.setattr(link, "measure_local_link", broken)
    result = penstock("doctor")
    assert result.status == 1
    assert "do not talk: rank 1 was killed" in result.out


def test_doctor_knows_every_extra_that_users_install():
    """An extra that it forgets is not found to be missing."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = set(pyproject["project"]["optional-dependencies"])
    for_developers = {"docs", "package", "dev"}
    # torch is reported by itself, and `train` is a union of others.
    assert set(EXTRAS.values()) == extras - for_developers - {"torch", "train"}


class FakeDriver:
    """Two cards as a driver may show them: the first computes, the second as `failure` says."""

    def __init__(self, failure=None, listed=True):
        self.failure, self.listed = failure, listed
        self.computed = []

    def cards(self):
        """A card, and a slice of one."""
        if not self.listed:
            raise RuntimeError("CUDA driver initialization failed\nadvice for debugging")
        return "cuda", (
            Card(0, "NVIDIA H100 80GB HBM3", "uuid-0"),
            Card(1, "NVIDIA H100 MIG 1g.10gb", "uuid-1", mig=True),
        )

    def compute(self, index):
        """The second card may fail."""
        self.computed.append(index)
        if index == 1 and self.failure:
            raise RuntimeError(self.failure)

    def memory(self, index):
        """The second card does not say."""
        if index == 1:
            raise RuntimeError("not supported")
        return 79 * 2**30, 80 * 2**30

    def has_peer_access(self, index, other):
        """Card 0 reads card 1."""
        assert index != other
        return index == 0

    def share_memory(self, index):
        """No other process can open a handle of the second card."""
        if index == 1:
            raise RuntimeError("operation not supported")

    def nccl_version(self):
        """Any."""
        return "2.28.9"


def test_doctor_starts_a_kernel_on_every_card_and_says_what_ranks_need():
    """A name in a list says nothing of a card: drivers, images without kernels for it and full
    memory show when it computes.
    """
    driver = FakeDriver()
    report = check_cards(driver)
    assert driver.computed == [0, 1]
    assert report.sound
    text = table(machine_facts(report), report)
    rows = dict(line.split("  ", 1) for line in text.splitlines())
    assert rows["cuda:0"].strip() == (
        "NVIDIA H100 80GB HBM3; UUID uuid-0; 79.0 GiB free of 80.0 GiB; kernel: works; peers: 1; "
        "CUDA IPC: works"
    )
    assert rows["cuda:1"].strip() == (
        "NVIDIA H100 MIG 1g.10gb; UUID uuid-1; a slice (MIG); memory unknown; kernel: works; "
        "peers: none; CUDA IPC: fails: operation not supported"
    )
    assert rows["nccl"].strip() == "2.28.9"


def test_a_card_that_computes_nothing_makes_the_machine_unsound():
    """The other cards are still tried, and the first line of CUDA's error is enough."""
    report = check_cards(FakeDriver("no kernel image is available\nCUDA kernel errors might be"))
    assert not report.sound
    assert [card.kernel for card in report.cards] == [
        "works",
        "fails: no kernel image is available",
    ]
    facts = machine_facts(report)
    assert facts["gpus"] == ["NVIDIA H100 80GB HBM3", "NVIDIA H100 MIG 1g.10gb"]
    assert [card["sound"] for card in facts["cards"]] == [True, False]
    json.dumps(facts)


def test_cards_that_cannot_be_listed_are_not_taken_for_none():
    """A broken driver and a machine without cards differ in what is to be done."""
    report = check_cards(FakeDriver(listed=False))
    assert not report.sound
    assert "gpus" in (text := table(machine_facts(report), report))
    assert "cannot be listed: CUDA driver initialization failed" in text
    assert "advice" not in text


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a card here")
def test_without_a_card_one_line_says_so(penstock):
    """Nothing to repair: the CPU computes."""
    result = penstock("doctor")
    assert result.status == 0
    about_cards = [
        line for line in result.out.splitlines() if line.startswith(("gpus", "nccl", "cuda"))
    ]
    assert [line.split() for line in about_cards] == [["gpus", "none"]]
