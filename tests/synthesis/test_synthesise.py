"""The search against the zoo, against its own bound, and against optima that an independent model
proves.
"""

import math
import sys
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.synthesis.reference import optimum
from tests.synthesis.requests import best_of_zoo, held, problem_of, problems

from penstock.errors import MissingExtra, ScheduleError, SettingError
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Kind
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.synthesis import exact, local
from penstock.synthesis.bound import lower_bound, preemptive
from penstock.synthesis.problem import Constraints
from penstock.synthesis.synthesise import MOST_S, Settings, Synthesis, _run_all, synthesise
from penstock.verify.verify import verify

QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck)}
UNEVEN = Costs(
    forward=(3.0, 5.0, 2.0, 4.0),
    input_grad=(2.0, 6.0, 3.0, 4.0),
    weight_grad=(3.0, 4.0, 1.0, 5.0),
    transfer=0.5,
)


def settings_of(constraints, **more):
    """Settings with these constraints."""
    return Settings(
        placement=constraints.placement,
        memory_limit=constraints.memory_limit,
        budget_s=1000,
        **more,
    )


@settings(max_examples=12, **QUIET)
@given(problems(stages=(2, 4, 6, 8), micro_batches=8, whole=False))
def test_what_is_found_is_sound_and_within_the_limit_and_no_longer_than_the_zoo(request_):
    """The promise of the search, on random costs, with updates and halves that cost more than the
    whole.
    """
    costs, m, constraints = request_
    result = synthesise(costs, m, settings_of(constraints, max_rounds=2))
    verify(result.schedule)
    assert result.makespan == simulate_schedule(result.schedule, costs).makespan
    assert (
        constraints.memory_limit is None
        or max(held(result.schedule, costs)) <= constraints.memory_limit
    )
    zoo = best_of_zoo(costs, m, problem_of(costs, m, constraints).routes, constraints.memory_limit)
    assert result.makespan <= min(zoo.values(), default=math.inf)
    assert result.lower_bound <= result.makespan
    assert result.gap == pytest.approx(
        result.makespan / result.lower_bound - 1 if result.lower_bound else 0.0
    )


@settings(max_examples=6, **QUIET)
@given(problems(micro_batches=3))
def test_bound_search_and_proof_agree_with_an_independent_optimum(request_):
    """No bound above it, no schedule below it, and the proof right on it: the model of the test
    shares no code with ours.
    """
    costs, m, constraints = request_
    problem = problem_of(costs, m, constraints)
    least = optimum(problem)
    assert lower_bound(problem) <= least + 1e-9
    result = synthesise(costs, m, settings_of(constraints, max_rounds=3, exact=True))
    verify(result.schedule)
    assert result.proved
    assert result.makespan == pytest.approx(least, abs=1e-6)
    assert synthesise(costs, m, settings_of(constraints, max_rounds=3)).makespan >= least - 1e-9


@pytest.mark.parametrize("limit", [None, 4, 2])
def test_four_stages_and_six_micro_batches_are_proved_within_the_default_budget(limit):
    """The documentation promises proofs up to this size."""
    result = synthesise(UNEVEN, 6, Settings(exact=True, memory_limit=limit))
    assert result.proved
    assert result.gap <= 1e-6


def test_annealing_reaches_the_optimum_of_small_problems():
    """Without OR-Tools the search has to find by itself what the proof finds."""
    for limit in (4, 3, 2):
        proved = synthesise(UNEVEN, 6, Settings(exact=True, memory_limit=limit))
        assert (
            synthesise(
                UNEVEN, 6, Settings(memory_limit=limit, budget_s=1000, max_rounds=12)
            ).makespan
            == proved.makespan
        )


def test_same_seed_and_rounds_give_the_same_schedule():
    """Only the seed and the work decide, not the clock."""
    options = Settings(memory_limit=3, budget_s=1000, max_rounds=3, seed=7)
    assert synthesise(UNEVEN, 8, options).schedule == synthesise(UNEVEN, 8, options).schedule


def test_a_budget_of_nothing_still_gives_a_schedule():
    """A search that is stopped at once has the zoo, or the first rule that works where nothing of
    the zoo fits.
    """
    assert verify(synthesise(UNEVEN, 6, Settings(budget_s=0)).schedule)
    tight = synthesise(UNEVEN, 6, Settings(budget_s=0, memory_limit=2, placement="v"))
    assert max(verify(tight.schedule).peak_on_rank) <= 2
    assert tight.zoo is None


