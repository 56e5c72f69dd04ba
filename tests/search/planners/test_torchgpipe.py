"""torchgpipe's planner against what torchgpipe itself does."""

import importlib
from random import Random

import pytest
from tests.search.planners.cutters import VGG19, ask, bounds, profile

from penstock.search.planners.torchgpipe import imbalance, torchgpipe, torchgpipe_size


@pytest.mark.parametrize(
    ("stages", "lengths"), [(2, (8, 17)), (4, (4, 4, 5, 12)), (8, (2, 2, 3, 2, 2, 2, 3, 9))]
)
def test_vgg19_is_cut_as_torchgpipe_cuts_it(stages, lengths):
    """docs/literature/vgg-19-profile.md: 31.8 ms on the slowest of eight stages, where 22.5 can be had. That is the
    planner to be compared with.
    """
    chosen_plan = torchgpipe(
        ask(profile([(f * 1e-3, b * 1e-3) for f, b in VGG19]), f"{stages}xV100-NVLink")
    )
    assert chosen_plan.lengths == lengths


@pytest.mark.parametrize(
    ("costs", "stages", "lengths"),
    [([1] * 10, 4, (2, 2, 2, 4)), ([1] * 8 + [20], 3, (3, 3, 3))],
    ids=["equal", "one dear"],
)
def test_its_known_cuts_come_out(costs, stages, lengths):
    """docs/literature/torchgpipe.md, pitfalls: the subtraction of the cheapest layer makes them."""
    chosen_plan = torchgpipe(
        ask(profile([(value / 3, 2 * value / 3) for value in costs]), f"{stages}xV100-NVLink")
    )
    assert chosen_plan.lengths == lengths


def test_its_own_defaults_are_taken():
    """GPipe backwards in reverse order, and all but the last micro-batch recomputed, though all
    would fit.
    """
    chosen_plan = torchgpipe(ask(profile([(0.1, 0.2)] * 8), "4xV100-NVLink"))
    assert chosen_plan.recompute == "except_last"
    assert dict(chosen_plan.schedule_options) == {"backward_order": "reverse"}
    assert (
        torchgpipe(ask(profile([(0.1, 0.2)] * 8), "4xV100-NVLink", recompute="never")).recompute
        == "never"
    )


def test_by_size_balances_bytes():
    """Outputs of a micro-batch and twice the parameters; as partition="size" of the same planner."""
    costs = profile([(0.1, 0.2)] * 6, parameter_bytes=[0, 0, 0, 0, 4000, 4000], output=[100.0] * 6)
    chosen_plan = torchgpipe_size(ask(costs, "3xV100-NVLink"))
    assert (
        chosen_plan.lengths
        == torchgpipe(ask(costs, "3xV100-NVLink", by="size")).lengths
        == (2, 3, 1)
    )


@pytest.mark.parametrize("planner", [torchgpipe, torchgpipe_size])
def test_the_objective_is_the_imbalance_of_the_cut(planner):
    """Computed here from the profile alone; the algorithm's promise is that it is 1 at most."""
    costs = profile(
        [(0.1 + 0.01 * (i * 7 % 5), 0.2) for i in range(11)],
        output=[float(100 + i) for i in range(11)],
    )
    chosen_plan = planner(ask(costs, "4xV100-NVLink"))
    samples = 32 / chosen_plan.micro_batches
    raw = (
        costs.step_seconds(samples)
        if planner is torchgpipe
        else [
            layer.output_bytes_per_sample * samples + 2 * layer.parameter_bytes for layer in costs
        ]
    )
    scaled = [(value - min(raw)) / (max(raw) - min(raw)) for value in raw]
    sums = [sum(scaled[a:b]) for a, b in bounds(chosen_plan.lengths)]
    assert chosen_plan.objective.value == pytest.approx(max(sums) - min(sums))
    assert chosen_plan.objective.value <= 1 + 1e-9


def test_equal_layers_have_no_imbalance():
    """Nothing to divide by."""
    assert imbalance([2.0, 2.0, 2.0], [1, 2]) == 0


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_torchgpipe_itself_gives_the_same_balance(stages):
    """Where it is installed: its own function on the same costs."""
    blocks = pytest.importorskip("torchgpipe.balance.blockpartition")
    generator = Random(stages)
    costs = [generator.uniform(0.1, 2) for _ in range(17)]
    lengths = [len(part) for part in importlib.import_module(blocks.__name__).solve(costs, stages)]
    chosen_plan = torchgpipe(
        ask(profile([(value / 3, 2 * value / 3) for value in costs]), f"{stages}xV100-NVLink")
    )
    assert list(chosen_plan.lengths) == lengths
