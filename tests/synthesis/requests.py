"""Random costs and limits, and the slow, obvious ways to judge what the search makes of them."""

import numpy as np
from hypothesis import strategies as st

from penstock.errors import PenstockError
from penstock.schedule import catalogue
from penstock.schedule.op import Kind
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.synthesis.arrays import B, F, I, W, empty_encoding
from penstock.synthesis.problem import Constraints, StageCosts, problem_for

PLACED = {"linear": 1, "interleaved": 2, "v": 2, "bidirectional": 1}

#: Four unlike stages.
UNEVEN = Costs(
    forward=(3.0, 5.0, 2.0, 4.0),
    input_grad=(2.0, 6.0, 3.0, 4.0),
    weight_grad=(3.0, 4.0, 1.0, 5.0),
    transfer=0.5,
)


@st.composite
def problems(draw, stages=(2, 4), micro_batches=5, placements=tuple(PLACED), whole=True):
    """Costs, micro-batches and constraints: small whole numbers, some costs 0, so that ties are
    frequent.
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
    fields = {
        "forward": draw(row),
        "input_grad": draw(row),
        "weight_grad": draw(row),
        "transfer": draw(crossing),
    }
    if draw(st.booleans()):  # halves that cost more than the whole
        fields["backward"] = [
            max(i, w) for i, w in zip(fields["input_grad"], fields["weight_grad"], strict=True)
        ]
    if draw(st.booleans()):
        fields["update"] = draw(row)
    if draw(st.booleans()):
        fields["activation_bytes"] = draw(
            st.lists(st.integers(1, 3), min_size=count, max_size=count)
        )
    costs = Costs(**fields)
    m = draw(st.integers(2, micro_batches))
    hold = fields.get("activation_bytes", [1] * count)
    limit = draw(st.one_of(st.none(), st.integers(2 * max(hold), 2 * max(hold) * m)))
    return costs, m, Constraints(placement, limit)


def problem_of(costs, micro_batches, constraints):
    """The problem of a request."""
    return problem_for(StageCosts.of(costs, len(costs.forward)), micro_batches, constraints)


def random_problem(seed, placement=None, micro_batches=None, limited=True, most_transfer=3):
    """A problem with unlike stages, boundaries and limits; small whole numbers, some of them 0, so
    that ties are frequent. It has two to four stages, or three on each of two ranks.
    """
    rng = np.random.default_rng(seed)
    placement = placement or str(rng.choice(list(PLACED)))
    stages = 4 if PLACED[placement] == 2 else int(rng.integers(2, 5))
    stages += 2 * int(placement == "interleaved" and rng.random() < 0.5)
    ranks = 2 if placement == "interleaved" else None
    input_grad, weight_grad = rng.integers(0, 6, stages), rng.integers(0, 5, stages)
    costs = Costs(
        forward=tuple(rng.integers(0, 6, stages).tolist()),
        input_grad=tuple(input_grad.tolist()),
        weight_grad=tuple(weight_grad.tolist()),
        backward=tuple((input_grad + weight_grad - rng.integers(0, 2)).clip(0).tolist()),
        update=tuple((rng.integers(0, 5, stages) * rng.integers(2)).tolist()),
        transfer=tuple(rng.integers(0, most_transfer + 1, stages - 1).tolist()),
        transfer_back=tuple(rng.integers(0, most_transfer + 1, stages - 1).tolist()),
        activation_bytes=tuple(rng.integers(1, 4, stages).tolist()),
    )
    micro_batches = micro_batches or int(rng.integers(2, 6))
    free = problem_of(costs, micro_batches, Constraints(placement, ranks=ranks))
    if not limited:
        return free
    limits = []
    for copies in free.copies_of_rank:
        sizes = [costs.activation_bytes[copy % stages] for copy in copies]
        need = sum(sizes) if len(free.routes) == 1 else max(sizes)
        limits.append(need + int(rng.integers(0, 2 * need + 1)))
    return problem_of(costs, micro_batches, Constraints(placement, tuple(limits), ranks))


def random_counts(problem, rng):
    """Numbers of micro-batches on the routes, one or more on each."""
    if len(problem.routes) == 1:
        return (problem.micro_batches,)
    first = int(rng.integers(1, problem.micro_batches))
    return first, problem.micro_batches - first


def random_encoding(problem, spec, rng, swaps=0.3):
    """Random programs: ops in a random order in which every input exists. In a share `swaps` of
    them two ops of a rank are exchanged: they may deadlock, or break the order of a copy.
    """
    encoding = empty_encoding(spec)
    stages, rows = problem.stages, [[] for _ in range(problem.ranks)]
    # Per copy the number of ops that can run: F, I or B, W.
    ready = np.zeros((len(spec.copies), 3), int)
    for route, count in enumerate(spec.counts):
        ready[route * stages, F] = count
    while ready.any():
        copies, kinds = np.nonzero(ready)
        choice = rng.integers(len(copies))
        copy, kind = int(copies[choice]), int(kinds[choice])
        ready[copy, kind] -= 1
        stage, is_whole = copy % stages, kind == I and rng.random() < 0.3
        if kind == F and stage < stages - 1:
            ready[copy + 1, F] += 1
        elif kind == F:
            ready[copy, I] += 1
        elif kind == I and stage > 0:
            # The F before it has run long since.
            ready[copy - 1, I] += 1
        ready[copy, W] += kind == I and not is_whole
        rows[spec.copies[copy, 0]].append(4 * copy + (B if is_whole else kind))
    if rng.random() < swaps:
        row = rows[rng.integers(len(rows))]
        i, j = rng.integers(len(row), size=2)
        row[i], row[j] = row[j], row[i]
    for rank, row in enumerate(rows):
        encoding.codes[rank, : len(row)] = row
        encoding.lengths[rank] = len(row)
    return encoding


def rows_of(encoding):
    """The codes of every rank as lists."""
    return [
        row[:length].tolist() for row, length in zip(encoding.codes, encoding.lengths, strict=True)
    ]


def held(schedule, costs):
    """The peak memory of every rank. An E moves activations to a partner, and an L back."""
    sizes = costs.activation_bytes or (1,) * schedule.stages
    peaks = []
    for rank, program in enumerate(schedule.programs):
        now = peak = 0
        for kind, stage, micro_batch in program:
            change = (kind in (Kind.F, Kind.L)) - (kind in (Kind.B, Kind.W, Kind.E))
            if kind in (Kind.E, Kind.L) and schedule.placement[stage, micro_batch] != rank:
                change = -change
            now += sizes[stage] * change
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
            case = catalogue.schedule(name, len(costs.forward), micro_batches)
        except PenstockError:
            continue
        plain = (
            facts.synchronous
            and case.slicing is None
            and all(op.kind in "FBIWU" for op in case.ops)
        )
        ways = {
            tuple(case.placement[s, m] for s in range(case.stages))
            for m in range(case.micro_batches)
        }
        fits = limit is None or max(held(case, costs)) <= limit
        if plain and case.micro_batches == micro_batches and ways == set(routes) and fits:
            best[name] = simulate_schedule(case, costs).makespan
    return best
