"""Calls that differ: which call is named, for which ranks, and with which advice."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from penstock.batches.batch import make_batch
from penstock.batches.batch_parts import BatchPart
from penstock.errors import DeadlineExceeded, RanksDiffer
from penstock.ranks import calls as module
from penstock.ranks.batch_forms import nested_form, pair_form
from penstock.ranks.calls import (
    CLOSED,
    END_OF_TRAIN,
    Calls,
    ComparedCalls,
    is_compared_whole,
    message_of,
    unlike,
)

X, Y = torch.arange(32.0).reshape(8, 4), torch.arange(8)


class Board:
    """The board of a rank; `others` has the rows of other ranks."""

    def __init__(self, others=None):
        self.others, self.failures, self.statuses = others or {}, [], []

    def doing(self, status):
        """Note the status."""
        self.statuses.append(status)

    def check(self):
        """No rank has failed."""

    def check_difference(self):
        """No rank has found a difference."""

    def fail(self, reason, *, differs=False):
        """Note the failure."""
        self.failures.append((reason, differs))

    def describe_others(self):
        """What the other ranks do."""
        return ["rank 1 is at 0F1 since 5 s"]

    def other_calls(self):
        """The rows of other ranks."""
        return self.others


def calls_of(rank=0, size=2, *, first=9, store=None, deadline_s=10.0):
    """The calls of a rank, whose next batch has a number that is not compared whole."""
    calls = ComparedCalls(store or HashStore(), Board(), rank, size, deadline_s)
    calls._batches = first
    return calls


def begin(calls, x=X, y=Y, call="train_batch", step=0):
    """Begin a batch."""
    batch = make_batch(x, y, 2, step=step, training=call.startswith("train"))
    return calls.begin(batch, x, y, call)


def test_the_first_batches_and_then_ever_fewer_are_compared_as_a_whole():
    """A change in the order of the data is most likely to come early."""
    assert [n for n in range(40) if is_compared_whole(n)] == [0, 1, 2, 3, 4, 8, 16, 32]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((5, 0), (5, 0), False),
        ((5, 7), (5, 0), False),
        ((5, 0), (5, 7), False),
        ((5, 7), (5, 7), False),
        ((5, 7), (5, 8), True),
        ((5, 0), (6, 0), True),
        ((5, 7), (6, 7), True),
    ],
)
def test_checksums_differ_by_the_call_or_by_numbers_that_both_have_read(one, other, expected):
    """0 stands for numbers that were not read."""
    first, second = (call << 26 | numbers for call, numbers in (one, other))
    assert unlike(first, second) is expected


def test_a_rank_that_is_one_call_ahead_or_at_another_step_has_another_checksum():
    """Its batches may be the same, and so may the names of its calls."""
    ahead, behind = calls_of(), calls_of()
    ahead.enter("save")
    assert unlike(begin(ahead).check, begin(behind).check)
    assert unlike(begin(calls_of(), step=1).check, begin(calls_of(), step=2).check)
    assert unlike(begin(calls_of(), call="train_batch").check, begin(calls_of(), call="eval").check)
    assert not unlike(begin(calls_of()).check, begin(calls_of()).check)
    ahead.enter("save")
    behind.enter("save")
    assert unlike(ahead._recent[-1].check, behind._recent[-1].check)


def test_on_a_device_numbers_are_read_where_batches_are_compared_whole_and_now_and_then():
    """To read them makes the host wait for the device; on the CPU they are always read."""
    turns = range(50)
    for device, expected in (("meta", [0, 1, 2, 3, 4, 8, 16, 32, 48]), ("cpu", list(turns))):
        calls = calls_of(size=1, first=0)
        x, y = X.to(device), Y.to(device)
        assert [n for n in turns if begin(calls, x, y).checksum() & module._MASK] == expected


@pytest.mark.parametrize("nested", [False, True])
def test_words_of_a_batch_are_those_of_its_own_inputs_and_targets(nested):
    """Words of nested inputs are remembered by their form, to which that of the targets belongs."""
    calls = calls_of(first=33)
    batches = [
        (X, Y),
        (X, Y.float()),
        (X, Y[:, None]),
        (X[:, :2], Y),
        (X.double(), Y),
        (X, [Y]),
        (X, None),
    ]
    for _ in range(2):
        for plain, y in batches:
            x = {"a": plain, "b": 3} if nested else plain
            begin(calls, x, y)
            assert calls._recent[-1].form == nested_form(x, y)[0]
    if nested:
        begin(calls, {"a": X, "b": 4}, Y)
        assert calls._recent[-1].form == nested_form({"a": X, "b": 4}, Y)[0]
        begin(calls, {"c": X, "b": 3}, Y)
        assert calls._recent[-1].form == nested_form({"c": X, "b": 3}, Y)[0]


def test_numbers_are_read_when_the_rank_waits_and_are_those_of_the_call():
    """Before that a call has none; each tensor of the batch counts."""
    calls = calls_of(first=9)
    batch = begin(calls, (X, X * 2), Y)
    (entry,) = calls._recent
    assert entry.values == ()
    assert entry.check & module._MASK == 0
    batch.checksum()
    (entry,) = calls._recent
    assert len(entry.values) == 3
    assert entry.check == batch.check
    assert entry.check & module._MASK > 0
    others = [((X, X * 3), Y), ((X, X * 2), Y + 1), ((X + 1, X * 2), Y)]
    checks = {begin(calls_of(first=9), x, y).checksum() for x, y in others}
    assert len(checks | {batch.check}) == 4
    assert len({check >> 26 for check in checks | {batch.check}}) == 1


def test_inference_tensors_are_read_at_once():
    """They have no version by which a change would be noticed."""
    with torch.inference_mode():
        x = X.clone()
    assert begin(calls_of(), x, Y).pending_check is None
    assert begin(calls_of(), X, Y).pending_check is not None


@pytest.mark.parametrize(("number", "reads"), [(9, False), (17, False), (48, True), (80, True)])
def test_of_batches_on_a_device_only_every_sixteenth_is_read(number, reads):
    """The host would wait for the device. The device here has no numbers."""
    x = torch.zeros(8, 4, device="meta")
    batch = begin(calls_of(first=number), x, Y)
    assert (batch.pending_check is not None) is reads
    assert begin(calls_of(first=number), X, Y).pending_check is not None


def test_without_check_data_only_the_number_of_micro_batches_counts():
    """Ranks may have batches of their own, whose numbers are not read."""
    calls = calls_of()
    calls.check_data = False
    batch = begin(calls, X, Y)
    assert (batch.pending_check, calls._recent[-1].form) == (None, "2 micro-batches")
    other = calls_of()
    other.check_data = False
    assert batch.check == begin(other, X * 2, None).check


def test_the_last_eight_calls_are_published():
    """Others wait for one of them; numbers begin at 1."""
    calls = calls_of()
    assert calls.rows() == []
    for _ in range(11):
        calls.enter("save")
    rows = calls.rows()
    assert [row[0] for row in rows] == list(range(4, 12))
    assert rows[0][2:] == ["save", "", ""]
    begin(calls).checksum()
    assert calls.rows()[-1][2:] == [
        "train_batch",
        pair_form(X.shape, X.dtype, Y.shape, Y.dtype),
        "0, 1, 2, 3; 0, 1, 2, 3",
    ]


@pytest.mark.parametrize(
    ("last_numbers", "expected"),
    [
        ({1: 2, 2: 2}, True),
        ({1: 3, 2: 2}, True),
        ({1: 1, 2: 2}, False),
        ({1: 2}, False),
        ({}, False),
    ],
)
def test_a_call_is_followed_when_all_other_ranks_have_published_it(last_numbers, expected):
    """Or a later one."""
    calls = calls_of(size=3)
    calls.enter("save")
    calls.enter("load")
    rows = {rank: [[1, 0, "x", "", ""], [n, 0, "x", "", ""]] for rank, n in last_numbers.items()}
    assert calls.followed(rows) is expected
    assert not calls.followed({**rows, 2: []})


def entered(rank, *names, size=3):
    """The calls of a rank that has called some methods."""
    calls = calls_of(rank, size)
    for name in names:
        calls.enter(name)
    return calls


def test_the_first_call_that_differs_is_named_with_the_ranks_of_each_call():
    """Later ones mostly follow from it. The message is the same on every rank."""
    ranks = [entered(0, "a", "b", "c"), entered(1, "a", "x", "y"), entered(2, "a", "b", "z")]
    messages = set()
    for rank, calls in enumerate(ranks):
        others = {other: ranks[other].rows() for other in range(3) if other != rank}
        messages.add(calls.difference(others))
    (message,) = messages
    assert message == (
        "the ranks do not do the same in call 2 of this Pipeline:\n"
        "  b on ranks 0, 2\n"
        "  x on rank 1\n" + module._ORDER
    )
    assert entered(0, "a", "b").difference({1: entered(1, "a").rows(), 2: []}) is None


def row(name, form="", values="", check=0, number=3):
    """A row of a call."""
    return [number, check, name, form, values]


@pytest.mark.parametrize("end", [END_OF_TRAIN, CLOSED])
def test_a_loader_that_ends_earlier_has_advice_of_its_own(end):
    """The number of batches is the reason, and not the order of calls."""
    message = message_of(3, {0: row("train_batch", "x"), 1: row(end)}, {})
    assert message.splitlines()[1:3] == ["  train_batch with x on rank 0", f"  {end} on rank 1"]
    assert message.endswith(module._END)


def test_values_are_shown_where_forms_are_equal():
    """Of batches with other shapes the shapes are the difference."""
    call = 5 << 26  # the bits of the call, which are equal, are not shown
    checks = {0: call | 0xAB, 1: call | 0xCD}
    rows = {rank: row("t", "x (2,)", f"1, {2 + rank}", check) for rank, check in checks.items()}
    assert message_of(3, rows, {0: "step 1", 1: "step 1"}) == (
        "the ranks have different batches in call 3 of this Pipeline:\n"
        "  t with x (2,), values 1, 2 (checksum ab) on rank 0\n"
        "  t with x (2,), values 1, 3 (checksum cd) on rank 1\n" + module._DATA
    )
    rows[1] = row("t", "x (3,)", "1, 3", 0xCD)
    rows[2] = row("t", "x (3,)", "", 0xCD)
    assert message_of(3, rows, {}).splitlines()[1:3] == [
        "  t with x (2,) on rank 0",
        "  t with x (3,) on ranks 1, 2",
    ]


def test_ranks_at_other_steps_are_told_to_load_one_checkpoint():
    """Their batches may be equal."""
    rows = {rank: row("t", "x (2,)") for rank in range(3)}
    message = message_of(3, rows, {0: "step 1", 1: "step 4", 2: "step 1"})
    assert message == (
        "the ranks do not do the same in call 3 of this Pipeline:\n"
        "  t with x (2,) at step 1 on ranks 0, 2\n"
        "  t with x (2,) at step 4 on rank 1\n" + module._STEPS
    )


def compared(*batches):
    """What each rank raises that begins with its batch: the first batches are compared whole."""
    store = HashStore()

    def job(rank):
        calls = calls_of(rank, len(batches), first=0, store=store)
        x, y, options = batches[rank]
        try:
            begin(calls, x, y, **options)
        except RanksDiffer as error:
            return str(error)
        return calls._board.statuses

    with ThreadPoolExecutor(len(batches)) as pool:
        return list(pool.map(job, range(len(batches))))


def test_all_ranks_refuse_a_first_batch_that_differs_on_one_of_them():
    """By its numbers, its step or its form; equal ones go on."""
    same = (X, Y, {})
    assert compared(same, same, same) == [["waits for the other ranks at train_batch"]] * 3
    last = X.clone()
    last[7, 3] = 0.5
    for other, words in (
        ((last, Y, {}), "the ranks have different batches in call 1"),
        ((X, Y, {"step": 3}), "at step 3 on rank 2"),
        ((X[:, :2], Y, {}), r"(8, 2) float32"),
        ((X, Y, {"call": "eval_batch"}), "eval_batch with"),
    ):
        messages = compared(same, same, other)
        assert len(set(messages)) == 1
        assert words in messages[0]


def test_a_rank_that_has_read_a_part_of_a_first_batch_differs_from_no_whole_one():
    """Its numbers have no checksum; the order of the samples is compared."""
    whole = BatchPart(X, range(8), 8, 7), Y, {}
    part = BatchPart(X[:4], range(4), 8, 7), Y, {}
    assert compared(whole, part) == [["waits for the other ranks at train_batch"]] * 2
    other = BatchPart(X[:4], range(4), 8, 9), Y, {}
    assert all("samples in order 00000009" in message for message in compared(whole, other))


def test_a_rank_that_does_not_call_is_named_at_the_deadline_and_to_the_others():
    """With what it does."""
    calls = calls_of(0, 3, first=0, deadline_s=0.0)
    text = r"rank 0 has waited 0 s for ranks 1, 2 to call train_batch, past .*\n  rank 1 is at 0F1"
    with pytest.raises(DeadlineExceeded, match=text) as raised:
        begin(calls)
    assert calls._board.failures == [(str(raised.value), False)]


@pytest.mark.parametrize("training", [True, False])
def test_a_difference_that_a_loss_shows_ends_the_run_for_all(monkeypatch, training):
    """After a training batch the weights are wrong; its own words are used if others come late."""
    monkeypatch.setattr(module, "_PATIENCE_S", 0.0)
    name = "train_batch" if training else "eval_batch"
    calls, other = calls_of(), calls_of(1)
    batch, source = begin(calls, call=name), begin(other, X + 1, call=name)
    for rows, words in (
        ({}, "rank 1 has another batch than rank 0 in call 1"),
        ({1: other.rows()}, "the ranks have different batches in call 1"),
    ):
        source.checksum()
        calls._board.others = {1: other.rows()} if rows else {}
        calls._board.failures.clear()
        with pytest.raises(RanksDiffer, match=words) as raised:
            calls.verify(1, float(source.checksum()), batch)
        assert ("the weights have been updated with it" in str(raised.value)) is training
        assert calls._board.failures == [(str(raised.value), True)]


def test_samplers_that_refer_to_each_other_are_looked_at_once():
    """A user's own may do so."""
    first, second = SimpleNamespace(), SimpleNamespace()
    first.sampler, second.batch_sampler = second, first
    loader = SimpleNamespace(sampler=first, batch_sampler=None)
    calls_of().check_loader(loader)
    samplers = module._samplers(loader)
    assert len(samplers) == 2
    assert samplers[0] is first
    assert samplers[1] is second


