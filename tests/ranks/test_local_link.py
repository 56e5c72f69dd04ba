"""The measurement of a link by two ranks; tests/measure measures real ones."""

from __future__ import annotations

from penstock.ranks import local_link


def test_two_ranks_measure_and_the_result_is_that_of_rank_0(monkeypatch):
    """Each of them joins before it measures."""
    events = []
    monkeypatch.setattr(local_link, "join", lambda: events.append("join"))
    monkeypatch.setattr(local_link, "measure_link", lambda: events.append("measure") or len(events))

    def launch(job, ranks):
        return [job() for _ in range(ranks)]

    monkeypatch.setattr(local_link, "launch", launch)
    assert local_link.measure_local_link() == 2
    assert events == ["join", "measure"] * 2