def test_any_placement_is_the_best_of_all_that_fit():
    """`any` must not lose to a placement asked for by name; here two stages to a rank cannot pay."""
    by_placement = {
        name: synthesise(UNEVEN, 6, Settings(placement=name, budget_s=1000, max_rounds=1))
        for name in ("linear", "v", "interleaved", "bidirectional")
    }
    result = synthesise(UNEVEN, 6, Settings(placement="any", budget_s=1000, max_rounds=1))
    assert result.makespan == min(by_placement.values(), key=lambda one: one.makespan).makespan
    assert result.lower_bound <= min(one.makespan for one in by_placement.values())


def test_any_placement_with_half_the_ranks_leaves_out_those_that_need_all():
    """`ranks` is how many devices there are."""
    result = synthesise(UNEVEN, 6, Settings(placement="any", ranks=2, budget_s=1000, max_rounds=0))
    assert result.schedule.ranks == 2
    assert result.placement in {"v", "interleaved"}


def test_backwards_stay_whole_where_halves_are_not_wanted():
    """Some layers cannot split their backward."""
    result = synthesise(UNEVEN, 6, Settings(split=False, budget_s=1000, max_rounds=2))
    assert not result.schedule.splits_backward
    assert result.makespan <= simulate_schedule(schedule("1f1b", 4, 6), UNEVEN).makespan


def test_halves_are_joined_where_that_costs_nothing():
    """Real halves cost a little more than the whole: on one rank, where nobody waits, none is left."""
    result = synthesise(
        Costs(forward=(1.0,), backward=(2.0,)), 4, Settings(budget_s=1000, max_rounds=1)
    )
    assert not any(op.kind in (Kind.I, Kind.W) for op in result.schedule.ops)


def test_whole_backwards_are_chosen_where_halves_cost_more():
    """A split costs I + W, so where these are twice the whole only a few are worth it."""
    costs = Costs(
        forward=(1.0,) * 4, backward=(2.0,) * 4, input_grad=(1.5,) * 4, weight_grad=(2.0,) * 4
    )
    result = synthesise(costs, 8, Settings(budget_s=1000, max_rounds=6))
    assert result.makespan <= simulate_schedule(schedule("1f1b", 4, 8), costs).makespan
    assert sum(op.kind is Kind.B for op in result.schedule.ops) > 16


def test_limits_may_differ_by_rank_and_count_bytes():
    """The first rank of 1F1B holds most; where it is the one with least memory, others have to wait
    for it.
    """
    costs = Costs(forward=(1.0, 1.0, 1.0), activation_bytes=(2**20, 2**21, 2**20))
    result = synthesise(
        costs, 6, Settings(memory_limit=("2 MiB", "4 MiB", 2**21), budget_s=1000, max_rounds=1)
    )
    assert [
        peak <= limit
        for peak, limit in zip(held(result.schedule, costs), (2**21, 2**22, 2**21), strict=True)
    ] == [True] * 3


def test_latency_and_bandwidth_are_transfers_as_simulate_has_them():
    """The kernels' seconds must be the simulator's, or bounds and programs are for other links."""
    costs = Costs(forward=(1.0, 2.0, 1.0), latency=0.25, bandwidth=4.0, boundary_bytes=2.0)
    result = synthesise(costs, 4, Settings(exact=True))
    plain = synthesise(Costs(forward=(1.0, 2.0, 1.0), transfer=0.75), 4, Settings(exact=True))
    assert result.proved
    assert result.makespan == plain.makespan


def test_links_that_are_shared_leave_the_zoo_unbeaten_and_the_bound_valid():
    """The search counts on links of their own; what it finds is compared as the costs have it."""
    costs = Costs(forward=(1.0, 2.0, 1.0, 2.0), transfer=1.0, links="shared")
    result = synthesise(costs, 6, Settings(budget_s=1000, max_rounds=1))
    zoo = best_of_zoo(costs, 6, ((0, 1, 2, 3),), None)
    assert result.lower_bound <= result.makespan <= min(zoo.values())


