"""ZeRO: the seconds and bytes of every phase at every level, by hand."""

from __future__ import annotations

import pytest

from penstock.cluster.cluster import cluster
from penstock.errors import PlanError
from penstock.simulate.costs import Costs
from penstock.simulate.gradient_sync import all_reduce_seconds
from penstock.simulate.zero import with_zero

CLUSTER = cluster("4xV100-10GbE")
LAYERS = 8


def costs_at(level, compute_s):
    """Return the costs of one stage of 8 layers on 4 ranks, and the seconds A of its all-reduce."""
    costs = Costs(
        forward=[compute_s],
        backward=[2 * compute_s],
        input_grad=[compute_s],
        weight_grad=[compute_s],
        update=[2.0],
        gradient_bytes=[200e6],
        weight_bytes=[800e6],
        optimizer_bytes=[400e6],
    )
    ranks = range(4)
    shared = with_zero(costs, [ranks], CLUSTER, [LAYERS], level)
    return shared, all_reduce_seconds(ranks, 200e6, CLUSTER)


def phases(costs):
    """Return the seconds of forward, B, I, W and U."""
    names = ("forward", "backward", "input_grad", "weight_grad", "update")
    return pytest.approx([getattr(costs, name)[0] for name in names])


def test_messages_that_fit_beside_the_computation_cost_those_of_the_first_layer():
    """A layer's messages run while the next layer computes; the first has nothing beside it."""
    compute_s = 10.0
    for level, messages in enumerate([(0, 0, 0, 0), (0, 0, 0, 0), (0, 1, 0, 1), (1, 2, 1, 1)]):
        costs, all_reduce_s = costs_at(level, compute_s)
        first_layer_s = all_reduce_s / 2 / LAYERS
        computed = [compute_s, 2 * compute_s, compute_s, compute_s]
        update_s = 2.0 if level == 0 else 0.5
        at_update = (1, 1, 0.5, 0)[level] * all_reduce_s
        assert [
            *(s + count * first_layer_s for s, count in zip(computed, messages, strict=True)),
            update_s + at_update,
        ] == phases(costs)


def test_messages_that_take_longer_than_the_computation_are_what_an_op_takes():
    """The computation of all layers is then hidden instead."""
    costs, all_reduce_s = costs_at(3, 1e-6)
    half = all_reduce_s / 2
    assert [half, 2 * half, half, half, 0.5] == phases(costs)


def test_a_level_that_does_not_exist_is_refused():
    """The levels are those of the paper."""
    with pytest.raises(PlanError, match="zero is 4; its levels are 0, 1, 2 and 3"):
        costs_at(4, 1.0)
