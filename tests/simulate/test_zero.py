"""ZeRO: the seconds and bytes of every phase at every level, by hand."""

from __future__ import annotations

import random

import pytest

from penstock.cluster.cluster import Cluster, Device, Link, cluster
from penstock.errors import PlanError
from penstock.simulate.costs import FIELDS, Costs
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


def random_case(rng):
    """Return unlike stages on 1 to 4 ranks of slow links, with all of their costs."""
    link = Link(0.5, 10.0)
    ranks = Cluster("c", (Device("g", 10**9, "gpu"),) * 4, 4, link, link)
    stages = rng.randint(1, 3)
    replicas = [rng.sample(range(4), rng.randint(1, 4)) for _ in range(stages)]
    lengths = [rng.randint(1, 5) for _ in range(stages)]

    def row(name):
        """Return one number per stage, or one per micro-batch too."""
        numbers = tuple(rng.uniform(1, 40) for _ in range(stages))
        if name in ("forward", "backward", "input_grad", "weight_grad") and rng.random() < 0.3:
            return tuple(tuple(n + rng.uniform(0, 9) for _ in range(2)) for n in numbers)
        return numbers

    fields = {name: row(name) for name in ("forward", "backward", "input_grad", "weight_grad")}
    fields |= {name: row(name) for name in ("update", "gradient_bytes", "optimizer_bytes")}
    parts = zip(fields["gradient_bytes"], fields["optimizer_bytes"], strict=True)
    fields["weight_bytes"] = tuple(a + b + rng.uniform(1, 40) for a, b in parts)
    return Costs(**fields, transfer=0.25, activation_bytes=3.0), replicas, ranks, lengths


@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize("uneven", [False, True])
def test_every_stage_has_its_own_messages_and_shares_at_every_level(level, uneven):
    """The table of the module, stage by stage: of what a replica stores a part, and what it waits
    for; all other fields stay.
    """
    for seed in range(15):
        check_costs(random.Random(seed), level, uneven)


def check_costs(rng, level, uneven):
    """Compare the costs of unlike stages with the formulas of the table."""
    costs, replicas, ranks, lengths = random_case(rng)
    shares = [1 / len(row) if level else 1.0 for row in replicas]
    if uneven:
        shares = [rng.uniform(share, 1.0) for share in shares]
    shared = with_zero(costs, replicas, ranks, lengths, level, shares if uneven else None)
    changed = {"update"}
    for stage, (row, length) in enumerate(zip(replicas, lengths, strict=True)):
        gradient, state = costs.gradient_bytes[stage], costs.optimizer_bytes[stage]
        weights = costs.weight_bytes[stage] - gradient - state
        whole_s = all_reduce_seconds(row, gradient, ranks)
        at_update = {0: 1.0, 1: 1.0, 2: 0.5, 3: 0.0}[level] * whole_s
        update = costs.update[stage] * shares[stage] + at_update
        assert shared.update[stage] == pytest.approx(update)
        if level:
            changed |= {"weight_bytes", "gradient_bytes", "optimizer_bytes"}
            # A replica's own part, and up to two layers of the others.
            part = min(1.0, 1 / len(row) + (2 / length if len(row) > 1 else 0.0))
            gradient *= part if level > 1 else 1.0
            weights *= part if level > 2 else 1.0
            state *= shares[stage]
            assert shared.gradient_bytes[stage] == pytest.approx(gradient)
            assert shared.optimizer_bytes[stage] == pytest.approx(state)
            assert shared.weight_bytes[stage] == pytest.approx(weights + gradient + state)
        if level < 2:
            continue
        halves = {"forward": 0, "backward": 1, "input_grad": 0, "weight_grad": 1}
        if level == 3:
            halves = {"forward": 1, "backward": 2, "input_grad": 1, "weight_grad": 1}
        changed |= set(halves)
        for name, number in halves.items():
            messages_s = number * whole_s / 2
            of_layer_s = messages_s / length
            before, after = getattr(costs, name)[stage], getattr(shared, name)[stage]
            rows = (
                zip(before, after, strict=True) if isinstance(before, tuple) else [(before, after)]
            )
            for compute_s, seconds in rows:
                beside_s = max(compute_s, messages_s - of_layer_s)
                assert seconds == pytest.approx(beside_s + of_layer_s)
    for name in set(FIELDS) - changed:
        assert getattr(shared, name) == getattr(costs, name)


def test_figures_that_are_not_given_stay_out():
    """Without bytes there are no messages, and no bytes to share."""
    link = Link(0.5, 10.0)
    ranks = Cluster("c", (Device("g", 10**9, "gpu"),) * 2, 2, link, link)
    for level in range(4):
        shared = with_zero(Costs(forward=[3.0]), [(0, 1)], ranks, [2], level)
        assert (shared.weight_bytes, shared.gradient_bytes, shared.optimizer_bytes) == (None,) * 3
    bare = with_zero(Costs(forward=[3.0], weight_bytes=[8.0]), [(0, 1)], ranks, [8], 3)
    assert bare.weight_bytes == (8 * (1 / 2 + 2 / 8),)
    assert bare.gradient_bytes == bare.optimizer_bytes == (0.0,)


def test_one_number_for_all_stages_is_that_of_each():
    """Costs by hand often have one; what is not given takes no time but that of messages."""
    link = Link(0.5, 10.0)
    ranks = Cluster("c", (Device("g", 10**9, "gpu"),) * 2, 2, link, link)
    costs = Costs(forward=3.0, backward=6.0, weight_bytes=30.0, gradient_bytes=10.0)
    shared = with_zero(costs, [(0, 1), (0,)], ranks, [2, 1], 3)
    first_layer_s = all_reduce_seconds((0, 1), 10.0, ranks) / 2 / 2
    assert shared.forward == (3.0 + first_layer_s, 3.0)
    assert shared.backward == (6.0 + 2 * first_layer_s, 6.0)
    assert shared.input_grad == (2 * first_layer_s, 0.0)
