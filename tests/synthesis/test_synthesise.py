"""The search against the zoo, against its own bound, and against optima that an independent model
proves.
"""

import math
import time
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.synthesis.reference import optimum
from tests.synthesis.requests import UNEVEN, best_of_zoo, held, problem_of, problems

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Kind
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.synthesis import exact, local
from penstock.synthesis.bound import lower_bound, preemptive
from penstock.synthesis.problem import Constraints
from penstock.synthesis.synthesise import Settings, Synthesis, synthesise
from penstock.verify.verify import verify

QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck)}


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
    assert (tight.zoo, tight.zoo_makespan) == (None, None)


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
    """Real halves cost a little more than the whole: on one rank, which never waits, none is left."""
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
    stopped = synthesise(UNEVEN, 6, Settings(budget_s=0, memory_limit=4, max_rounds=5))
    assert (stopped.rounds, stopped.cut_short) == (0, True)
    assert stopped.schedule.options[-1] == ("cut_short", True)
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


def test_a_search_that_cannot_improve_has_no_rounds_and_no_gap():
    """On one rank the first program is optimal; without any seconds the gap is 0 as well."""
    for forward in (1.0, 0.0):
        costs = Costs(forward=(forward,), backward=(2 * forward,))
        result = synthesise(costs, 3, Settings(budget_s=1000, max_rounds=5))
        assert (result.makespan, result.gap, result.rounds) == (9 * forward, 0.0, 0)
        assert not synthesise(costs, 3, Settings(budget_s=0)).cut_short, "nothing was left to do"
        assert result.proved


def test_of_equal_schedules_of_the_zoo_the_first_is_named():
    """In the order of their names, whichever of them the search starts from."""
    costs = Costs(forward=(1.0,) * 3, backward=(2.0,) * 3)
    result = synthesise(costs, 4, Settings(split=False, budget_s=0))
    gpipe = simulate_schedule(schedule("gpipe", 3, 4), costs).makespan
    assert (result.zoo, result.zoo_makespan) == ("1f1b", gpipe)
    assert result.schedule.programs == schedule("1f1b", 3, 4).programs


class Recorder:
    """Stands for `exact.prove`: records its arguments and returns a result."""

    def __init__(self, proof):
        self.proof, self.calls = proof, []

    def __call__(self, *arguments):
        self.calls.append(arguments)
        return self.proof


@pytest.mark.parametrize(("bound", "is_proved"), [(0.0, False), (math.inf, True)])
def test_a_proof_is_of_the_best_schedule_and_raises_the_bound_up_to_its_makespan(
    monkeypatch, bound, is_proved
):
    """It gets the problem, the seed and the time that is left; a lower bound than before is none."""
    recorder = Recorder(exact.Proof(None, bound))
    monkeypatch.setattr(exact, "prove", recorder)
    options = Settings(memory_limit=2, budget_s=1000, max_rounds=0, seed=5)
    plain = synthesise(UNEVEN, 6, options)
    result = synthesise(UNEVEN, 6, replace(options, exact=True))
    ((problem, best, most, until_s, seed),) = recorder.calls
    assert problem == problem_of(UNEVEN, 6, Constraints("linear", 2))
    assert (best.programs, most, seed) == (plain.schedule.programs, plain.makespan, 5)
    assert 0 < until_s - time.monotonic() < 1000
    assert (result.makespan, result.proved) == (plain.makespan, is_proved)
    assert result.lower_bound == (plain.makespan if is_proved else plain.lower_bound)


def test_a_shorter_schedule_of_the_proof_is_the_result(monkeypatch):
    """The bound is then its makespan at most."""
    shorter = synthesise(UNEVEN, 6, Settings(memory_limit=2, budget_s=1000, max_rounds=0))
    monkeypatch.setattr(exact, "prove", Recorder(exact.Proof(shorter.schedule, 1e9)))
    options = Settings(memory_limit=2, budget_s=0, exact=True)
    assert synthesise(UNEVEN, 6, replace(options, exact=False)).makespan > shorter.makespan
    result = synthesise(UNEVEN, 6, options)
    assert result.schedule.programs == shorter.schedule.programs
    assert (result.makespan, result.gap) == (shorter.makespan, 0.0)


def test_a_schedule_that_moves_activations_is_not_proved(monkeypatch):
    """The model of the proof has no such programs, and would call a bound what BPipe undercuts."""
    recorder = Recorder(exact.Proof(None, 1e9))
    monkeypatch.setattr(exact, "prove", recorder)
    result = synthesise(UNEVEN, 6, Settings(memory_limit=3, budget_s=0, exact=True))
    assert (result.zoo, result.proved, recorder.calls) == ("bpipe", False, [])


def test_the_search_starts_from_the_schedules_of_the_zoo_with_its_seed(monkeypatch):
    """Each one that fits; what they are is tested with the zoo."""
    started, seeds = [], []

    def start(search, candidate):
        """Record the schedule and the seed of the search."""
        started.append(candidate.name)
        seeds.append(search.seed)

    monkeypatch.setattr(local.Search, "start", start)
    synthesise(UNEVEN, 4, Settings(split=False, budget_s=0, seed=3))
    assert {"1f1b", "eager-1f1b", "gpipe"} <= set(started)
    assert started == sorted(started)
    assert set(seeds) == {3}


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


def test_pairs_that_no_schedule_has_leave_the_bound_of_the_limit():
    """Costs may say what pairs take: only a schedule that has some is excepted from the bound."""
    costs = {"forward": (2.0,) * 3, "backward": (4.0,) * 3}
    options = Settings(split=False, budget_s=0, memory_limit=1)
    result = synthesise(Costs(**costs, forward_backward=(9.0,) * 3), 6, options)
    assert not result.schedule.pairs
    limited = Constraints("linear", 1, split=False)
    bound = lower_bound(problem_of(Costs(**costs), 6, limited))
    assert bound > lower_bound(problem_of(Costs(**costs), 6, Constraints("linear", split=False)))
    assert result.lower_bound == bound
