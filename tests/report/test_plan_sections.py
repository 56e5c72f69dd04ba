"""What a report says on a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.report.document import Text
from penstock.report.plan_sections import plan_sections, plan_summary
from penstock.report.run_report import Report
from penstock.report.text import report_text


def reasons(plan):
    section = next(s for s in plan_sections(plan) if s.title == "Why this plan")
    return [block.text for block in section.blocks if isinstance(block, Text)]


def test_the_reason_names_the_limit_and_the_next_candidate(planned):
    """Why the first wins, and by how much."""
    best, second = planned.candidates[:2]
    text = reasons(planned)[0]
    assert best.why in text
    assert second.schedule in text


def test_a_faster_candidate_that_does_not_fit_is_no_slower_one(planned):
    """The table also has candidates that would be faster with more memory: with one that fits, the
    reason used to say "takes -20.0% longer; what limits it is needs 2 GiB".
    """
    best = planned.candidates[0]
    faster = replace(
        best, schedule="gpipe", step_s=0.8 * best.step_s, why="needs 2.0 GiB, has 1.0 GiB on rank 0"
    )
    text = reasons(replace(planned, candidates=(best, faster)))[0]
    assert text.endswith(" would take 20.0% less, but needs 2.0 GiB, has 1.0 GiB on rank 0.")
    assert "No other candidate fits into memory: gpipe with " in text
    slower = replace(faster, step_s=1.25 * best.step_s, why="compute of stage 1")
    text = reasons(replace(planned, candidates=(best, slower)))[0]
    assert text.endswith(", takes 25.0% longer; what limits it is compute of stage 1.")


def test_a_plan_without_alternatives_says_so(planned):
    """A setting that leaves no choice is the reader's own."""
    only = replace(planned, candidates=planned.candidates[:1])
    assert "the only candidate" in reasons(only)[0]
    assert "without alternatives" in reasons(replace(planned, candidates=()))[0]


@pytest.mark.parametrize(
    ("share", "text"),
    [(1.0, "optimal in the search space"), (0.5, "at most 50.0% of the step"), (0.0, None)],
)
def test_the_bound_says_how_much_better_a_plan_could_be(planned, share, text):
    """The gap is a statement on all plans, not only on those that were tried."""
    bound = share * planned.predicted.step_s
    plan = replace(planned, predicted=replace(planned.predicted, lower_bound_s=bound))
    texts = reasons(plan)
    assert (len(texts) == 1) if text is None else (text in texts[1])


def test_a_plan_of_nothing_has_sections_too(planned):
    """A file may hold a plan whose step takes no time."""
    nothing = replace(
        planned,
        predicted=replace(planned.predicted, step_s=0.0, memory_parts=(), data_parallel_s=None),
        remedies=(),
    )
    titles = [section.title for section in plan_sections(nothing)]
    assert titles == ["Plan", "Why this plan"]
    assert len(plan_summary(nothing)) == 2
    assert report_text(Report("", ())) == ""
