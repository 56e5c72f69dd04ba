"""PipeDream's partitioning against the authors' optimizer, and against enumeration."""

import json
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.search.planners.layer_costs import LayerCosts
from penstock.search.planners.pipedream_cut import Level, Part, Rules, hierarchical_cut

DATA = Path(__file__).parent / "data"

#: Printed by optimizer_graph_hierarchical.py on its own profiles with activation_compression_ratio
#: 1 (docs/literature/pipedream.md): the machines
#: (components, bytes per second) from the lowest level, whether --straight_pipeline; (first layer,
#: one past the last, copies) of the
#: highest level, and of the levels below inside each; seconds per stage.
ORACLES = {
    "vgg16": [
        (((4, 1e9),), False, [(0, 17, 3), (17, 40, 1)], "0.205521"),
        (((4, 1e10),), False, [(0, 15, 3), (15, 40, 1)], "0.170179"),
        (((8, 3e9),), False, [(0, 24, 7), (24, 40, 1)], "0.0938606"),
        (
            ((4, 1e10), (4, 1.25e9)), False,
            [(0, 31, 3, [(0, 31, 4)]), (31, 40, 1, [(31, 32, 1), (32, 34, 1), (34, 38, 1), (38, 40, 1)])], "0.067134",
        ),
        (((4, 1e10),), True, [(0, 5, 1), (5, 14, 1), (14, 23, 1), (23, 40, 1)], "0.23559"),
    ],
    "alexnet": [
        (((4, 1e9),), False, [(0, 14, 3), (14, 22, 1)], "0.0342171"),
        (((4, 1e10),), False, [(0, 6, 2), (6, 9, 1), (9, 22, 1)], "0.022186"),
        (((8, 3e9),), False, [(0, 14, 7), (14, 22, 1)], "0.012514"),
        (
            ((4, 1e10), (4, 1.25e9)), False,
            [
                (0, 13, 2, [(0, 13, 4)]), (13, 17, 1, [(13, 16, 3), (16, 17, 1)]),
                (17, 22, 1, [(17, 18, 2), (18, 20, 1), (20, 22, 1)]),
            ], "0.0150995",
        ),
        (((4, 1e10),), True, [(0, 3, 1), (3, 7, 1), (7, 20, 1), (20, 22, 1)], "0.032171"),
    ],
}  # fmt: skip

ROWS = [(name, *row) for name, rows in ORACLES.items() for row in rows]
every_row = pytest.mark.parametrize(("name", "machines", "straight", "stages", "seconds"), ROWS)


def load(name):
    """The profile as a chain: the input is no layer, and where a reshape takes its size from a node
    of its own, its input crosses a cut between the two besides (antichains).
    """
    rows = json.loads((DATA / f"{name}.json").read_text())["layers"]
    rows = [row for row in rows if row[1] != "Input"]
    output = [
        row[4] + (before[4] if row[1] == "Size" else 0)
        for before, row in zip([rows[0], *rows], rows, strict=False)
    ]
    return LayerCosts(
        tuple(row[2] / 1e3 for row in rows),
        tuple(row[3] / 1e3 for row in rows),
        tuple(map(float, output)),
        tuple(float(row[4]) for row in rows),
        tuple(float(row[5]) for row in rows),
    )


def parts(rows):
    """Parts from tuples."""
    return tuple(Part(*row[:3], parts(row[3]) if len(row) > 3 else ()) for row in rows)


def slowest(costs, best, levels, form):
    """The slowest stage or link, written out once more from the definitions, without any dynamic
    programming.
    """
    bandwidth, below = levels[-1][1], levels[:-1]
    last = len(costs) - 1
    times = []
    for i, part in enumerate(best):
        m = part.replicas
        weights = sum(costs.parameter_bytes[part.start : part.stop])
        compute_s = (
            slowest(costs, part.inner, below, form)
            if below
            else sum(costs.seconds[part.start : part.stop])
        )
        if form == "paper":
            times.append(max(compute_s, 2 * (m - 1) / m * weights / bandwidth) / m)
            times += [2 * costs.output_bytes[part.start - 1] / bandwidth] if i else []
            continue
        within = below[-1][0] if below and i == 0 else 1
        times.append((compute_s + 4 * (m - 1) * weights / (bandwidth * m) / within) / m)
        if i:
            times.append(2 * costs.output_bytes[part.start - 1] / (bandwidth * m))
            times += (
                [2 * costs.output_bytes[part.stop - 1] / (bandwidth * m)]
                if part.stop - 1 < last
                else []
            )
    return max(times)


