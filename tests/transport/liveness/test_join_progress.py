"""Messages on ranks that have not joined, with a clock that the test sets."""

from __future__ import annotations

from penstock.transport.liveness.join_progress import JoinProgress


def test_missing_ranks_are_named_after_ten_seconds_and_at_each_doubling():
    """A rank looks ten times a second; the wait may take 300 s."""
    now_s, messages = [100.0], []
    progress = JoinProgress(300.0, messages.append, lambda: now_s[0])
    for tenth in range(450):
        now_s[0] = 100.0 + tenth / 10
        progress.look([5, 2] if tenth < 150 else [5])
    assert messages == [
        "waiting for ranks 2, 5 to join the run, for 10 s of at most 300 s",
        "waiting for rank 5 to join the run, for 20 s of at most 300 s",
        "waiting for rank 5 to join the run, for 40 s of at most 300 s",
    ]


def test_a_look_after_a_long_pause_gives_one_message():
    """A process may have been stopped meanwhile."""
    now_s, messages = [0.0], []
    progress = JoinProgress(300.0, messages.append, lambda: now_s[0])
    now_s[0] = 100.0
    progress.look(range(1, 1000))
    progress.look([1])
    assert len(messages) == 1
    assert len(messages[0]) < 140
