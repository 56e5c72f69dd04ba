"""Training over what NCCL demands, between processes without a GPU (see `nccl_like`): equal to the
CPU, and by the rules.

N1 to N9 are the rules that must hold on several GPUs, and that CPUs can check. There is one launch
for each number of ranks.
"""

from __future__ import annotations

import math
from functools import cache

import pytest
from tests.devices.nccl_jobs import CASES, FAILURES, losses_on_cpu, train_all

from penstock.ranks.processes.launch import launch


@cache
def seen_by(ranks: int) -> list:
    """What every rank has seen of all cases of a number of ranks."""
    return launch(train_all, ranks, ranks, threads=1)


TRAINED = [(ranks, name) for ranks, cases in CASES.items() for name in cases]
every_case = pytest.mark.parametrize(("ranks", "name"), TRAINED)


def rows(ranks: int, name: str) -> list:
    """What the ranks have seen of a case."""
    rows = [seen[name] for seen in seen_by(ranks)]
    assert all(isinstance(row, dict) for row in rows), rows
    return rows


@every_case
def test_losses_equal_those_of_the_cpu_to_the_bit(ranks, name):
    """On every rank; and they are real numbers, and fall."""
    expected = losses_on_cpu(CASES[ranks][name])
    assert all(map(math.isfinite, expected))
    assert expected[-1] < expected[0]
    for row in rows(ranks, name):
        assert row["losses"] == expected


def test_copies_of_a_stage_on_devices_may_talk_through_shared_memory():
    """Flags of gradients on the CPU were added to those that had come to the device."""
    expected = losses_on_cpu(CASES[2]["copies x 2"])
    for row in rows(2, "copies through shared memory"):
        assert row["losses"] == expected
        assert row["communicators"] == 0


@every_case
def test_losses_are_on_the_device_of_the_rank_on_every_rank(ranks, name):
    """One rule: whoever adds them to a tensor of his own must not learn on which rank he is."""
    for row in rows(ranks, name):
        assert set(row["forms"]) == {("lookalike:0", "torch.float32", 0)}


def test_n1_communicators_that_connect_at_a_transfer_are_connected_in_the_constructor():
    """Two ranks that first send to each other would wait for ever; every case runs with no
    communicator made after the constructor.
    """
    expected = losses_on_cpu(CASES[2]["chimera"])
    for row in rows(2, "chimera, connected by transfers"):
        assert row["losses"] == expected
        assert row["communicators"] == 5


@every_case
def test_n1_communicators_are_made_in_the_constructor(ranks, name):
    """Later ones raise in the stand-in; here it is seen that there are some."""
    assert all(row["communicators"] >= 2 for row in rows(ranks, name))


@every_case
def test_n3_no_wait_for_a_message_stops_the_host(ranks, name):
    """A wait with a timeout polls until the device has done all that was asked of it: the launch
    queue runs dry.
    """
    for row in rows(ranks, name):
        assert row["waits"].get("host", 0) == 0
        assert row["waits"]["stream"] > 0


@every_case
def test_n3_a_steady_step_copies_its_part_of_the_batch_and_nothing_else(ranks, name):
    """Losses, norms, flags, counts and the results of comparisons stay on the devices: no rank
    waits for a loss before it is looked at, and nothing is uploaded into receive buffers.
    """
    for row in rows(ranks, name):
        assert set(row["log"]) <= {"h2d"}
        assert {line.partition(":")[0] for line in row["h2d"]} <= {"batches/device_batch.py"}
        assert row["log"].get("h2d", 0) <= 2


@every_case
def test_message_buffers_are_counted_until_they_are_freed(ranks, name):
    """Receives that are posted ahead and sends that have not left take memory of the device, beside
    the tensors of stages. On every rank the timeline has those of all.
    """
    for row in rows(ranks, name):
        now, peak = row["buffers"]
        assert now == 0
        assert peak > 0
        assert len(row["memory"]) == ranks
        assert tuple(row["memory"][row["rank"]]) == (peak, 0, 0)


