"""Errors of the transport become those of a run, and say who has failed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from penstock.errors import DeadlineExceeded, PeerFailed
from penstock.ranks import peer_guard
from penstock.ranks.peer_guard import PeerGuard
from penstock.transport.transport import TransportLost, TransportTimeout


def guard_of(reason=None):
    """Return the guard of rank 3, and the patience with which it has looked for a reason."""
    patience = []

    def failure(patience_s=0.0):
        patience.append(patience_s)
        return reason

    board = SimpleNamespace(failure=failure, describe_others=lambda: ["rank 0 is at 0F1 since 5 s"])
    return PeerGuard(3, board), patience


def failing(error):
    """Return a function that raises."""

    def fail():
        raise error

    return fail


def test_what_ends_in_time_passes():
    """With its result, and any error of its own."""
    guard, patience = guard_of()
    assert guard(1, lambda: "payload") == "payload"
    error = ValueError("own")
    with pytest.raises(ValueError, match="own") as caught:
        guard(1, failing(error))
    assert caught.value is error
    assert patience == []


def test_a_message_that_is_late_names_the_rank_and_what_the_others_do(monkeypatch):
    """And for how long this rank has waited."""
    times = iter([10.0, 52.5])
    monkeypatch.setattr(peer_guard, "time", SimpleNamespace(monotonic=lambda: next(times)))
    guard, patience = guard_of("a reason that nobody asks for")
    late = TransportTimeout("late")
    with pytest.raises(DeadlineExceeded) as caught:
        guard(1, failing(late))
    assert (caught.value.rank, caught.value.waited_for) == (3, "rank 1")
    assert caught.value.seconds == 42.5
    assert caught.value.other_ranks == ("rank 0 is at 0F1 since 5 s",)
    assert caught.value.__cause__ is late
    assert patience == []


@pytest.mark.parametrize("reason", [None, "rank 1 (stage 1) failed in 1F0"])
def test_a_lost_link_waits_for_the_reason_of_the_failure(reason):
    """The rank that fails closes its links before its reason is on the board."""
    guard, patience = guard_of(reason)
    lost = TransportLost("gone")
    with pytest.raises(PeerFailed) as caught:
        guard.during("gradients for 1U1", failing(lost))
    expected = reason or "the rank that was to send it ended without a message"
    assert caught.value.reason == expected
    assert (caught.value.rank, caught.value.waited_for) == (3, "gradients for 1U1")
    assert caught.value.__cause__ is lost
    assert len(patience) == 1
    assert patience[0] > 0


@pytest.mark.parametrize("reason", [None, "rank 1 ran away"])
def test_garbage_may_have_a_cause_on_another_rank(reason):
    """None if nobody has failed: then it is this rank's own."""
    guard, patience = guard_of(reason)
    cause = guard.cause("gradients for 1U1")
    assert (cause is None) == (reason is None)
    if cause is not None:
        assert (cause.rank, cause.waited_for, cause.reason) == (3, "gradients for 1U1", reason)
    assert patience[0] > 0
