"""1F1B: its order, its time, its memory, and what slow links do to it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.families.laws import check_laws

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Kind
from penstock.schedule.replicas import start_up
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule

#: docs/literature/simulated-values.md, rows 1f1b: p, m, makespan, bubble ratio. f = 1, b = 2.
ROWS = [(2, 2, 9, 0.3333), (2, 4, 15, 0.2000), (2, 8, 27, 0.1111), (4, 4, 21, 0.4286), (4, 8, 33, 0.2727), (4, 16, 57, 0.1579),
        (8, 8, 45, 0.4667), (8, 16, 69, 0.3043), (8, 32, 117, 0.1795)]  # fmt: skip

#: docs/literature/one-f-one-b.md, p = 4, m = 8.
ORDER = """\
0: F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7
1: F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7
2: F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
3: F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"""


def test_one_f_one_b_has_the_published_order():
    """Narayanan et al. 2021, section 3.4, op by op."""
    one_f_one_b = schedule("1f1b", 4, 8)
    for line, program in zip(ORDER.splitlines(), one_f_one_b.programs, strict=True):
        stage, _, ops = line.partition(":")
        assert [str(op) for op in program] == [
            *(f"{stage}{op}" for op in ops.split()),
            f"{stage}U1",
        ]


@pytest.mark.parametrize("alias", ["dapple", "pipedream-flush", "1f1b-as", "1f1b-sno"])
def test_the_other_published_names_make_the_same_schedule(alias):
    """DAPPLE's policy A, PipeDream-Flush, BaPipe's 1F1B-AS and 1F1B-SNO are 1F1B (docs/literature/notation.md and docs/literature/hop-latency.md)."""
    assert schedule(alias, 3, 5) == schedule("1f1b", 3, 5)


def test_one_f_one_b_with_fewer_micro_batches_than_stages_never_fills():
    """Legal, and then as GPipe: all forwards first on the early stages."""
    assert (
        str(schedule("1f1b", 3, 1))
        == "rank 0 | 0F0 0B0 0U1\nrank 1 | 1F0 1B0 1U1\nrank 2 | 2F0 2B0 2U1"
    )


@pytest.mark.parametrize(("p", "m", "makespan", "ratio"), ROWS)
def test_one_f_one_b_agrees_with_the_table_of_the_literature(p, m, makespan, ratio):
    """Values of docs/literature/simulated-values.md, which another simulator computed."""
    line = simulate_schedule(schedule("1f1b", p, m), Costs(forward=1, backward=2))
    assert line.makespan == makespan
    assert line.bubble_ratio == pytest.approx(ratio, abs=5e-5)
    assert line.peak_in_flight == tuple(range(p, 0, -1))


@given(st.integers(1, 8), st.integers(1, 20), st.integers(1, 9), st.integers(1, 9))
@settings(deadline=None, max_examples=60)
def test_one_f_one_b_takes_gpipes_time_with_at_most_p_minus_s_in_flight(p, m, f, b):
    """The promise of 1F1B: the bubble of GPipe for a fraction of its memory."""
    line = simulate_schedule(schedule("1f1b", p, m), Costs(forward=f, backward=b))
    assert line.makespan == (m + p - 1) * (f + b)
    assert line.peak_in_flight == tuple(min(m, p - s) for s in range(p))


@pytest.mark.parametrize(
    ("p", "m", "c", "makespan"),
    [(4, 8, 1, 49), (4, 8, 2, 65), (4, 8, 3, 81), (4, 16, 2, 113), (8, 20, 2, 173)],
)
def test_one_f_one_b_with_slow_hops_agrees_with_the_oracles(p, m, c, makespan):
    """docs/literature/simulated-values.md: f = 1, b = 2, c seconds each way."""
    assert (
        simulate_schedule(schedule("1f1b", p, m), Costs(forward=1, backward=2, transfer=c)).makespan
        == makespan
    )


@pytest.mark.parametrize("p", range(2, 9))
@pytest.mark.parametrize(("f", "b", "c"), [(1, 2, 1), (3, 4, 2), (1, 2, 3)])
def test_one_f_one_b_pays_two_hops_for_all_but_one_micro_batch_in_p(p, f, b, c):
    """The formula of docs/literature/hop-latency.md for BaPipe's 1F1B-SNO, on its whole range."""
    for m in range(1, 40):
        expected = (m + p - 1) * (f + b) + (m + p - 2 - -(-(m - 1) // p)) * 2 * c
        assert (
            simulate_schedule(
                schedule("1f1b", p, m), Costs(forward=f, backward=b, transfer=c)
            ).makespan
            == expected
        ), m


def falling(most):
    """Numbers of forwards ahead, from 1 to `most`, that never grow."""
    return st.lists(st.integers(1, most), min_size=1, max_size=7).map(
        lambda numbers: sorted(numbers, reverse=True)
    )


@given(falling(12), st.integers(1, 9))
@settings(deadline=None, max_examples=80)
def test_any_warm_up_that_never_grows_is_sound_and_holds_as_many_as_it_says(warm_up, m):
    """AvgPipe's advance forward propagation: more forwards ahead hide the time of messages."""
    one_f_one_b = schedule("1f1b", len(warm_up), m, warm_up=warm_up)
    assert check_laws(one_f_one_b).peak_in_flight == tuple(min(m, ahead) for ahead in warm_up)


@given(st.integers(1, 6), st.integers(1, 12), st.data())
@settings(deadline=None, max_examples=60)
def test_more_forwards_ahead_than_p_minus_s_take_no_more_time_on_free_links(p, m, data):
    """Where messages take no time, further warm-up forwards do not change the makespan."""
    extra = data.draw(st.lists(st.integers(0, 6), min_size=p, max_size=p))
    one_f_one_b = schedule("1f1b", p, m, warm_up=[p - s + sum(extra[s:]) for s in range(p)])
    assert simulate_schedule(one_f_one_b, Costs(forward=1, backward=2)).makespan == (m + p - 1) * 3


@pytest.mark.parametrize("c", [0.5, 1, 1.5])
def test_warm_up_between_plain_and_eager_interpolates(c):
    """The knob for slow links (docs/literature/hop-latency.md): every forward more ahead hides some of the hops,
    until there is none to hide.
    """
    costs = Costs(forward=1, backward=2, transfer=c)
    times = []
    for more in range(4):
        warm_up = [min(4 - s + more, 2 * (4 - s) - 1) for s in range(4)]
        times.append(simulate_schedule(schedule("1f1b", 4, 16, warm_up=warm_up), costs).makespan)
    assert times == sorted(times, reverse=True)
    assert times[0] == simulate_schedule(schedule("1f1b", 4, 16), costs).makespan
    assert times[-1] == simulate_schedule(schedule("eager-1f1b", 4, 16), costs).makespan < times[0]


@given(st.integers(1, 6), st.integers(1, 9))
@settings(deadline=None, max_examples=30)
def test_one_parameter_makes_five_published_schedules(p, m):
    """docs/literature/one-f-one-b.md: naive, 1F1B, eager 1F1B and GPipe differ in how far each stage warms up, and
    in nothing else.
    """
    for name, warm_up in (
        ("naive", [1] * p),
        ("1f1b", [p - s for s in range(p)]),
        ("eager-1f1b", [2 * (p - s) - 1 for s in range(p)]),
        ("gpipe", [m] * p),
    ):
        assert schedule("1f1b", p, m, warm_up=warm_up).programs == schedule(name, p, m).programs


def test_a_warm_up_that_grows_is_refused_since_it_would_hang():
    """Stage 2 would wait for a forward that stage 1 runs only after stage 2's backward."""
    with pytest.raises(
        ScheduleError,
        match="1f1b would deadlock: stage 2 needs 3 forwards before its first backward, but stage 1 passes "
        "on 2 before it waits for that backward; warm_up must not increase from one stage to the next",
    ):
        schedule("1f1b", 3, 4, warm_up=(4, 2, 3))
    assert schedule("1f1b", 3, 2, warm_up=(4, 2, 3)).programs == schedule("gpipe", 3, 2).programs
    for warm_up in ((1, 2, 1), (2, 2, 3), (1, 3, 2)):
        with pytest.raises(ScheduleError, match="1f1b would deadlock"):
            schedule("1f1b", 3, 4, warm_up=warm_up)


@pytest.mark.parametrize("wrong", [0, -1, True, 2.0, "2", None])
def test_a_warm_up_of_no_forward_is_refused_with_its_stage(wrong):
    """A backward needs its forward."""
    with pytest.raises(
        ScheduleError,
        match=r"1f1b runs at least 1 forward before the first backward, but .* for stage 1",
    ):
        schedule("1f1b", 3, 4, warm_up=(3, wrong, 1))


def test_a_warm_up_of_another_length_is_refused():
    """One number per stage, or it is not known whose they are."""
    for warm_up in ((), (3, 2), (3, 2, 1, 1)):
        with pytest.raises(
            ScheduleError,
            match=f"1f1b in 3 stages takes a warm_up of 3 numbers, one .*, not {len(warm_up)}$",
        ):
            schedule("1f1b", 3, 4, warm_up=warm_up)
    with pytest.raises(
        ScheduleError, match="1f1b cannot use warm_up=3: object of type 'int' has no len"
    ):
        schedule("1f1b", 3, 4, warm_up=3)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(0, 6), st.booleans())
@settings(deadline=None, max_examples=40)
def test_the_ranks_of_a_stage_divide_the_program_that_it_has_alone(replicas, more, is_given):
    """PipeDream's 1F1B-RR: micro-batch n on rank n mod k of the stage, with its start-up rule or a
    warm-up for all ranks of a stage together.
    """
    micro_batches, stages = max(replicas) + more, len(replicas)
    warm_up = tuple(range(stages + 1, 1, -1)) if is_given else start_up(replicas)
    options = {"warm_up": warm_up} if is_given else {}
    divided = schedule("1f1b", stages, micro_batches, replicas=replicas, **options)
    whole = schedule("1f1b", stages, micro_batches, warm_up=warm_up)
    expected = [
        tuple(op for op in program if op.kind is Kind.U or op.micro_batch % number == rank)
        for number, program in zip(replicas, whole.programs, strict=True)
        for rank in range(number)
    ]
    assert list(divided.programs) == expected
