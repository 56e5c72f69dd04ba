"""The search: its pool, its splits of micro-batches, its standard rules and its rounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tests.synthesis.requests import problem_of, random_encoding, random_problem, rows_of

from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.synthesis import local
from penstock.synthesis.arrays import Encoding
from penstock.synthesis.deadline import Deadline
from penstock.synthesis.evaluate import evaluate
from penstock.synthesis.local import POOL, Candidate, Case, Search
from penstock.synthesis.problem import Constraints
from penstock.synthesis.rules import rule_of_times, standard_rules, unsplit_masks


def small_search(placement="linear", micro_batches=4, goal=0.0, **options):
    """A search on unlike stages."""
    return Search(random_problem(3, placement, micro_batches, **options), goal)


def candidate(case, seconds, mark=0):
    """Programs that differ by a mark."""
    encoding = Encoding(np.full((2, 3), mark), np.array([3, 3]))
    return Candidate(seconds, case, encoding)


def test_the_pool_has_the_shortest_programs_in_order_and_no_equal_ones():
    """Of programs that take the same time, the older come first; other programs are no duplicates,
    nor equal ones of another time.
    """
    search = small_search()
    case = search.case((4,))
    assert search.best is None
    assert not search.done
    rng = np.random.default_rng(0)
    added = []
    for number in range(40):
        entry = candidate(case, float(rng.integers(5, 12)), int(rng.integers(4)))
        key = entry.seconds, int(entry.encoding.codes[0, 0])
        in_pool = [(one.seconds, int(one.encoding.codes[0, 0])) for one in search.pool]
        search.add(entry)
        if key not in in_pool:
            added = sorted([*added, (entry.seconds, number, entry)], key=lambda row: row[:2])[:POOL]
        assert search.pool == [row[2] for row in added]
    search.add(None)
    assert len(search.pool) == POOL
    assert search.best is search.pool[0]


def test_the_best_programs_of_every_split_outlive_the_pool():
    """By the micro-batches of the first route; the first of equally short ones."""
    search = small_search("bidirectional", 6)
    cases = {n: search.case((n, 6 - n)) for n in (2, 3)}
    entries = [candidate(cases[2], 9.0, 1), candidate(cases[3], 5.0, 2)]
    entries += [candidate(cases[2], 9.0, 3), candidate(cases[2], 8.0, 4), candidate(cases[2], 8.5)]
    for entry in entries:
        search.add(entry)
    for number in range(POOL):
        search.add(candidate(cases[3], 1.0, 10 + number))
    assert {n: one.encoding.codes[0, 0] for n, one in search.best_of_split.items()} == {2: 4, 3: 10}
    assert entries[3] not in search.pool


def test_a_search_is_done_at_its_goal_but_for_rounding():
    """Not a part in a million above it."""
    for seconds, is_done in ((10.0, True), (10.0 + 1e-12, True), (10.0001, False)):
        search = small_search(goal=10.0)
        search.add(candidate(search.case((4,)), seconds))
        assert search.done == is_done


def test_cases_are_cached_and_count_all_ops_of_both_routes():
    """Three per micro-batch and stage."""
    search = small_search("bidirectional", 5)
    case, stages = search.case((3, 2)), search.problem.stages
    assert search.case((3, 2)) is case
    assert search.case((2, 3)) is not case
    assert case.ops == 3 * 5 * stages
    assert case.split
    whole = problem_of(Costs(forward=(1.0,) * 2), 2, Constraints("linear", split=False))
    assert not Search(whole, 0.0).case((2,)).split


def test_a_rule_whose_cap_is_too_small_makes_no_candidate():
    """The rank that lacks memory for one micro-batch starts nothing."""
    case = small_search().case((4,))
    rule = all_rules(case)[0]
    tight = case.shape.need.copy()
    tight[1] -= 0.5
    assert case.try_rule(rule._replace(cap=tight)) is None
    exact = case.try_rule(rule._replace(cap=case.shape.need))
    assert exact.seconds == evaluate(case.spec, exact.encoding, case.work)
    assert exact.rule.cap is case.shape.need


@pytest.mark.parametrize("micro_batches", range(2, 15))
def test_about_half_of_the_micro_batches_take_each_route(micro_batches):
    """Up to four more or less than half, the most even first; no route is empty."""
    splits = small_search("bidirectional", micro_batches).splits()
    half = (micro_batches + 1) // 2
    firsts = {half + offset for offset in (0, 1, 2, 4, -1, -2, -4)} & set(range(1, micro_batches))
    assert {first for first, _ in splits} == firsts
    assert all(sum(split) == micro_batches for split in splits)
    distances = [abs(first - second) for first, second in splits]
    assert distances == sorted(distances)
    assert small_search("v", micro_batches).splits() == [(micro_batches,)]


def test_only_schedules_that_fit_the_problem_start_it():
    """Placed as it requires, within its limits, in order and without a deadlock."""
    costs = Costs(forward=(1.0, 2.0), backward=(2.0, 3.0), transfer=(0.5,))
    problem = problem_of(costs, 3, Constraints("linear", (2, 3)))
    for text, is_start in (
        ("0F0 0F1 0B0 0F2 0B1 0B2 0U1\n1F0 1B0 1F1 1B1 1F2 1B2 1U1", True),
        ("0F0 0F1 0F2 0B0 0B1 0B2 0U1\n1F0 1B0 1F1 1B1 1F2 1B2 1U1", False),
        ("0F0 0B0 0F1 0B1 0F2 0B2 0U1\n1F0 1F1 1B0 1B1 1F2 1B2 1U1", False),
        ("0F0 0F1 0B0 0F2 0B1 0B2 0U1\n0F3 0B3 1F0 1B0 1F1 1B1 1F2 1B2 1U1", False),
    ):
        search = Search(problem, 0.0)
        parsed = Schedule.parse(text)
        search.start(parsed)
        assert len(search.pool) == is_start, text
        if is_start:
            assert search.pool[0].seconds == simulate_schedule(parsed, costs).makespan
            assert search.pool[0].rule is None
    search = Search(problem_of(costs, 3, Constraints("linear")), 0.0)
    search.start(schedule("1f1b", 2, 4))
    assert not search.pool


def test_a_schedule_that_takes_no_time_starts_a_search():
    """Only -1 says that programs wait for each other."""
    costs = Costs(forward=(0.0, 0.0), backward=(0.0, 0.0))
    search = Search(problem_of(costs, 2, Constraints("linear")), 0.0)
    search.start(schedule("1f1b", 2, 2))
    assert [one.seconds for one in search.pool] == [0.0]
    assert search.done


def test_schedules_join_halves_and_leave_the_pool_as_it_is():
    """Shortest first; on one rank no half remains."""
    costs = Costs(forward=(1.0,), input_grad=(1.0,), weight_grad=(1.0,))
    search = Search(problem_of(costs, 2, Constraints("linear")), 0.0)
    search.start(schedule("zb-h1", 1, 2))
    search.start(schedule("gpipe", 1, 2))
    before = [rows_of(one.encoding) for one in search.pool]
    schedules = list(search.schedules())
    assert [rows_of(one.encoding) for one in search.pool] == before
    assert all("I" not in str(one) for one in schedules)
    assert len(schedules) == len(before) == 2


def count_rules(monkeypatch, deadline_calls=math.inf):
    """Let the search count the rules that it tries; the deadline is over after some calls."""
    tried, calls = [], [0]
    try_rule = Case.try_rule

    def count(case, rule):
        tried.append((case, rule))
        return try_rule(case, rule)

    class Clock:
        def is_over(self):
            calls[0] += 1
            return calls[0] > deadline_calls

    monkeypatch.setattr(Case, "try_rule", count)
    return tried, Clock()


def all_rules(case):
    """All standard rules of a case."""
    return list(standard_rules(case.spec, case.shape, unsplit_masks(case.spec, case.split)))


def test_standard_rules_are_all_tried_or_a_random_choice_of_them(monkeypatch):
    """As many as place the ops; all in order where these suffice exactly."""
    tried, clock = count_rules(monkeypatch)
    search = small_search()
    case = search.case((4,))
    rules = all_rules(case)
    assert search._try_standard_rules(case, clock, len(rules) * case.ops)
    dues = [rule.due.tolist() for _, rule in tried]
    assert dues == [rule.due.tolist() for rule in rules]
    tried.clear()
    search = small_search()
    assert search._try_standard_rules(case, clock, len(rules) * case.ops - 1)
    assert len(tried) == len(rules)
    shuffled = [rule.due.tolist() for _, rule in tried]
    assert shuffled != dues
    assert sorted(map(str, shuffled)) == sorted(map(str, dues))
    tried.clear()
    search = small_search()
    assert search._try_standard_rules(case, clock, 5 * case.ops)
    assert len(tried) == 6
    assert len(search.pool) <= 6


def test_a_search_without_programs_goes_on_to_its_first(monkeypatch):
    """A budget of nothing, and a time that is up, end it only when there is one."""
    tried, clock = count_rules(monkeypatch, 0)
    search = small_search()
    assert search._try_standard_rules(search.case((4,)), clock, 0)
    assert (len(tried), len(search.pool)) == (1, 1)
    tried.clear()
    search = small_search()
    assert not search._try_standard_rules(search.case((4,)), clock, math.inf)
    assert (len(tried), len(search.pool)) == (1, 1)
    tried.clear()
    search = small_search(goal=math.inf)
    assert not search._try_standard_rules(search.case((4,)), clock, 10**9)
    assert len(tried) == 1


def test_one_round_in_six_is_list_scheduling_and_the_others_anneal(monkeypatch):
    """Until the rounds are done, the goal is reached, or the time is up."""
    kinds = []
    monkeypatch.setattr(Search, "_climb", lambda _: kinds.append("climb"))
    monkeypatch.setattr(Search, "_anneal", lambda _: kinds.append("anneal"))
    tried, clock = count_rules(monkeypatch)
    search = small_search("bidirectional")
    search.run(clock, 14, 0)
    assert [case.spec.counts.tolist() for case, _ in tried][:1] == [[2, 2]]
    assert kinds == ["climb", *["anneal"] * 5] * 2 + ["climb", "anneal"]
    assert search.rounds == 14
    kinds.clear()
    search.run(clock, 14, 0)
    assert (kinds, search.rounds) == ([], 14)
    search.goal = math.inf
    search.run(clock, 20, 0)
    assert (kinds, search.rounds) == ([], 14)
    _, late = count_rules(monkeypatch, 2)
    search = small_search()
    search.run(late, 14, 0)
    # The first call is before the second rule, which its ops end.
    assert search.rounds <= 2


def test_a_round_that_reaches_the_goal_is_the_last(monkeypatch):
    """No shorter program can exist."""
    search = small_search()
    monkeypatch.setattr(Search, "_climb", lambda searching: setattr(searching, "goal", math.inf))
    search.run(Deadline(), 9, 0)
    assert search.rounds == 1


def test_all_splits_are_tried_by_the_standard_rules(monkeypatch):
    """One after the other, the most even first."""
    tried, clock = count_rules(monkeypatch)
    search = small_search("bidirectional", 5)
    search.run(clock, 0, 0)
    cases = list(dict.fromkeys(tuple(case.spec.counts.tolist()) for case, _ in tried))
    assert cases[0] in ((2, 3), (3, 2))
    assert set(search.cases) == set(search.splits())


def test_list_scheduling_climbs_from_rules_and_programs(monkeypatch):
    """Every neighbour that is no worse is the next to start from; shorter ones are added. It tries
    as many as its ops suffice for.
    """
    monkeypatch.setattr(local, "RULE_OPS_PER_ROUND", 8000)
    starts = []
    neighbour = local.neighbour

    def log(rule, *arguments):
        starts.append((rule, neighbour(rule, *arguments)))
        return starts[-1][1]

    monkeypatch.setattr(local, "neighbour", log)
    from_rule = from_programs = 0
    for seed in range(12):
        search = Search(random_problem(seed, "linear", 4), 0.0, seed)
        case = search.case((4,))
        for rule in all_rules(case)[::40]:
            search.add(case.try_rule(rule))
        pool = list(search.pool)
        starts.clear()
        search._climb()
        assert len(starts) == 8000 // (200 + case.ops)
        rule, least = starts[0][0], math.inf
        for one in pool:
            if one.rule is rule:
                least = one.seconds
        from_rule += least < math.inf
        from_programs += least == math.inf
        if least == math.inf:
            # Then the ops are due when these programs start them.
            due_times = []
            for one in pool:
                evaluate(case.spec, one.encoding, case.work)
                due_times.append(rule_of_times(case.spec, one.encoding, case.work).due.tolist())
            assert rule.due.tolist() in due_times
        shorter = []
        for start, changed in starts:
            assert start is rule
            seconds = case.try_rule(changed)
            if seconds is not None and seconds.seconds <= least:
                if seconds.seconds < least:
                    shorter.append(seconds)
                rule, least = changed, seconds.seconds
        reference = Search(search.problem, 0.0)
        for one in [*pool, *shorter]:
            reference.add(one)
        assert [one.seconds for one in search.pool] == [one.seconds for one in reference.pool]
    assert from_rule
    assert from_programs


def test_annealing_starts_from_the_pool_or_the_best_of_a_split(monkeypatch):
    """With temperatures of the size of an op, joins only where they pay, and moves by the ops."""
    calls = []

    def anneal(spec, encoding, work, settings):
        calls.append((spec, rows_of(encoding), settings))
        encoding.codes[0, :2] = encoding.codes[0, 1::-1]
        return search.pool[-1].seconds + 1.0

    monkeypatch.setattr(local, "anneal", anneal)
    for seed in range(8):
        problem = random_problem(seed, "bidirectional", 4)
        search = Search(problem, 2.0, seed)
        for counts in ((2, 2), (1, 3)):
            case = search.case(counts)
            encoding = random_encoding(problem, case.spec, np.random.default_rng(seed), swaps=0.0)
            seconds = evaluate(case.spec, encoding, case.work)
            search.add(Candidate(seconds, case, encoding))
        starts = {str(rows_of(one.encoding)) for one in search.pool}
        for _ in range(5):
            search._anneal()
        assert starts <= {str(rows_of(one.encoding)) for one in search.pool}
        for spec, rows, settings in calls:
            assert str(rows) in {str(rows_of(one.encoding)) for one in search.pool} | starts
            first, last = settings.temperature
            mean = spec.cost[:, :3].mean() or 1.0
            assert mean * 10**-1.0 <= first <= mean * 10**0.8
            assert last == pytest.approx(first * 0.02)
            assert settings.moves[0] == max(200, local.OPS_PER_ROUND // case.ops)
            assert settings.target[0] == pytest.approx(2.0, rel=1e-11)
            assert settings.target[0] > 2.0
            pays = (spec.cost[:, 3] < spec.cost[:, 1] + spec.cost[:, 2]).any()
            assert settings.may_split[0] == int(pays)
        calls.clear()


def test_annealing_starts_from_every_split_that_the_pool_has_lost(monkeypatch):
    """The shortest programs of a split may be behind those of all others before annealing."""
    search = small_search("bidirectional", 6)
    for number, (first, seconds) in enumerate(((3, 1.0), (2, 9.0), (4, 9.5))):
        search.add(candidate(search.case((first, 6 - first)), seconds, number))
    for number in range(POOL):
        search.add(candidate(search.case((3, 3)), 1.0, 10 + number))
    splits = []

    def anneal(spec, *_):
        """Record the split."""
        splits.append(int(spec.counts[0]))
        return 99.0

    monkeypatch.setattr(local, "anneal", anneal)
    for _ in range(60):
        search._anneal()
    assert set(splits) == {2, 3, 4}


def test_annealing_keeps_the_rule_of_programs_that_it_leaves_as_they_are():
    """At the goal it makes no move; else the programs are no longer those of a rule."""
    search = small_search()
    case = search.case((4,))
    search.add(case.try_rule(all_rules(case)[0]))
    start = search.pool[0]
    search.goal = start.seconds
    search._anneal()
    assert search.pool == [start]
    search.goal = 0.0
    for _ in range(3):
        search._anneal()
    for one in search.pool:
        assert (one.rule is None) == (one.seconds != start.seconds)
        assert evaluate(case.spec, one.encoding, case.work) == one.seconds


def test_a_run_with_the_same_seed_repeats():
    """No clock takes part."""
    runs = []
    for _ in range(2):
        search = Search(random_problem(5, "v", 4), 0.0, 9)
        search.run(Deadline(), 2, 10_000)
        runs.append([(one.seconds, rows_of(one.encoding)) for one in search.pool])
    assert runs[0] == runs[1]