@every_row
def test_the_code_form_takes_as_long_per_stage_as_the_authors_optimizer_printed(
    name, machines, straight, stages, seconds
):
    """All digits that were printed: the recurrence, its quirks included, is theirs."""
    cut = hierarchical_cut(
        load(name), [Level(*machine) for machine in machines], Rules("code", straight=straight)
    )
    assert f"{cut.slowest_s:.6g}" == seconds
    assert slowest(load(name), cut.parts, machines, "code") == pytest.approx(cut.slowest_s)


@every_row
def test_the_cut_that_the_authors_optimizer_printed_is_among_the_best(
    name, machines, straight, stages, seconds
):
    """Many cuts are equally good, and which is printed hangs on the order of a Python set there:
    theirs is as good as ours, and where no other is, it is ours.
    """
    cut = hierarchical_cut(
        load(name), [Level(*machine) for machine in machines], Rules("code", straight=straight)
    )
    assert slowest(load(name), parts(stages), machines, "code") == pytest.approx(
        cut.slowest_s, rel=1e-12
    )


def test_the_cuts_that_have_no_equal_are_those_of_the_authors_optimizer():
    """Where stages are all loaded, the cut itself must come out."""
    for name, row in (("vgg16", 0), ("vgg16", 1), ("vgg16", 2), ("alexnet", 1)):
        machines, straight, stages, _ = ORACLES[name][row]
        cut = hierarchical_cut(
            load(name), [Level(*machine) for machine in machines], Rules("code", straight=straight)
        )
        assert cut.parts == parts(stages)


#: The same runs: how many times as fast as data parallelism on all of the machine.
SPEED_UPS = {
    "vgg16": (2.838, 1.232, 1.756, 2.017, 0.890),
    "alexnet": (5.980, 1.788, 3.700, 3.085, 1.233),
}


@pytest.mark.parametrize("name", ["vgg16", "alexnet"])
def test_the_speed_up_over_data_parallelism_is_what_the_authors_optimizer_printed(name):
    """One stage on all components, level by level, counts its all-reduce as theirs does."""
    costs = load(name)
    for (machines, straight, _, _), printed in zip(ORACLES[name], SPEED_UPS[name], strict=True):
        whole = ()
        for components, _ in machines:
            whole = (Part(0, len(costs), components, whole),)
        cut = hierarchical_cut(
            costs, [Level(*machine) for machine in machines], Rules("code", straight=straight)
        )
        assert slowest(costs, whole, machines, "code") / cut.slowest_s == pytest.approx(
            printed, abs=6e-4
        )


def test_the_time_of_the_whole_model_is_that_of_the_profile():
    """One device takes what the authors' optimizer printed as "single"."""
    for name, seconds in (("vgg16", "0.672535"), ("alexnet", "0.085321")):
        assert f"{hierarchical_cut(load(name), [Level(1, 1e9)]).slowest_s:.6g}" == seconds


def cuts(start, stop, sizes):
    """Every way to cut layers at the highest level into parts whose components add up, and each
    part likewise below.
    """

    def at(first, left):
        if first == stop:
            yield from [()] if left == 0 else []
            return
        for end in range(first + 1, stop + 1):
            for m in range(1, left + 1):
                for inner in cuts(first, end, sizes[:-1]) if len(sizes) > 1 else [()]:
                    for rest in at(end, left - m):
                        yield (Part(first, end, m, inner), *rest)

    return list(at(start, sizes[-1]))


amounts = st.floats(0.01, 10)
chains = st.integers(1, 5).flatmap(
    lambda n: st.tuples(*(st.lists(amounts, min_size=n, max_size=n) for _ in range(3))).map(
        lambda rows: LayerCosts(
            tuple(rows[0]), (0.0,) * n, tuple(rows[1]), tuple(rows[1]), tuple(rows[2])
        )
    )
)


@settings(max_examples=60, deadline=None)
@given(chains, st.integers(1, 4), st.floats(0.1, 20), st.sampled_from(("paper", "code")))
def test_on_one_level_the_cut_is_the_best_of_all(costs, components, bandwidth, form):
    """The objective's least value, by enumeration of all cuts and copies."""
    cut = hierarchical_cut(costs, [Level(components, bandwidth)], Rules(form))
    every = cuts(0, len(costs), (components,))
    assert cut.slowest_s == pytest.approx(
        min(slowest(costs, stages, [(components, bandwidth)], form) for stages in every)
    )
    assert slowest(costs, cut.parts, [(components, bandwidth)], form) == pytest.approx(
        cut.slowest_s
    )