def test_a_limit_below_one_micro_batch_is_refused_with_what_is_needed():
    """No program exists: the message has the rank, what it needs and what it has."""
    with pytest.raises(
        ScheduleError,
        match=r"rank 1 \(stages 1, 2\) needs 2 micro-batches .* has 1; raise its limit to 2",
    ):
        synthesise(UNEVEN, 4, Settings(memory_limit=(2, 1), placement="v"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"placement": "circle"}, "no placement 'circle': take one of linear"),
        ({"placement": "v", "ranks": 3}, "placement 'v' of 4 stages has 2 ranks, not 3"),
        ({"placement": "interleaved", "ranks": 3}, "which 3 ranks cannot hold"),
        ({"ranks": 0}, "at least 1 of ranks and got 0"),
        ({"memory_limit": 0}, "memory_limit is above 0, not 0"),
        ({"memory_limit": (1, 2)}, "memory_limit has 2 entries, but there are 4 ranks"),
        ({"memory_limit": "2 GiB"}, "the costs carry no activation_bytes"),
        ({"budget_s": -1}, "budget_s of 0 seconds or more, not -1"),
        ({"budget_s": True}, "budget_s of 0 seconds or more, not True"),
        ({"budget_s": "5"}, "budget_s of 0 seconds or more, not '5'"),
        ({"budget_s": math.nan}, "budget_s of 0 seconds or more, not nan"),
        ({"max_rounds": -1}, "max_rounds of 0 or more, not -1"),
        ({"max_rounds": True}, "max_rounds of 0 or more, not True"),
        ({"seed": 0.5}, "seed of 0 or more, not 0.5"),
        ({"memory_limit": True}, "memory_limit is above 0, not True"),
        ({"memory_limit": math.nan}, "memory_limit is above 0, not nan"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, message):
    """Each message says what is taken instead."""
    with pytest.raises(ScheduleError, match=message):
        synthesise(UNEVEN, 4, Settings(**options))


def test_shapes_that_a_placement_cannot_have_are_refused():
    """What needs two stages on a rank, or two ways, says so."""
    three = Costs(forward=(1.0,) * 3)
    with pytest.raises(ScheduleError, match="takes an even number of stages, not 3"):
        synthesise(three, 4, Settings(placement="v"))
    with pytest.raises(ScheduleError, match="it takes 2 or more, not 1"):
        synthesise(three, 1, Settings(placement="bidirectional"))
    with pytest.raises(ScheduleError, match="needs 2 stages or more"):
        synthesise(Costs(forward=(1.0,)), 2, Settings(placement="bidirectional"))
    with pytest.raises(ScheduleError, match="no placement is possible"):
        synthesise(three, 4, Settings(placement="any", memory_limit=0.5))
    with pytest.raises(ScheduleError, match="do not tell the number of stages"):
        synthesise(Costs(), 4)
    with pytest.raises(SettingError, match="differs by micro-batch"):
        synthesise(Costs(forward=((1.0, 2.0), (1.0, 2.0))), 2)


def test_a_proof_without_or_tools_names_the_extra(monkeypatch):
    """OR-Tools is optional; whoever asks for a proof learns how to get it."""
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(
        MissingExtra,
        match=r"exact=True needs ortools; install it with: pip install 'penstock\[search\]'",
    ):
        synthesise(UNEVEN, 4, Settings(exact=True))


def test_a_proof_that_runs_out_of_time_says_so():
    """The bound is still one, and the best program found is returned."""
    problem = problem_of(UNEVEN, 6, Constraints("linear", 2))
    start = schedule("naive", 4, 6)
    proof = exact.prove(problem, start, simulate_schedule(start, UNEVEN).makespan, until_s=0.0)
    assert proof.schedule is None
    assert proof.lower_bound == pytest.approx(lower_bound(problem), rel=1e-6)


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=5
    )
)
def test_preemptive_bound_is_that_of_the_fullest_subset(jobs):
    """Carlier's formula: over all subsets, least head + work + least tail."""
    subsets = [
        [job for i, job in enumerate(jobs) if mask >> i & 1 and job[1]]
        for mask in range(1, 2 ** len(jobs))
    ]
    bounds = [
        min(h for h, _, _ in some) + sum(p for _, p, _ in some) + min(t for *_, t in some)
        for some in subsets
        if some
    ]
    assert preemptive(jobs) == max(bounds, default=0)


def test_the_bound_is_one_for_a_zoo_schedule_that_hands_activations_to_partners():
    """`bpipe` holds less than any other in its time: where it wins, limits bind it less, and the
    bound must not call that wrong.
    """
    costs = Costs(
        forward=(1.0,) * 8, backward=(2.0,) * 8, input_grad=(2.0,) * 8, weight_grad=(2.0,) * 8
    )
    result = synthesise(costs, 16, Settings(memory_limit=5, budget_s=1000, max_rounds=0))
    bpipe = simulate_schedule(schedule("bpipe", 8, 16), costs).makespan
    assert result.lower_bound <= result.makespan <= bpipe