def test_n2_the_stand_in_sees_messages_that_are_received_in_another_order():
    """NCCL has no tags: it would write one message's bytes into the other's buffer, or hang."""
    kind, text = seen_by(2)[1]["rules"]["other order"]
    assert kind == "NcclMisuse"
    assert text == "rank 0 sent torch.float32 x 1, rank 1 receives torch.float32 x 2"


@pytest.mark.parametrize("rank", [0, 1])
def test_n2_the_stand_in_sees_two_ranks_that_both_send_first(rank):
    """On one stream neither comes to its receive; in one group both calls run at once."""
    seen = seen_by(2)[rank]["rules"]
    kind, text = seen["send, send"]
    assert kind == "NcclMisuse"
    assert "is call 1 of" in text
    assert seen["batch"] == [1.0]


@pytest.mark.parametrize("rank", [0, 1])
def test_n1_the_stand_in_sees_communicators_that_nobody_shares_and_late_ones(rank):
    """These are the two ways in which the first batch over NCCL hangs."""
    seen = seen_by(2)[rank]["rules"]
    assert seen["lazy"][0] == "NcclMisuse"
    assert seen["lazy"][1].endswith(f"and rank {1 - rank} never does")
    assert seen["sealed"][0] == "NcclMisuse"
    assert seen["sealed"][1].endswith("is made in the middle of a run")


@pytest.mark.parametrize("rank", [0, 1])
def test_n4_the_stand_in_takes_device_tensors_of_dtypes_that_nccl_has(rank):
    """And gloo takes none of the device's."""
    seen = seen_by(2)[rank]["rules"]
    assert seen["CPU tensor"][1] == "No backend type associated with device type cpu"
    assert seen["int16"][1] == "Unconvertible NCCL type torch.int16"
    assert seen["stride"][1] == "Tensors must be contiguous"
    assert seen["device tensor"][1].endswith("writev: Bad address")


def test_n4_tensors_of_other_dtypes_cross_as_bytes():
    """int16 tokens at a boundary train as on the CPU; the stand-in refuses int16."""
    expected = losses_on_cpu(CASES[2]["int16"])
    assert [row["losses"] for row in rows(2, "int16")] == [expected] * 2


@every_case
def test_n7_a_rank_has_two_communicators_for_each_neighbour_and_one_of_all_ranks(ranks, name):
    """Two more where both hold copies of a stage, or a tied weight, and exchange messages of a
    program. Losses and norms take that of all ranks.
    """
    for row in rows(ranks, name):
        exchange_at_update = "chimera" in name or "tied" in name
        assert row["communicators"] == (4 if exchange_at_update else 2) * row["peers"] + 1


@pytest.mark.parametrize(("rank", "kind", "call"), FAILURES)
def test_n9_a_rank_that_raises_at_an_op_lets_the_others_go_with_its_words(rank, kind, call):
    """What they were to receive is garbage then, and no number that was made of it is returned."""
    seen = [row[rank, kind, call] for row in seen_by(2)]
    words = (
        f"failed in {rank}{kind}{call - 1} of step 1: ValueError: no luck in {kind} on rank {rank}"
    )
    assert seen[rank][0] == "StageFailed"
    assert words in seen[rank][1]
    assert seen[1 - rank][0] == "PeerFailed"
    assert words in seen[1 - rank][1]


def test_n9_a_message_that_does_not_come_ends_the_run_at_the_deadline():
    """No host stands at a wait under NCCL, so that the thread which watches the others keeps the
    deadline.
    """
    first, second = (row["late"] for row in seen_by(2))
    words = "rank 1 has waited 1 s for 0F0 from rank 0 to rank 1, past its deadline"
    assert second[0] == "DeadlineExceeded"
    assert second[1].startswith(words)
    assert first[0] == "PeerFailed"
    assert words in first[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_n9_the_stand_in_gives_garbage_for_what_an_abort_has_ended(rank):
    """As NCCL does: a run must not take it for a message."""
    garbage, later = seen_by(2)[rank]["rules"]["abort"]
    assert garbage == [True, True]
    assert later == "DistBackendError"
