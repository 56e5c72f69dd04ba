"""AutoPipe's search against all cuts."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.planners.cutters import VGG19, ask, bounds, cuts, profile

from penstock.partition.bottleneck import minimax
from penstock.search.planners.autopipe import autopipe, search
from penstock.search.planners.autopipe_path import critical_path

#: How far the search's best may be from the best of all cuts: seen 2.8 % in 100 random chains, 98
#: of them exact.
BAND = 0.08


def path_of(forward, backward, lengths, hop=0.0):
    """The critical path of a cut."""
    return critical_path(
        [sum(forward[a:b]) for a, b in bounds(lengths)],
        [sum(backward[a:b]) for a, b in bounds(lengths)],
        hop,
    )


@settings(max_examples=50, deadline=None)
@given(
    blocks=st.lists(st.tuples(st.floats(0.2, 2), st.floats(1.6, 2.4)), min_size=2, max_size=9),
    data=st.data(),
)
def test_the_search_finds_a_cut_that_is_best_or_near_it(blocks, data):
    """It is a local search: never worse than the minimax cut that it begins with, and near the best
    of all.
    """
    forward = [f for f, _ in blocks]
    backward = [f * ratio for f, ratio in blocks]
    stages = data.draw(st.integers(1, min(len(blocks), 4)))
    cut_path = search(forward, backward, stages, 0.0, 10**6)
    assert cut_path.path == path_of(forward, backward, cut_path.cut)
    start = minimax([f + b for f, b in zip(forward, backward, strict=True)], stages)
    assert cut_path.path.step_s <= path_of(forward, backward, start).step_s
    best = min(path_of(forward, backward, cut).step_s for cut in cuts(len(blocks), stages))
    assert best * (1 - 1e-12) <= cut_path.path.step_s <= best * (1 + BAND)


def test_equal_blocks_that_do_not_divide_go_to_the_front():
    """Work at the front is over sooner in the cool-down, so the heavier stages stand there; the
    minimax cut alone does not say where.
    """
    cut_path = search([1.0] * 10, [2.0] * 10, 4, 0.0, 10**6)
    assert max(cut_path.cut) == 3
    assert cut_path.path.step_s == min(
        path_of([1.0] * 10, [2.0] * 10, cut).step_s for cut in cuts(10, 4)
    )


def test_a_search_that_may_take_no_steps_has_the_cut_that_it_began_with():
    """So that a large chain has an answer, too."""
    cut_path = search([1.0, 2.0, 1.0, 1.0], [2.0, 4.0, 2.0, 2.0], 2, 0.0, 0)
    assert list(cut_path.cut) == minimax([3.0, 6.0, 3.0, 3.0], 2)


@pytest.mark.parametrize("stages", [4, 8])
def test_vgg19s_plan_has_the_path_of_its_cut(stages):
    """The objective is by the formula; transfers of the median layer are in it."""
    costs = profile([(f * 1e-3, b * 1e-3) for f, b in VGG19], output=[1000.0] * 25)
    request = ask(costs, f"{stages}xV100-10GbE")
    chosen_plan = autopipe(request)
    samples = 32 / chosen_plan.micro_batches
    hop = request.cluster.transfer_seconds(1000.0 * samples, 0, 1)
    expected = path_of(
        costs.seconds("forward", samples),
        costs.seconds("backward", samples),
        chosen_plan.lengths,
        hop,
    )
    assert chosen_plan.objective.value == pytest.approx(expected.step_s)


def test_micro_batches_are_sliced_until_the_start_up_is_bridged():
    """For equal stages (p - 1) f / 2b of them, rounded up: four stages and b = 2f need one."""
    chosen_plan = autopipe(ask(profile([(0.1, 0.2)] * 8), "4xV100-NVLink", micro_batches=8))
    assert chosen_plan.schedule_name == "autopipe"
    assert dict(chosen_plan.schedule_options) == {"sliced": math.ceil(3 / 4)}
    assert (
        autopipe(ask(profile([(0.1, 0.2)] * 8), "4xV100-NVLink", schedules=("1f1b",))).schedule_name
        == "1f1b"
    )


@pytest.mark.parametrize(
    ("stages", "count", "sliced", "seconds"), [(4, 8, 1, 31.5), (8, 16, 2, 65.5)]
)
def test_the_slicers_known_cases_come_out_of_the_whole_plan(stages, count, sliced, seconds):
    """docs/literature/autopipe.md: 33 falls to 31.5 with one micro-batch cut in two, 69 to 65.5 with two;
    transfers are a millionth of a step.
    """
    costs = profile([(1.0, 2.0)] * stages, batch=count, output=[0.0] * stages)
    chosen_plan = autopipe(ask(costs, f"{stages}xV100-NVLink", batch=count, micro_batches=count))
    assert dict(chosen_plan.schedule_options) == {"sliced": sliced}
    assert chosen_plan.predicted.step_s == pytest.approx(seconds, rel=1e-4)
    assert chosen_plan.objective.value == pytest.approx((3 * stages - 1) * 3, rel=1e-3)