@pytest.mark.parametrize(
    ("options", "rounds", "rule_ops"),
    [
        ({}, 100, 5e6),
        ({"budget_s": 0.5}, 10, 5e5),
        ({"budget_s": 0}, 0, 0),
        ({"budget_s": 10, "exact": True}, 60, 1e7),
        ({"budget_s": math.inf}, round(MOST_S * 20), math.inf),
        ({"max_rounds": 7}, 7, math.inf),
        ({"max_rounds": 0, "budget_s": 1}, 0, math.inf),
        ({"max_rounds": 7, "exact": True}, 7, math.inf),
    ],
)
def test_work_follows_from_the_budget_or_is_given(options, rounds, rule_ops):
    """The clock only ends a search that takes longer than usual: the same budget must give the same
    result on every machine. The larger part of a budget with a proof is for the proof.
    """
    options = Settings(**options)
    assert (options.rounds, options.rule_ops) == (rounds, rule_ops)


class FakeTask:
    """The search of a placement that needs a number of rounds to reach its makespan."""

    def __init__(self, name, least, zoo_s, reached_s, needed, log):
        self.name, self.least, self.makespan = name, least, zoo_s
        self.reached_s, self.needed, self.rounds, self.log = reached_s, needed, 0, log

    @property
    def proved(self):
        return self.makespan <= self.least

    def run(self, deadline, rounds):
        self.rounds = min(rounds, self.needed)
        self.makespan = min(self.makespan, self.reached_s)
        self.log.append((self.name, rounds))

    def prove(self, limit_s):
        self.log.append((self.name, "proof", limit_s))


class FakeDeadline:
    """A clock that stands still."""

    remaining_s = 90.0


