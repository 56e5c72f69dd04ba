"""What a rank that computes loses to messages. No test looks at a clock."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from penstock.measure import busy_messages
from penstock.measure.busy_messages import busy_seconds_per_byte, lost_seconds, send_seconds


class DoneWork:
    """A transfer that has ended."""

    def wait(self):
        """Return at once."""


class CountedWires:
    """Wires that note what goes over them."""

    def __init__(self):
        self.log = []

    def meet(self, peer):
        """Note a meeting."""
        self.log.append("meet")

    def send(self, tensor, peer):
        """Note a message that leaves."""
        self.log.append(("send", peer, tensor.nbytes))
        return DoneWork()

    def receive(self, tensor, peer):
        """Note a message that comes."""
        self.log.append(("receive", peer, tensor.nbytes))
        return DoneWork()


def measured(monkeypatch, rank, rates, bandwidth):
    """The figure of a rank whose products run at these rates, the wires, and the windows."""
    wires, windows = CountedWires(), []
    sequence = iter(rates)

    def products_per_s(window_s):
        wires.log.append("compute")
        windows.append(window_s)
        return next(sequence)

    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(busy_messages, "_products_per_s", products_per_s)
    return busy_seconds_per_byte(1 - rank, wires, bandwidth), wires.log, windows


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_send_and_receive_in_turn_and_compute_meanwhile(monkeypatch, rank):
    """Both directions cost; each is compared with the same work just before it."""
    figure, log, windows = measured(monkeypatch, rank, [100.0, 80.0] * 6, 2**22)
    message = 2**18
    directions = ["send", "receive"] if rank == 0 else ["receive", "send"]
    expected = []
    for direction in directions * 3:
        transfers = [(direction, 1 - rank, message)] * 2  # as many as 0.15 s take
        expected += ["meet", "compute", "meet", *transfers, "compute"]
    assert log == expected
    assert windows == pytest.approx([0.15, 0.125] * 6)
    assert figure == pytest.approx(0.2 * 0.125 / (2 * message))


def test_the_median_of_the_rounds_counts_and_no_gain_does(monkeypatch):
    """Another program that ends in a round would seem to make messages profitable."""
    rates = [100, 90, 100, 200, 100, 90, 100, 10, 100, 80, 100, 80]
    figure, _, _ = measured(monkeypatch, 0, map(float, rates), 2**22)
    assert figure == pytest.approx(0.15 * 0.125 / 2**19), "between 0.1 and 0.2"
    assert lost_seconds(100.0, 120.0, 1.0) == 0


@pytest.mark.parametrize(
    ("bandwidth", "messages", "size"),
    [(1.0, 1, 1), (1e4, 1, 1500), (2**22, 2, 2**18), (1e12, 64, 2**18)],
)
def test_a_window_has_what_the_link_carries(monkeypatch, bandwidth, messages, size):
    """A small message on the slowest link, and a limited number on memory."""
    _, log, _ = measured(monkeypatch, 0, [1.0] * 12, bandwidth)
    assert log.index("compute", 3) - 3 == messages
    assert log[3] == ("send", 1, size)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_send_is_timed_after_computing_with_its_receive_posted(monkeypatch, rank):
    """Ranks take turns; the median of the rank's own sends counts, without the computing."""
    wires, clock = CountedWires(), [0.0]
    durations = iter([5.0, 1.0, 3.0] * 5)

    def send(tensor, peer):
        wires.log.append("send")
        clock[0] += next(durations)
        return DoneWork()

    def compute(window_s):
        wires.log.append("compute")
        clock[0] += 100

    wires.send = send
    wires.receive = lambda tensor, peer: wires.log.append("receive") or DoneWork()
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(busy_messages, "_products_per_s", compute)
    monkeypatch.setattr(busy_messages.time, "perf_counter", lambda: clock[0])
    assert send_seconds(1 - rank, wires) == 3.0
    turns = [["meet", "compute", "send"], ["meet", "receive", "compute"]]
    first, second = turns if rank == 0 else turns[::-1]
    assert wires.log == [*first, *second] * 15