@settings(max_examples=25, deadline=None)
@given(
    chains.filter(lambda costs: len(costs) <= 4),
    st.floats(0.1, 20),
    st.floats(0.1, 20),
    st.sampled_from(("paper", "code")),
)
def test_on_two_levels_the_cut_is_the_best_of_all(costs, inside, between, form):
    """A node's best for every range of layers, put together as the best of all nodes."""
    machines = [(2, inside), (2, between)]
    cut = hierarchical_cut(costs, [Level(*machine) for machine in machines], Rules(form))
    every = cuts(0, len(costs), (2, 2))
    assert cut.slowest_s == pytest.approx(
        min(slowest(costs, stages, machines, form) for stages in every)
    )
    assert slowest(costs, cut.parts, machines, form) == pytest.approx(cut.slowest_s)


@settings(max_examples=40, deadline=None)
@given(chains, st.integers(1, 4), st.floats(0.1, 20), st.integers(1, 3), st.integers(1, 4))
def test_with_few_replicas_or_a_number_of_stages_the_cut_is_the_best_of_those(
    costs, components, bandwidth, most, stages
):
    """What the user fixes is no more than a filter on the same objective."""
    every = [
        parts
        for parts in cuts(0, len(costs), (components,))
        if len(parts) == stages and max(part.replicas for part in parts) <= most
    ]
    rules = Rules(most_replicas=most, stages=stages)
    if not every:
        with pytest.raises(PlanError, match="cannot be spread over"):
            hierarchical_cut(costs, [Level(components, bandwidth)], rules)
        return
    cut = hierarchical_cut(costs, [Level(components, bandwidth)], rules)
    assert cut.slowest_s == pytest.approx(
        min(slowest(costs, stages, [(components, bandwidth)], "paper") for stages in every)
    )
    assert len(cut.parts) == stages


@settings(max_examples=60, deadline=None)
@given(
    chains, st.integers(1, 4), st.floats(0.5, 60), st.sampled_from(("paper", "code")), st.booleans()
)
def test_within_memory_the_cut_is_the_best_of_those_whose_stages_hold_no_more(
    costs, components, memory, form, stash
):
    """What waits behind a stage is components behind over its own, rounded up; the paper's form
    holds what is worked on besides.
    """

    def fits(best):
        left = components
        for part in best:
            left -= part.replicas
            waiting = -(-left // part.replicas)
            weights, activations = (
                sum(sizes[part.start : part.stop])
                for sizes in (costs.parameter_bytes, costs.activation_bytes)
            )
            stage_bytes = waiting * (weights + activations)
            if form == "paper":
                stage_bytes = (waiting + 1) * activations + weights * (
                    2 + (waiting + 1 if stash else 1)
                )
            if stage_bytes > memory:
                return False
        return True

    rules = Rules(form, memory_bytes=memory, stash=stash)
    every = [cut for cut in cuts(0, len(costs), (components,)) if fits(cut)]
    if not every:
        with pytest.raises(PlanError, match="and a component has"):
            hierarchical_cut(costs, [Level(components, 2.0)], rules)
        return
    best = hierarchical_cut(costs, [Level(components, 2.0)], rules)
    assert best.slowest_s == pytest.approx(
        min(slowest(costs, cut, [(components, 2.0)], form) for cut in every)
    )
    assert fits(best.parts)


def test_a_straight_pipeline_on_more_devices_than_layers_is_refused():
    """Every device must get a stage of its own, and there are not that many layers."""
    costs = LayerCosts((1.0,) * 3, (2.0,) * 3, (1.0,) * 3, (1.0,) * 3, (1.0,) * 3)
    with pytest.raises(
        PlanError, match="3 layers cannot be spread over 4 components: no stage may be replicated"
    ):
        hierarchical_cut(costs, [Level(4, 1.0)], Rules(straight=True))


@settings(max_examples=30, deadline=None)
@given(chains, st.integers(1, 3), st.integers(1, 4))
def test_all_layers_and_all_components_are_used_once(costs, nodes, components):
    """Stages follow each other, and their copies add up to the machine."""
    cut = hierarchical_cut(costs, [Level(components, 5.0), Level(nodes, 1.0)])
    assert sum(part.replicas for part in cut.parts) == nodes
    ends = list(accumulate(part.stop - part.start for part in cut.parts))
    assert [part.stop for part in cut.parts] == ends
    assert ends[-1] == len(costs)
    assert all(sum(inner.replicas for inner in part.inner) == components for part in cut.parts)
