"""Random costs and limits, and the slow, obvious ways to judge what the search makes of them."""

from hypothesis import strategies as st

from penstock.errors import PenstockError
from penstock.schedule import catalogue
from penstock.schedule.op import Kind
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.synthesis.problem import Constraints, StageCosts, problem_for

PLACED = {"linear": 1, "interleaved": 2, "v": 2, "bidirectional": 1}


@st.composite
def problems(draw, stages=(2, 4), micro_batches=5, placements=tuple(PLACED), whole=True):
    """Costs, micro-batches and room for them: every number small and whole, some costs 0, so that
    ties are frequent.
    """
    placement = draw(st.sampled_from(placements))
    count = draw(
        st.sampled_from(
            stages
            if placement == "bidirectional"
            else [n for n in stages if n % PLACED[placement] == 0]
        )
    )
    if placement == "interleaved" and count == 2:
        count = 4
    number = st.integers(0, 9) if whole else st.floats(0, 9)
    row = st.lists(number, min_size=count, max_size=count)
    crossing = st.lists(st.integers(0, 3), min_size=count - 1, max_size=count - 1)
    given = {
        "forward": draw(row),
        "input_grad": draw(row),
        "weight_grad": draw(row),
        "transfer": draw(crossing),
    }
    if draw(st.booleans()):  # halves that cost more than the whole
        given["backward"] = [
            max(i, w) for i, w in zip(given["input_grad"], given["weight_grad"], strict=True)
        ]
    if draw(st.booleans()):
        given["update"] = draw(row)
    if draw(st.booleans()):
        given["activation_bytes"] = draw(
            st.lists(st.integers(1, 3), min_size=count, max_size=count)
        )
    costs = Costs(**given)
    m = draw(st.integers(2, micro_batches))
    hold = given.get("activation_bytes", [1] * count)
    limit = draw(st.one_of(st.none(), st.integers(2 * max(hold), 2 * max(hold) * m)))
    return costs, m, Constraints(placement, limit)


def problem_of(costs, micro_batches, room):
    """The problem of a request."""
    return problem_for(StageCosts.of(costs, len(costs.forward)), micro_batches, room)


def held(schedule, costs):
    """What every rank holds at its fullest."""
    each = costs.activation_bytes or (1,) * schedule.stages
    peaks = []
    for program in schedule.programs:
        now = peak = 0
        for kind, stage, _ in program:
            now += each[stage] * ((kind is Kind.F) - (kind in (Kind.B, Kind.W)))
            peak = max(peak, now)
        peaks.append(peak)
    return peaks


def best_of_zoo(costs, micro_batches, routes, limit):
    """The least makespan of the plain synchronous schedules whose stages stand on these routes and
    that fit, by name.
    """
    best = {}
    for name, facts in catalogue.schedules().items():
        try:
            made = catalogue.schedule(name, len(costs.forward), micro_batches)
        except PenstockError:
            continue
        plain = (
            facts.synchronous
            and made.slicing is None
            and all(op.kind in "FBIWU" for op in made.ops)
        )
        ways = {
            tuple(made.placement[s, m] for s in range(made.stages))
            for m in range(made.micro_batches)
        }
        fits = limit is None or max(held(made, costs)) <= limit
        if plain and made.micro_batches == micro_batches and ways == set(routes) and fits:
            best[name] = simulate_schedule(made, costs).makespan
    return best
