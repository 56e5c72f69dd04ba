"""The kernels: the simulator's times."""

import math

import pytest
from tests.synthesis.requests import problem_of

from penstock.schedule.catalogue import schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.synthesis.arrays import make_workspace
from penstock.synthesis.deadline import Deadline
from penstock.synthesis.encoding import decode, encode, route_counts
from penstock.synthesis.evaluate import evaluate, is_valid
from penstock.synthesis.local import Search
from penstock.synthesis.problem import Constraints

NAMES = {
    "gpipe": "linear",
    "1f1b": "linear",
    "zb-h1": "linear",
    "zb-h2": "linear",
    "interleaved": "interleaved",
    "breadth-first": "interleaved",
    "zb-v": "v",
    "hanayo": "v",
    "v-half": "v",
    "chimera": "bidirectional",
}
COSTS = Costs(forward=(3.0, 1.0, 4.0, 1.5), input_grad=(5.0, 2.0, 2.0, 3.0), weight_grad=(1.0, 2.5, 3.0, 2.0),
              transfer=(1.5, 0.5, 2.0), transfer_back=(0.5, 1.0, 3.0))  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_an_encoded_schedule_takes_its_simulated_time_and_is_decoded_to_the_same_time(name):
    """The kernel's rules are the simulator's: rank after rank, links in the order of sending."""
    case = schedule(name, 4, 8)
    problem = problem_of(COSTS, 8, Constraints(NAMES[name]))
    spec = problem.spec(route_counts(problem, case))
    encoding, work = encode(problem, spec, case), make_workspace(spec)
    expected = simulate_schedule(case, COSTS).makespan
    assert evaluate(spec, encoding, work) == pytest.approx(expected, abs=1e-9)
    assert simulate_schedule(
        decode(problem, spec, encoding, work), COSTS
    ).makespan == pytest.approx(expected, abs=1e-9)
    assert all(is_valid(spec, encoding, work, rank) for rank in range(case.ranks))


def test_programs_that_deadlock_have_no_makespan():
    """A move of the search may make two ranks wait for each other."""
    problem = problem_of(COSTS, 2, Constraints("linear"))
    spec = problem.spec((2,))
    encoding, work = encode(problem, spec, schedule("gpipe", 4, 2)), make_workspace(spec)
    first = encoding.codes[0, :4].copy()
    encoding.codes[0, :4] = first[
        [0, 2, 1, 3]
    ]  # backward 0 before forward 1, while all others wait for forward 1
    assert evaluate(spec, encoding, work) == -1.0


@pytest.mark.parametrize("limit", [2, 3])
@pytest.mark.parametrize("placement", ["linear", "v", "interleaved", "bidirectional"])
def test_list_scheduling_ends_under_the_tightest_limits(placement, limit):
    """A forward begins only where all in flight can still finish: no rule ends in a deadlock."""
    search = Search(problem_of(COSTS, 6, Constraints(placement, limit)), math.inf)
    search.run(Deadline(), 0, math.inf)
    search = Search(problem_of(COSTS, 6, Constraints(placement, limit)), 0.0)
    search.run(Deadline(), 0, math.inf)
    assert search.best is not None
    assert search.best.seconds < math.inf
