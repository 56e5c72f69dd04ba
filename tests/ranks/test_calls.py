"""Calls of all ranks, compared: here with a board that is a list, and the calls of two ranks in one
process.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.distributed import HashStore
from torch.utils.data import BatchSampler, DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from penstock.batches.batch import make_batch
from penstock.batches.batch_parts import BatchPart
from penstock.errors import RanksDiffer, RunError, SettingError
from penstock.ranks import calls as module
from penstock.ranks.calls import END_OF_TRAIN, FIRST_BATCHES, ComparedCalls

X, Y = torch.arange(32.0).reshape(8, 4), torch.arange(8)


class Board:
    """What calls need of a board; `others` has the calls of the other rank."""

    def __init__(self):
        self.failed = None
        self.others = self.calls = None

    def doing(self, what):
        """Nothing watches here."""

    def check(self):
        """Nothing fails here."""

    def describe_others(self):
        """Nothing to say."""
        return []

    def fail(self, reason, *, differs):
        """The run is over."""
        self.failed = reason
        assert differs

    def check_difference(self):
        """This rank is the first."""

    def other_calls(self):
        """By rank."""
        return {1 - self.others._rank: [], self.others._rank: self.others.rows()}


def two_ranks():
    """The calls of two ranks that know each other, after the batches that are compared as a whole."""
    store = HashStore()
    boards = Board(), Board()
    ranks = [ComparedCalls(store, board, rank, 2, 30.0) for rank, board in enumerate(boards)]
    boards[0].others, boards[1].others = ranks[1], ranks[0]
    for calls in ranks:
        calls._batches = 2 * FIRST_BATCHES + 1
    return ranks


def begun(calls, x, y, call="train_batch", step=0):
    """The batch that a rank has begun."""
    training = call.startswith("train")
    return calls.begin(make_batch(x, y, 2, step=step, training=training), x, y, call)


def verified(x, y, call="train_batch", **words):
    """What rank 0 finds when it hears the loss of rank 1, which has begun another batch."""
    one, other = two_ranks()
    batch, source = begun(one, X, Y), begun(other, x, y, call, **words)
    one.verify(1, float(source.checksum()), batch)


def test_the_same_batches_are_no_difference():
    """In any nesting, and whether numbers were read or not."""
    verified(X.clone(), Y.clone())
    one, other = two_ranks()
    nested = {"ids": X, "names": ["a", 1]}
    batch, source = begun(one, nested, (Y, Y)), begun(other, dict(nested), (Y, Y))
    one.verify(1, float(source.checksum()), batch)
    assert batch.checksum() == source.checksum()
    assert float(batch.checksum()) == batch.checksum() < 2**53


def test_a_batch_that_a_layer_changes_in_place_is_no_difference():
    """Numbers are read while the rank waits; those of the next batches are then read at once."""
    one, other = two_ranks()
    x = X.clone()
    batch, source = begun(one, x, Y), begun(other, X, Y)
    batch.inputs[0].mul_(2)
    one.verify(1, float(source.checksum()), batch)
    later = begun(one, X, Y)
    assert later.pending_check is None
    with pytest.raises(RanksDiffer, match="different batches"):
        one.verify(1, float(begun(other, X + 1, Y).checksum()), later)


@pytest.mark.parametrize("parted", ["inputs", "targets", "both"])
def test_parts_of_one_batch_are_no_difference(parted):
    """Each rank has read other samples of it; only the order of all samples must be the same."""

    def parts(value, rows, order):
        return BatchPart(value[rows.start : rows.stop], rows, 8, order)

    def batch(rows, order=7):
        x = X if parted == "targets" else parts(X, rows, order)
        return x, Y if parted == "inputs" else parts(Y, rows, order)

    one, other = two_ranks()
    early, late = begun(one, *batch(range(4))), begun(other, *batch(range(4, 8)))
    one.verify(1, float(late.checksum()), early)
    early, late = begun(one, *batch(range(4))), begun(other, *batch(range(4, 8), order=8))
    with pytest.raises(
        RanksDiffer, match=r"(?s)order 00000007 on rank 0.*order 00000008 on rank 1"
    ):
        one.verify(1, float(late.checksum()), early)


OTHERS = {
    "content": ((X + 1, Y), "different batches.*values 0, 1, 2, 3.*values 1, 2, 3, 4"),
    "labels": ((X, Y.flip(0)), "different batches.*0, 1, 2, 3 .*7, 6, 5, 4"),
    "samples": (
        (X[:7], Y[:7]),
        r"x \(8, 4\) float32 and y \(8,\) int64 on rank 0.*x \(7, 4\) float32",
    ),
    "dtype": ((X.double(), Y), r"x \(8, 4\) float32 .*x \(8, 4\) float64"),
    "nesting": (({"x": X}, Y), r"x \(8, 4\) float32 and.*dict"),
    "mode": (
        (X, Y, "eval_batch"),
        "do not do the same.*train_batch with .* on rank 0.*eval_batch with",
    ),
    "update": (
        (X, Y, "train_batch without an update"),
        "train_batch without an update .* on rank 1",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_batch_or_call_is_refused_with_both(name):
    """Inputs of one and targets of another batch would train something that nothing notices."""
    arguments, expected = OTHERS[name]
    with pytest.raises(RanksDiffer, match=f"(?s){expected}"):
        verified(*arguments)


def test_a_rank_with_more_steps_is_refused():
    """After a checkpoint that only one rank has loaded."""
    with pytest.raises(RanksDiffer, match="the ranks"):
        verified(X, Y, step=3)


def test_a_call_that_one_rank_alone_has_made_is_named(monkeypatch):
    """Its batches are the same from then on, one call late."""
    # The other makes no call that could still come.
    monkeypatch.setattr("penstock.ranks.calls._PATIENCE_S", 0.05)
    one, other = two_ranks()
    one.enter("load_state_dict")
    batch, source = begun(one, X, Y), begun(other, X, Y)
    with pytest.raises(
        RanksDiffer, match=r"(?s)call 1 .*load_state_dict on rank 0.*train_batch with .* on rank 1"
    ):
        one.verify(1, float(source.checksum()), batch)
    assert "load_state_dict" in one._board.failed


def test_a_batch_that_one_rank_has_not_read_differs_from_no_other():
    """A rank on a device reads some batches only; the other one may have read them all."""
    one, other = two_ranks()
    batch, unread = begun(one, X, Y), begun(other, X + 1, Y)
    batch.checksum()
    assert one.difference(one._board.other_calls()) is None
    unread.checksum()
    assert "different batches in call 1" in one.difference(one._board.other_calls())


def test_the_end_of_a_loader_on_one_rank_is_found_by_the_rank_that_waits():
    """It would wait until the deadline for a batch that does not come."""
    one, other = two_ranks()
    begun(one, X, Y)
    other.enter(END_OF_TRAIN)
    message = one.difference(one._board.other_calls())
    assert "the end of train() on rank 1" in message
    assert "the same number of batches on every rank" in message
    assert other.difference(other._board.other_calls()) == message


def test_the_first_batches_are_compared_before_they_are_played():
    """By all their numbers, so that a single other one is found before any weight has changed."""
    store, errors = HashStore(), {}
    x = torch.zeros(8, 1000)
    other = x.clone()
    other[7, 999] = 1e-6

    def job(rank, batches):
        calls = ComparedCalls(store, Board(), rank, 2, 30.0)
        try:
            for inputs in batches:
                begun(calls, inputs, Y)
        except RanksDiffer as error:
            errors[rank] = str(error)

    threads = [
        threading.Thread(target=job, args=(rank, batches))
        for rank, batches in enumerate(([x] * 3, [x, x, other]))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors[0] == errors[1]
    assert "different batches in call 3" in errors[0]
    lines = errors[0].splitlines()[1:-1]
    assert [line.rpartition(" on ")[2] for line in lines] == ["rank 0", "rank 1"]


def test_without_check_data_ranks_may_have_batches_of_their_own():
    """The first rank's targets and the last rank's inputs are never used; but methods and numbers
    of micro-batches count.
    """
    one, other = two_ranks()
    one.check_data = other.check_data = False
    batch, source = begun(one, X, torch.zeros(8)), begun(other, torch.zeros(8, 4), Y)
    one.verify(1, float(source.checksum()), batch)
    with pytest.raises(RanksDiffer, match="eval_batch with 2 micro-batches on rank 1"):
        one.verify(1, float(begun(other, X, Y, "eval_batch").checksum()), begun(one, X, Y))


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_distributed_sampler_is_refused_at_once(wrapped):
    """It is the habit of data parallelism: every rank would have another part of the data."""
    data = TensorDataset(X, Y)
    sampler = DistributedSampler(data, num_replicas=2, rank=0)
    batches = (
        {"batch_sampler": BatchSampler(sampler, 2, drop_last=False)}
        if wrapped
        else {"sampler": sampler}
    )
    calls = two_ranks()[0]
    with pytest.raises(
        SettingError, match="DistributedSampler gives every rank another one of 2 parts"
    ):
        calls.check_loader(DataLoader(data, **batches))
    balanced = type("Balanced", (DistributedSampler,), {})(data, num_replicas=2, rank=0)
    with pytest.raises(SettingError, match="Balanced gives every rank another one of 2 parts"):
        calls.check_loader(DataLoader(data, sampler=balanced))
    calls.check_loader(DataLoader(data, shuffle=True))
    calls.check_loader([(X, Y)])
    calls.check_loader(DataLoader(data, sampler=DistributedSampler(data, num_replicas=1, rank=0)))


def test_a_module_of_calls_costs_threads_nothing():
    """Ranks that are threads have one batch."""
    import penstock as ps

    pipe = ps.Pipeline(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)),
        loss=lambda output, target: output.mean() + target.float().mean(),
        balance=[1, 1],
        executor="threads",
    )
    pipe.train_batch(X, Y)
    assert pipe._player.played is not None
    assert pipe._batch(X, Y, training=True, call="train_batch").checksum() == 0


def test_numbers_belong_to_the_call_of_their_batch_though_others_have_followed():
    """A rank reads the numbers while it waits, and may have called another method before."""
    one, _ = two_ranks()
    batch = begun(one, X, Y)
    one.enter("save")
    batch.checksum()
    first, last = one.rows()
    assert (first[1], first[4]) == (batch.check, "0, 1, 2, 3; 0, 1, 2, 3")
    assert last[2:] == ["save", "", ""]


@pytest.mark.parametrize("content", [0, module._MASK, 2**32 - 1])
def test_the_checksum_of_read_numbers_is_never_that_of_unread_ones(monkeypatch, content):
    """0 stands for numbers that were not read, and is like all others."""
    monkeypatch.setattr(module, "batch_checksum", lambda tensors, turn: (content, []))
    one, other = two_ranks()
    batch, unread = begun(one, X, Y), begun(other, X, Y)
    assert batch.checksum() & module._MASK > 0
    assert batch.checksum() >> module._BITS == unread.check >> module._BITS


def test_words_of_a_limited_number_of_forms_are_remembered(monkeypatch):
    """Shapes that depend on the data may never come again."""
    monkeypatch.setattr(module, "_MOST_FORMS", 3)
    one, _ = two_ranks()
    for length in range(1, 7):
        begun(one, {"x": torch.zeros(8, length)}, Y)
        assert f"(8, {length}) float32" in one.rows()[-1][3]
        assert len(one._forms) <= 3


def test_the_words_of_the_rank_that_has_sent_the_loss_are_waited_for(monkeypatch):
    """Those of a third rank, which may have the same batch, say nothing of the difference."""
    store, board = HashStore(), Board()
    calls = [ComparedCalls(store, board, rank, 3, 30.0) for rank in range(3)]
    for rank in calls:
        rank._batches = 2 * FIRST_BATCHES + 1
    batches = [begun(rank, x, Y) for rank, x in zip(calls, (X, X + 1, X), strict=True)]
    checks = [float(batch.checksum()) for batch in batches]
    rows = [{2: calls[2].rows()}, {1: calls[1].rows(), 2: calls[2].rows()}]
    board.other_calls = lambda: rows.pop(0) if len(rows) > 1 else rows[0]
    monkeypatch.setattr(module, "_PAUSE_S", 0.0)
    with pytest.raises(RanksDiffer, match=r"(?s)values 0, .* on ranks 0, 2\n.* on rank 1"):
        calls[0].verify(1, checks[1], batches[0])


def test_a_store_that_is_gone_while_batches_are_compared_is_an_error_of_the_run(monkeypatch):
    """torch's own error names neither the rank nor what it did."""

    def refuse(*_):
        raise RuntimeError("Connection closed by peer")

    one, _ = two_ranks()
    one._batches = 0
    monkeypatch.setattr(module, "missing_keys", refuse)
    text = "could not compare its batch with the other ranks': Connection closed"
    with pytest.raises(RunError, match=text):
        begun(one, X, Y)


def test_first_batches_of_ranks_that_may_have_their_own_are_compared_by_their_calls_alone():
    """Their contents are not read, also where batches are compared as a whole."""
    one, other = two_ranks()
    for calls in (one, other):
        calls._batches, calls.check_data = 0, False
    with ThreadPoolExecutor(2) as pool:
        batches = list(pool.map(begun, (one, other), (X, X + 1), (Y, None)))
    assert batches[0].checksum() == batches[1].checksum()


def test_the_board_of_a_rank_publishes_its_calls():
    """Other ranks compare them with theirs."""
    board = Board()
    assert board.calls is None
    calls = ComparedCalls(HashStore(), board, 0, 2, 30.0)
    assert board.calls is calls
