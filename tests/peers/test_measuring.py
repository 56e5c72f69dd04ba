"""Systems in turn: gradients first, then rounds; a system that fails does not stop the others."""

from __future__ import annotations

import pytest

from penstock.peers.measuring import SPARE_BYTES, Comparison, Entrant, Rules
from penstock.peers.setup import Setup
from penstock.peers.training import step_seconds


class FakeRanks:
    """Ranks of a fake system: the name of its schedule says what happens."""

    living = 0
    most_living = 0

    def __init__(self, system, setup, host, log, limit_s, gradients):
        from penstock.peers.messages import PeerMissing
        from penstock.peers.team import Refused

        self.kind, self.ranks, self.turns = setup.schedule, 2, 0
        if self.kind == "missing":
            raise PeerMissing("not installed: no module x")
        if self.kind == "refuses":
            raise Refused("too small")
        FakeRanks.living += 1
        FakeRanks.most_living = max(FakeRanks.most_living, FakeRanks.living)

    def tell(self, name, limit_s, only=None, **arguments):
        from penstock.peers.messages import PeerFailed, PeerTimeout

        if name == "compare":
            error = 1.0 if self.kind == "wrong" else 1e-7
            errors = [{"0.weight": error}, {} if self.kind == "forgets" else {"1.weight": 0.0}]
            facts = {"largest": 1.0, "seconds": 0.1, "host_bytes": 10}
            return [{"errors": of_rank, **facts} for of_rank in errors]
        self.turns += 1
        if self.kind == "dies later" and self.turns > 2:
            raise PeerFailed("a process died in steps")
        if self.kind == "hangs":
            raise PeerTimeout("rank 0 did not finish")
        pace = {"reference": 0.1, "slow": 0.3}.get(self.kind, 0.2)
        times = [pace * index for index in range(arguments["steps"] + 1)]
        answer = {"times": times, "peak": 7, "whole": False, "idle_s": 0.5, "parts": []}
        return [answer, answer]

    def end(self):
        FakeRanks.living -= 1


class FakeSystem:
    """A system with one thread."""

    def threads(self, setup):
        return 1


@pytest.fixture
def compare(monkeypatch, tmp_path):
    """Compare fake systems by the names of their schedules."""
    monkeypatch.setattr("penstock.peers.measuring.Ranks", FakeRanks)
    monkeypatch.setattr(FakeRanks, "living", 0)
    monkeypatch.setattr(FakeRanks, "most_living", 0)

    def run(*kinds, **rules):
        entrants = []
        for kind in kinds:
            setup = Setup("mlp", {}, "random", 4, 2, 2, schedule=kind)
            entrants.append(Entrant(kind, FakeSystem(), setup, None))
        names = ["0.weight", "1.weight"]
        comparison = Comparison(
            entrants,
            (tmp_path / "gradients", names),
            Rules("reference", rounds=4, **rules),
            tmp_path / "log.txt",
        )
        rows = {row.name: row for row in comparison.run()}
        assert FakeRanks.living == 0, "every process has ended"
        return rows

    return run


def test_all_systems_have_steps_in_every_round(compare):
    """The median of a round, by the clock of the slowest rank."""
    rows = compare("reference", "other")
    assert set(rows["other"].rounds) == set(rows["reference"].rounds) == {0, 1, 2, 3}
    assert rows["other"].seconds() == pytest.approx([0.2] * 4)
    assert rows["other"].gradient_error == pytest.approx(1e-7)
    assert (rows["other"].peaks, rows["other"].ranks) == ([7, 7], 2)


def test_what_fails_has_a_row_that_says_why_and_the_others_go_on(compare):
    """Also if it fails in the middle of the rounds."""
    kinds = ("missing", "refuses", "forgets", "hangs", "dies later")
    rows = compare(*kinds, "reference")
    assert [rows[kind].status for kind in kinds] == [
        "missing",
        "refused",
        "failed",
        "timeout",
        "failed",
    ]
    assert rows["forgets"].reason == "1 parameters were not updated, such as 1.weight"
    assert rows["dies later"].reason == "a process died in steps"
    assert len(rows["reference"].rounds) == 4


def test_wrong_gradients_are_said_beside_the_time(compare):
    """A fast system that computes something else is not a faster one."""
    row = compare("reference", "wrong")["wrong"]
    assert row.reason == "its gradients are not those of plain training"


def test_without_the_reference_the_others_are_still_measured(compare):
    """Ratios are then missing, times are not."""
    rows = compare("other", "another")
    assert len(rows["other"].rounds) == len(rows["another"].rounds) == 4


def test_a_step_ends_when_the_last_rank_has_ended_it():
    """From end to end."""
    assert step_seconds([[0.0, 3.0, 4.0], [1.0, 2.0, 6.0]]) == (2.0, 3.0)


def test_no_more_systems_are_alive_than_memory_holds(compare, monkeypatch):
    """Each takes 20 bytes, imports included: of 50 to spare, the third system ends a group."""
    monkeypatch.setattr("penstock.peers.measuring.available_memory_bytes", lambda: SPARE_BYTES + 50)
    rows = compare("reference", "a", "b", "c", "d", "e")
    assert FakeRanks.most_living == 3
    for name in "abcde":
        assert len(rows[name].rounds) == 4
        assert set(rows[name].rounds) <= set(rows["reference"].rounds)


def test_a_slow_system_with_long_steps_is_left_out_after_two_rounds(compare, monkeypatch):
    """One round may have met a busy moment of the host."""
    monkeypatch.setattr("penstock.peers.measuring.ROUND_S", 0.05)
    rows = compare("reference", "slow", long_rounds=4)
    assert len(rows["reference"].rounds) == 4
    assert len(rows["slow"].rounds) == 2