def test_placements_are_searched_in_the_order_of_their_bounds_and_share_the_rounds():
    """What one does not need is left for the others. A placement whose bound is no less than the
    best makespan so far cannot win.
    """
    log = []
    tasks = [
        FakeTask("c", 7.0, 20.0, 15.0, 10, log),
        FakeTask("a", 5.0, 20.0, 9.0, 3, log),
        FakeTask("d", 9.0, 20.0, 12.0, 10, log),
        FakeTask("b", 6.0, 20.0, 10.0, 100, log),
    ]
    _run_all(tasks, Settings(budget_s=2), FakeDeadline())
    assert log == [("a", 40 // 4), ("b", 37 // 3), ("c", 25 // 2)]
    log.clear()
    _run_all(tasks[:2], Settings(max_rounds=6), FakeDeadline())
    assert log == [("a", 6), ("c", 6)]


def test_proofs_share_the_time_that_is_left():
    """A search that has reached its bound needs none; the first is run even if it cannot win."""
    log = []
    tasks = [
        FakeTask("a", 5.0, 20.0, 9.0, 3, log),
        FakeTask("b", 6.0, 20.0, 6.0, 3, log),
    ]
    _run_all(tasks, Settings(max_rounds=2, exact=True), FakeDeadline())
    assert log == [("a", 2), ("a", "proof", pytest.approx(0.7 * 45)), ("b", 2)]
    log.clear()
    _run_all([FakeTask("a", 5.0, 5.0, 5.0, 3, log)], Settings(exact=True), FakeDeadline())
    assert log == [("a", 30)]


def test_a_makespan_that_rounding_puts_above_its_bound_needs_no_proof(monkeypatch):
    """1F1B is optimal here, but the sum of its seconds is one digit above that of the bound."""
    costs = Costs(forward=(0.3, 0.3, 0.1), backward=(1 / 3, 0.3, 0.1), transfer=0.1)
    monkeypatch.delattr(exact, "prove")
    result = synthesise(costs, 4, Settings(exact=True, split=False, max_rounds=0))
    assert result.makespan > result.lower_bound
    assert result.proved


def test_a_schedule_carries_the_facts_of_its_search():
    """A reader of a plan sees how good it is; that the clock ended the search only if it did."""
    result = synthesise(UNEVEN, 6, Settings(memory_limit=3, budget_s=1000, max_rounds=1))
    assert (result.rounds, result.cut_short) == (1, False)
    assert result.schedule.name == "synthesised"
    assert dict(result.schedule.options) == {
        "placement": "linear",
        "makespan": result.makespan,
        "lower_bound": result.lower_bound,
        "gap": result.gap,
        "proved": result.proved,
        "zoo": result.zoo,
        "zoo_makespan": result.zoo_makespan,
    }
    actual = schedule(result.zoo, 4, 6)
    assert result.zoo_makespan == simulate_schedule(actual, UNEVEN).makespan
    late = synthesise(UNEVEN, 6, Settings(budget_s=0, memory_limit=4))
    assert late.rounds == 0
    short = Synthesis(late.schedule, 3.0, 2.0, 0.5, False, "v", None, None, 4, cut_short=True)
    assert short.facts() == (
        ("placement", "v"),
        ("makespan", 3.0),
        ("lower_bound", 2.0),
        ("gap", 0.5),
        ("proved", False),
        ("zoo", None),
        ("zoo_makespan", None),
        ("cut_short", True),
    )


def test_updates_run_early_where_ranks_hold_several_stages():
    """The search makes programs with updates in idle time or at the end; moving one ahead of other
    work can shorten the batch further.
    """
    costs = Costs(
        forward=(1.0,) * 4, backward=(2.0,) * 4, update=(4.0, 0.0, 0.0, 4.0), transfer=2.0
    )
    result = synthesise(costs, 2, Settings(placement="v", split=False, budget_s=1000, max_rounds=4))
    late = result.schedule.programs
    moved = tuple(
        (
            *(op for op in program if op.kind is not Kind.U),
            *(op for op in program if op.kind is Kind.U),
        )
        for program in late
    )
    at_end = simulate_schedule(replace(result.schedule, programs=moved), costs).makespan
    assert result.makespan < at_end
    verify(result.schedule)


@pytest.mark.parametrize(("placement", "count"), [("v", 3), ("linear", 1)])
def test_early_updates_are_tried_in_the_whole_pool_where_ranks_hold_several_stages(
    monkeypatch, placement, count
):
    """The second shortest may then be the shortest; a rank with one stage updates it last in any
    case.
    """
    costs = Costs(
        forward=(1.0,) * 4, backward=(2.0,) * 4, update=(4.0, 0.0, 0.0, 4.0), transfer=2.0
    )
    options = Settings(placement=placement, split=False, budget_s=1000, max_rounds=0)
    pool = [synthesise(costs, 2, options).schedule] * 3
    tried = []

    def schedules(self):
        """Yield a pool of three, and record how many are taken of it."""
        for member in pool:
            tried.append(member)
            yield member

    monkeypatch.setattr(local.Search, "schedules", schedules)
    synthesise(costs, 2, options)
    assert len(tried) == count


def test_the_bound_counts_the_limit_unless_the_best_schedule_moves_activations():
    """Without limits it is lower, and proves less. BPipe holds activations on other ranks, so that
    the limits of its stages are no bound for it.
    """
    free = lower_bound(problem_of(UNEVEN, 6, Constraints("linear")))
    for limit, is_bpipe in ((2, False), (3, True)):
        result = synthesise(UNEVEN, 6, Settings(memory_limit=limit, budget_s=0))
        bound = lower_bound(problem_of(UNEVEN, 6, Constraints("linear", limit)))
        assert bound > free
        assert (result.zoo == "bpipe") == is_bpipe
        assert result.lower_bound == (free if is_bpipe else bound)


def test_the_bound_of_cheaper_pairs_is_lower_only_if_the_best_schedule_has_them():
    """`fbp-as` runs an F and a B at the same time: where that is cheaper, it is the best."""
    costs = {"forward": (2.0,) * 3, "backward": (4.0,) * 3}
    plain = synthesise(Costs(**costs), 6, Settings(split=False, budget_s=0))
    paired = synthesise(
        Costs(**costs, forward_backward=(4.0,) * 3), 6, Settings(split=False, budget_s=0)
    )
    assert paired.makespan < plain.makespan
    assert paired.zoo == "fbp-as"
    assert paired.lower_bound < plain.lower_bound
    assert paired.lower_bound <= paired.makespan
    dear = synthesise(
        Costs(**costs, forward_backward=(9.0,) * 3), 6, Settings(split=False, budget_s=0)
    )
    assert dear.makespan == plain.makespan
    assert dear.lower_bound == plain.lower_bound
