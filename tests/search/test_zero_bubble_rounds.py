"""Round by round: every style makes sound programs, and its own clock is the simulator's."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule.op import Kind, Schedule
from penstock.search.stage_seconds import StageSeconds
from penstock.search.zero_bubble_rounds import STYLES, Memory, draft
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.verify.verify import verify


@pytest.mark.parametrize("style", STYLES, ids=str)
@given(st.integers(1, 6), st.integers(1, 14), st.data())
@settings(deadline=None, max_examples=40)
def test_every_style_makes_sound_programs_and_knows_how_long_they_take(style, p, m, data):
    """The style is chosen by these seconds, so they must be those that the simulator finds.

    Hops take no longer than the shortest op, or messages would queue for a link, which the
    heuristic does not count.
    """

    def row(count, least=1, most=9):
        return data.draw(st.lists(st.integers(least, most), min_size=count, max_size=count))

    costs = Costs(
        forward=row(p), input_grad=row(p), weight_grad=row(p, 0), transfer=row(p - 1, 0, 1)
    )
    limits = row(p, 1, 2 * p)
    fractions = data.draw(st.lists(st.sampled_from([0.25, 0.5, 1.0]), min_size=p, max_size=p))
    result = draft(StageSeconds.of(costs, m), m, Memory(limits, fractions), style)
    schedule = Schedule(result.programs())
    line = simulate_schedule(schedule, costs)
    assert line.makespan == result.makespan_s
    ranks = [[event for event in line.compute if event.rank == rank] for rank in range(p)]
    assert result.spans_s == tuple(
        max(e.end for e in events) - min(e.start for e in events) for events in ranks
    )
    updated = Schedule.parse(
        "\n".join(
            f"{' '.join(map(str, ops))} {rank}U1" for rank, ops in enumerate(result.programs())
        )
    )
    verify(updated)
    for order, limit, fraction in zip(result.orders, limits, fractions, strict=True):
        change = {Kind.F: 1.0, Kind.I: fraction - 1.0, Kind.W: -fraction}
        assert max(accumulate(change[kind] for kind in order)) <= limit
        assert order.count(Kind.F) == order.count(Kind.I) == order.count(Kind.W) == m


def test_there_are_eight_styles():
    """Three questions with two answers each."""
    assert len(set(STYLES)) == 8


#: Per case the seconds and the memory, and by style (punctual, gradient first, eager) the kinds of
#: every stage's ops.
CASES = (
    (
        Costs(forward=[4, 4, 3], input_grad=[4, 2, 4], weight_grad=[0, 3, 3], transfer=[0, 0]),
        Memory([6, 3, 6], [1.0] * 3),
        {
            (True, True, True): "FFFFIWIFWIWIWIW FFIFWIFIWFIWWIW FIFIFIWFIFIWWWW",
            (True, True, False): "FFFFIWIFWIWIWIW FFIFWIFIWFIWIWW FIFIFIFIFIWWWWW",
            (True, False, True): "FFFFIFWIWIWIWIW FFIFWIFIWFIWWIW FIFIFIWFIFIWWWW",
            (True, False, False): "FFFFIFWIWIWIWIW FFIFWIFIWFIWIWW FIFIFIFIFIWWWWW",
            (False, True, True): "FFFFFIWIWIWIWIW FFFIWFIWIFIWWIW FIFIFIFIFIWWWWW",
            (False, True, False): "FFFFFIWIWIWIWIW FFFIWFIIWFIWIWW FIFIFIFIFIWWWWW",
            (False, False, True): "FFFFFIWIWIWIWIW FFFIWFIWFIIWWIW FIFIFIFIFIWWWWW",
            (False, False, False): "FFFFFIWIWIWIWIW FFFIWFIWFIIWIWW FIFIFIFIFIWWWWW",
        },
    ),
    (
        Costs(forward=[4, 4, 2], input_grad=[4, 1, 3], weight_grad=[4, 2, 3], transfer=[1, 1]),
        Memory([4, 3, 2], [0.25, 0.5, 0.5]),
        {
            (True, True, True): "FFFFIWIFWIWIWIW FFIFIFWWIWFIWIW FIFIWFIFIWWWFIW",
            (True, True, False): "FFFFIIFWWIWIWIW FFIFIFWIWWFIWIW FIFIFIWFIWFIWWW",
            (True, False, True): "FFFFIWFIWIWIWIW FFIFIFWWIFIWWIW FIFIWFIFIWFIWWW",
            (True, False, False): "FFFFIWFIWIWIWIW FFIFIFWIWFWIWIW FIFIFIWFIWFIWWW",
            (False, True, True): "FFFFIIFWWIWIWIW FFFIWIFIWWFIWIW FIFIFIWFIWWFIWW",
            (False, True, False): "FFFFIIFWWIWIWIW FFFIWIFIWWFIWIW FIFIFIWFIWFIWWW",
            (False, False, True): "FFFFIWFIWIWIWIW FFFIWFIWFIIWWIW FIFIFIWFIWWFIWW",
            (False, False, False): "FFFFIWFIWIWIWIW FFFIWFIWFIIWWIW FIFIFIWFIWFIWWW",
        },
    ),
)


@pytest.mark.parametrize(("costs", "memory", "orders"), CASES, ids=["long", "tight"])
def test_each_style_answers_the_choices_in_its_own_way(costs, memory, orders):
    """A warm-up forward more or less, a forward that waits for a gradient, a weight gradient that
    is too long for its gap. Any other program is sound too, so that only the programs show the
    rule.
    """
    seconds = StageSeconds.of(costs, 5)
    for style in STYLES:
        result = draft(seconds, 5, memory, style)
        kinds = " ".join("".join(kind.value for kind in order) for order in result.orders)
        assert kinds == orders[style.punctual, style.gradient_first, style.eager], style


def test_equal_stages_in_the_memory_of_1f1b_and_in_twice_as_much():
    """With room for p micro-batches the step takes what ZB-H1 takes; with 2 p - 1 no stage is idle
    between its first and its last op.
    """
    costs = Costs(forward=[1.0] * 4, input_grad=[1.0] * 4, weight_grad=[1.0] * 4)
    seconds = StageSeconds.of(costs, 12)
    for limit, makespan_s, span_s in ((4, 3 * 12 + 3, 39), (7, 39, 36)):
        drafts = [draft(seconds, 12, Memory([limit] * 4, [1.0] * 4), style) for style in STYLES]
        assert min(result.makespan_s for result in drafts) == makespan_s
        assert min(max(result.spans_s) for result in drafts) == span_s
