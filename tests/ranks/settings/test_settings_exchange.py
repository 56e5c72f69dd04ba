"""Comparison of ranks before they run, over a store in memory with a thread for each rank."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from penstock.errors import DeadlineExceeded, PenstockError, RanksDiffer, RunError
from penstock.ranks.settings import settings_exchange
from penstock.ranks.settings.setting_differences import Description
from penstock.ranks.settings.settings_exchange import (
    SettingsExchange,
    missing_keys,
    report_failures,
)


def described(seed, kind="Linear"):
    """Return the description of a rank."""
    return Description({"seed": seed}, {"layer": [("0", kind)]}, [], [])


def outcome(meeting, description):
    """Return None if the ranks agree, else the error."""
    try:
        return meeting.compare(description)
    except PenstockError as error:
        return error


def meet(*descriptions):
    """Return the outcomes of all ranks."""
    store = HashStore()
    size = len(descriptions)
    meetings = [SettingsExchange(store, rank, size, 30.0) for rank in range(size)]
    with ThreadPoolExecutor(size) as ranks:
        return list(ranks.map(outcome, meetings, descriptions))


def test_ranks_that_agree_continue():
    """They can be compared any number of times."""
    assert meet(described(seed="0"), described(seed="0"), described(seed="0")) == [None] * 3


def test_every_rank_has_the_same_message_with_all_differences():
    """The output of any rank suffices to see all differences."""
    errors = meet(described(seed="0"), described(seed="0"), described(seed="1", kind="Conv2d"))
    assert all(isinstance(error, RanksDiffer) for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert errors[0].differences == (
        "seed: 0 on ranks 0, 1; 1 on rank 2",
        "layer 0: Linear on ranks 0, 1; Conv2d on rank 2",
    )


def test_a_list_that_one_rank_alone_has_is_a_difference_on_every_rank():
    """Another version of Penstock may compare more; no rank may wait for lists of the others."""
    more = described(seed="0")
    more.lists["kernel"] = [("0", "fused")]
    errors = meet(described(seed="0"), more)
    assert [error.differences for error in errors] == [
        ("kernel 0: missing on rank 0; fused on rank 1",)
    ] * 2


def test_a_failed_rank_reports_its_reason_to_the_others():
    """Otherwise they would wait until the deadline."""
    store = HashStore()
    SettingsExchange(store, 1, 2, 30.0).fail(ValueError("no such layer"))
    with pytest.raises(
        PenstockError, match="rank 1 could not make its Pipeline: ValueError: no such layer"
    ):
        SettingsExchange(store, 0, 2, 30.0).compare(described(seed="0"))


def test_a_failure_after_a_rank_has_sent_its_key_does_not_end_the_exchange():
    """The key may arrive between the look at the keys and the look at failures."""
    store = HashStore()

    def send_and_fail():
        store.set("0/1", "")
        raise RunError("rank 1 failed at a later point")

    assert missing_keys(store, ["0/1"], send_and_fail, 30.0) == []
    with pytest.raises(RunError, match="rank 1 failed at a later point"):
        missing_keys(store, ["0/1", "0/2"], send_and_fail, 30.0)


@pytest.mark.parametrize(("size", "missing"), [(2, "rank 1"), (3, "ranks 1, 2")])
def test_a_missing_rank_is_named_at_the_deadline(size, missing):
    """It may still be reading its data."""
    text = rf"rank 0 has waited \d+ s for {missing} to make the same Pipeline"
    with pytest.raises(DeadlineExceeded, match=text):
        SettingsExchange(HashStore(), 0, size, 0.01).compare(described(seed="0"))


def test_keys_are_awaited_for_the_deadline_and_the_missing_ranks_are_returned(monkeypatch):
    """Whatever the number of keys; pauses between looks grow, so that a slow rank costs little."""
    store, pauses = HashStore(), []
    clock = SimpleNamespace(monotonic=lambda: sum(pauses), sleep=pauses.append)
    monkeypatch.setattr(settings_exchange, "time", clock)
    store.set("a/1", "")
    keys = [f"a/{rank}" for rank in range(4)]
    assert missing_keys(store, keys, lambda: None, 0.5) == [0, 2, 3]
    assert 0.5 <= sum(pauses) <= 0.52
    assert pauses == sorted(pauses)
    assert pauses[0] < pauses[-1] == 0.02


def test_every_exchange_has_values_of_its_own_in_the_order_of_the_ranks():
    """A rank that is one exchange ahead must not read the values of the one before."""
    store = HashStore()
    exchanges = [SettingsExchange(store, rank, 3, 30.0) for rank in range(3)]
    for turn in range(2):
        with ThreadPoolExecutor(3) as ranks:
            values = [{"rank": rank, "turn": turn} for rank in range(3)]
            results = list(ranks.map(SettingsExchange.exchange, exchanges, values))
        assert results == [values] * 3


def test_only_lists_that_differ_are_exchanged():
    """Those of a large model have thousands of rows."""
    sent = []
    exchange = SettingsExchange(HashStore(), 0, 2, 30.0)
    mine = Description({}, {"layer": [("0", "Linear")], "module": [("0", "a")]}, [], [])
    other = Description({}, {"layer": [("0", "Linear")], "module": [("0", "b")]}, [], [])

    def answer(value):
        sent.append(dict(value))
        if "facts" in value:
            digests = {
                topic: settings_exchange._digest(rows) for topic, rows in other.lists.items()
            }
            return [value, {**asdict(other), "lists": {}, "digests": digests}]
        return [value, {topic: other.lists[topic] for topic in value}]

    exchange.exchange = answer
    with pytest.raises(RanksDiffer) as raised:
        exchange.compare(mine)
    assert raised.value.differences == ("module 0: a on rank 0; b on rank 1",)
    assert sent[0]["lists"] == {}
    assert list(sent[0]["digests"]) == ["layer", "module"]
    assert sent[1:] == [{"module": [("0", "a")]}]
    assert exchange.closed


def test_copies_of_a_pipeline_compare_with_all_processes_of_the_job():
    """Where all have the same settings; else with those of their own pipeline alone."""
    compared = []
    job = SimpleNamespace(compare=compared.append)
    exchange = SettingsExchange(HashStore(), 0, 1, 30.0, job)
    description = described(seed="0")
    exchange.compare(description)
    assert compared == []
    exchange.spans_job = True
    exchange.compare(description)
    assert compared == [description]


def test_a_failure_is_reported_to_the_job_and_the_first_reason_stays():
    """Processes of other pipelines wait, too; a store that is gone is no further error."""
    job = SettingsExchange(HashStore(), 5, 8, 30.0)
    exchange = SettingsExchange(HashStore(), 1, 2, 30.0, job)
    exchange.fail(ValueError("first\x1b"))
    exchange.fail(ValueError("second"))
    assert exchange.closed
    assert job.closed
    for one, rank in ((exchange, 1), (job, 5)):
        failure = json.loads(one.store.get("failure"))
        assert failure == {"rank": rank, "reason": "ValueError: first\x1b"}
        with pytest.raises(
            RunError, match=rf"^rank {rank} could not make .*: ValueError: first\\x1b\."
        ):
            one._check()

    def gone(*_):
        raise RuntimeError

    exchange.store = SimpleNamespace(compare_set=gone)
    exchange.fail(ValueError("third"))


def test_an_exchange_that_ends_by_the_failure_of_another_rank_is_closed(monkeypatch):
    """This rank need not report it again; a lost rank counts as well."""
    exchange = SettingsExchange(HashStore(), 0, 2, 30.0)
    monkeypatch.setattr(settings_exchange, "lost_ranks", lambda: "rank 1 is gone")
    with pytest.raises(RunError, match=r"^rank 1 is gone$"):
        exchange.exchange({})
    assert exchange.closed


def test_comparisons_of_a_job_are_numbered_and_have_stores_of_their_own(monkeypatch):
    """A second pipeline must not read the settings of the first."""
    store = HashStore()
    module = settings_exchange.dist
    monkeypatch.setattr(module.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(module, "get_rank", lambda: 2)
    monkeypatch.setattr(module, "get_world_size", lambda: 4)
    first, second = SettingsExchange.next(7.0), SettingsExchange.next(8.0)
    assert second.number == first.number + 1
    assert (first.rank, first.size, first.deadline_s, second.deadline_s) == (2, 4, 7.0, 8.0)
    for exchange in (first, second):
        exchange.store.set("key", str(exchange.number))
    for exchange in (first, second):
        key = f"penstock/meeting/{exchange.number}/key"
        assert store.get(key) == str(exchange.number).encode()


class Exchange:
    """A comparison that notes what is reported to it."""

    def __init__(self, *, closed=False):
        self.closed, self.errors = closed, []

    def fail(self, error):
        """Note an error."""
        self.errors.append(error)


def constructed(monkeypatch, *, ranks, exchange=None, error=None, world=None, **options):
    """What is reported by a constructor that may fail: to its own comparison, or to the next one."""
    following = Exchange()
    monkeypatch.setattr(settings_exchange.dist, "is_initialized", lambda: ranks)
    monkeypatch.setattr(SettingsExchange, "next", lambda deadline_s: following)

    class Pipeline:
        """Something to construct."""

        @report_failures
        def __init__(self, *, executor=None):
            if exchange is not None:
                self._settings_exchange = exchange
            if world is not None:
                self._world = world
            if error is not None:
                raise error

    if error is None:
        Pipeline(**options)
    else:
        with pytest.raises(type(error)) as raised:
            Pipeline(**options)
        assert raised.value is error
    return following.errors


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_a_constructor_that_fails_reports_it_once_to_the_ranks_that_wait(monkeypatch, error):
    """Before it has a comparison, to the one that the others are in; alone, to no other rank."""
    assert constructed(monkeypatch, ranks=True, error=error) == [error]
    assert constructed(monkeypatch, ranks=True) == []
    assert constructed(monkeypatch, ranks=False, error=error) == []
    assert constructed(monkeypatch, ranks=True, error=error, executor="threads") == []
    exchange = Exchange()
    assert constructed(monkeypatch, ranks=True, error=error, exchange=exchange) == []
    assert exchange.errors == [error]
    closed = Exchange(closed=True)
    assert constructed(monkeypatch, ranks=True, error=error, exchange=closed) == []
    assert closed.errors == []


def test_a_world_that_was_made_before_the_failure_is_abandoned_and_closed(monkeypatch):
    """Other ranks may wait in it already; threads have no others."""
    calls, error = [], ValueError("no")
    world = SimpleNamespace(abandon=calls.append, close=lambda: calls.append("close"))
    constructed(monkeypatch, ranks=True, error=error, exchange=Exchange(), world=world)
    assert calls == [error, "close"]
    constructed(monkeypatch, ranks=False, error=error, world=world)
    assert len(calls) == 2


def test_a_store_that_is_gone_is_an_error_of_the_run():
    """torch's own error names neither the rank nor what it did."""

    def refuse(*_):
        raise RuntimeError("Connection closed by peer")

    exchange = SettingsExchange(SimpleNamespace(set=refuse), 0, 2, 30.0)
    text = "could not compare its settings with the other ranks': Connection closed"
    with pytest.raises(RunError, match=text):
        exchange.exchange({})
