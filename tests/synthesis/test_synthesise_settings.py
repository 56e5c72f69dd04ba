"""Settings of the search: what is refused, the work of a budget, and its shares for placements."""

import math
import sys
from types import SimpleNamespace

import pytest
from tests.synthesis.requests import UNEVEN, held, problem_of

from penstock.errors import MissingExtra, ScheduleError, SettingError
from penstock.schedule.catalogue import schedule
from penstock.simulate.costs import Costs
from penstock.synthesis import exact, local
from penstock.synthesis import synthesise as module
from penstock.synthesis.bound import lower_bound
from penstock.synthesis.problem import Constraints
from penstock.synthesis.synthesise import MOST_S, Settings, _result, _run_all, synthesise


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
    with pytest.raises(ScheduleError) as caught:
        synthesise(three, 4, Settings(placement="any", memory_limit=0.5))
    title, *reasons = str(caught.value).split("\n  ")
    assert title == "no placement is possible:"
    assert len(reasons) == 4
    assert "with placement 'linear'" in reasons[0]
    assert "with placement 'bidirectional'" in reasons[3]
    for costs in (Costs(), Costs(forward=1.0)):
        with pytest.raises(ScheduleError, match="do not tell the number of stages"):
            synthesise(costs, 4)
    with pytest.raises(SettingError, match="differs by micro-batch"):
        synthesise(Costs(forward=((1.0, 2.0), (1.0, 2.0))), 2)


def test_a_proof_without_or_tools_names_the_extra(monkeypatch):
    """OR-Tools is optional; whoever asks for a proof learns how to get it, before the search."""
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    monkeypatch.delattr(local.Search, "run")
    with pytest.raises(
        MissingExtra,
        match=r"exact=True needs ortools; install it with: pip install 'penstock\[search\]'",
    ):
        synthesise(UNEVEN, 4, Settings(exact=True))


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


def test_the_result_is_the_shortest_schedule_with_the_lowest_bound_and_all_rounds():
    """A placement that is not the best may have the lower bound: its programs may yet be shorter."""
    tasks = []
    for placement, makespan, least, rounds, zoo, zoo_makespan in (
        ("linear", 12.0, 10.0, 3, "gpipe", 15.0),
        ("v", 11.0, 10.5, 4, None, math.inf),
    ):
        tasks.append(
            SimpleNamespace(
                problem=SimpleNamespace(placement=placement),
                schedule=schedule("gpipe", 2, rounds),
                makespan=makespan,
                least=least,
                rounds=rounds,
                zoo=zoo,
                zoo_makespan=zoo_makespan,
            )
        )
    result = _result(tasks, cut_short=True)
    assert (result.placement, result.makespan, result.lower_bound) == ("v", 11.0, 10.0)
    assert (result.zoo, result.zoo_makespan, result.rounds) == (None, None, 7)
    assert (result.gap, result.proved, result.cut_short) == (pytest.approx(0.1), False, True)
    assert result.schedule.programs == tasks[1].schedule.programs
    assert result.schedule.options == result.facts()
    tasks[1].makespan = 10.0
    assert _result(tasks, cut_short=False).proved


def test_pairs_without_seconds_of_their_own_are_proved_as_their_ops(monkeypatch):
    """They take as long as the two ops, so that the limit bounds them too; the model has none."""
    costs = Costs(forward=(2.0,) * 3, backward=(4.0,) * 3, transfer=5.0)
    paired, proved = schedule("fbp-as", 3, 8), []
    limits = tuple(held(paired, costs))
    monkeypatch.setattr(module, "candidates", lambda _: [paired])

    def prove(problem, best, *_):
        """Record the schedule, and prove nothing."""
        proved.append(best)
        return exact.Proof(None, 0.0)

    monkeypatch.setattr(exact, "prove", prove)
    options = Settings(split=False, budget_s=0, memory_limit=limits, exact=True)
    result = synthesise(costs, 8, options)
    assert result.schedule.programs == paired.programs
    limited, free = (
        lower_bound(problem_of(costs, 8, Constraints("linear", limit, split=False)))
        for limit in (limits, None)
    )
    assert result.lower_bound == limited > free
    (best,) = proved
    assert (best.programs, len(best.pairs)) == (paired.programs, 0)