def test_threads_of_one_process_have_nothing_to_compare():
    """There is one call."""
    batch = make_batch(X, Y, 2, step=0, training=True)
    calls = Calls()
    calls.enter("save")
    assert calls.begin(batch, X, Y, "train_batch") is batch
    calls.verify(1, 5.0, batch)
    calls.check_loader(object())


def test_the_call_that_differs_is_named_though_later_ones_have_followed(monkeypatch):
    """A loss is compared some batches later, when the rank has called other methods."""
    monkeypatch.setattr(module, "_PATIENCE_S", 0.0)
    calls, other = calls_of(), calls_of(1)
    batch, source = begin(calls), begin(other, X + 1)
    batch.checksum()
    for _ in range(2):
        calls.enter("save")
    with pytest.raises(RanksDiffer, match="rank 1 has another batch than rank 0 in call 1"):
        calls.verify(1, float(source.checksum()), batch)
    for _ in range(8):
        calls.enter("save")
    with pytest.raises(RanksDiffer, match="rank 1 has another batch than rank 0 in call 0"):
        calls.verify(1, float(source.checksum()), batch)


def test_words_of_another_rank_are_waited_for(monkeypatch):
    """A rank publishes its calls twice a second."""
    now_s, looks = [0.0], []
    calls, other = calls_of(), calls_of(1)
    batch, source = begin(calls), begin(other, X + 1)
    source.checksum()

    def sleep(seconds):
        now_s[0] += seconds
        looks.append(now_s[0])
        if now_s[0] > 1.0:
            calls._board.others = {1: other.rows()}

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep))
    with pytest.raises(RanksDiffer, match="the ranks have different batches in call 1"):
        calls.verify(1, float(source.checksum()), batch)
    assert 1.0 < now_s[0] < 1.1
    calls._board.others = {1: [[7, 0, "later", "", ""]]}
    now_s[0] = -9.0
    with pytest.raises(RanksDiffer, match="rank 1 has another batch than rank 0 in call 1"):
        calls.verify(1, float(source.checksum()), batch)
    assert -6.0 <= now_s[0] < -5.9


def test_batches_of_other_numbers_have_other_checksums():
    """Of all 26 bits: with a few bits a difference would often go unnoticed."""
    checks = {begin(calls_of(), X + number, Y).checksum() for number in range(300)}
    assert len(checks) == 300
    assert all(check & module._MASK > 0 for check in checks)
    assert max(checks) < 2**53


def test_the_difference_that_was_found_first_is_raised_by_all(monkeypatch):
    """Another rank may have written it before this one."""
    monkeypatch.setattr(module, "_PATIENCE_S", 0.0)
    calls, other = calls_of(), calls_of(1)

    def first():
        assert calls._board.failures
        raise RanksDiffer("the first")

    calls._board.check_difference = first
    batch, source = begin(calls), begin(other, X + 1)
    with pytest.raises(RanksDiffer, match=r"^the first$"):
        calls.verify(1, float(source.checksum()), batch)
