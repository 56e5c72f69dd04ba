"""Costs of batches that the number of micro-batches does not divide, against a slow simulator."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.random_requests import clusters, profiles
from tests.simulate.slow import Slow

from penstock.batches.splitting import even_sizes
from penstock.cluster.cluster import Cluster, Device, Link
from penstock.errors import PlanError, ScheduleError
from penstock.profile.profile import LayerProfile, Profile, Timing
from penstock.schedule.catalogue import schedule
from penstock.search.catalogue import plan
from penstock.search.instantiate import instantiate, representative_pipeline
from penstock.search.proposal import Proposal
from penstock.search.request import PlanRequest
from penstock.simulate.costs import Costs
from penstock.simulate.plan_costs import simulate_plan
from penstock.simulate.simulate import simulate_schedule
from penstock.simulate.stage_seconds import micro_batch_sizes
from penstock.simulate.uneven_costs import costs_by_size

#: Per kind of op, the phase of the profile.
PHASE_OF = {"F": "forward", "B": "backward", "I": "input_grad", "W": "weight_grad"}


def bent(seconds: float) -> Timing:
    """Return a timing that is no straight line, so that the mean size does not have the mean time."""
    return Timing((1, 2, 3, 4), (seconds, 1.1 * seconds, 2.5 * seconds, 2.6 * seconds))


def layer(number: int) -> LayerProfile:
    """Return a layer whose seconds tell it from the others."""
    unit = number + 1.0
    phases = bent(unit), bent(2 * unit), bent(0.7 * unit), bent(1.2 * unit)
    return LayerProfile(f"l{number}", "L", *phases, 0, 0, 0, 10.0, 1000.0 * unit)


PROFILE = Profile(tuple(map(layer, range(4))), "f", 7.0, 8)
FOUR_GPUS = Cluster("four", (Device("d", 10**9),) * 4, 2, Link(0.1, 1e4), Link(0.2, 5e3))


@pytest.mark.parametrize(
    ("name", "stages", "options"),
    [
        ("1f1b", 2, ()),
        ("gpipe", 2, (("replicas", 2),)),
        ("1f1b", 2, (("replicas", (2, 1)),)),
        ("zb-h1", 2, ()),
        ("interleaved", 4, (("chunks", 2),)),
        ("chimera", 2, ()),
    ],
)
@pytest.mark.parametrize(("batch", "micro_batches"), [(10, 4), (7, 4), (9, 6)])
def test_every_micro_batch_takes_the_seconds_of_its_size(
    name, stages, options, batch, micro_batches
):
    """The runtime splits 10 samples in 4 as 3, 3, 2, 2. The reference looks up the seconds of every
    op in the profile and simulates with other code.
    """
    lengths = (1, 3) if stages == 2 else (1, 1, 1, 1)
    request = PlanRequest(PROFILE, FOUR_GPUS, batch)
    proposal = Proposal(lengths, name, micro_batches, options)
    placed = instantiate(request, proposal)
    sizes = even_sizes(batch, micro_batches)
    firsts = [sum(lengths[:stage]) for stage in range(stages)]

    def seconds(rank, index):
        """Return the seconds of one op."""
        op = placed.schedule.programs[rank][index]
        letter = op.kind.value
        if letter == "U":  # the same for all sizes
            return placed.costs.update[op.stage]
        if letter == "I" and op.stage == 0:
            return 0.0
        if letter == "W" and op.stage == 0:
            letter = "B"
        first = firsts[op.stage]
        layers = PROFILE.layers[first : first + lengths[op.stage]]
        samples = sizes[op.micro_batch]
        return sum(row.seconds(PHASE_OF[letter], samples) for row in layers)

    def hop(op):
        """Return the seconds of the message of an op."""
        letter, stage, micro_batch = op
        boundary = stage if letter == "F" else stage - 1
        pair = [placed.schedule.placement[end, micro_batch] for end in (boundary, boundary + 1)]
        sent = PROFILE.layers[firsts[boundary + 1] - 1].output_bytes_per_sample
        return FOUR_GPUS.transfer_seconds(sizes[micro_batch] * sent, *pair)

    slow = Slow(placed.schedule, seconds, hop)
    ends = [end for _, end in slow.times.values()]
    assert simulate_schedule(placed.schedule, placed.costs).makespan == pytest.approx(max(ends))


@settings(max_examples=40, deadline=None)
@given(
    profiles(2, 4, simple=False),
    clusters(4, memory=(10**12,)),
    st.integers(2, 13),
    st.integers(1, 13),
    st.sampled_from([("1f1b", 2), ("gpipe", 2), ("zb-h1", 1), ("chimera", 2)]),
)
def test_the_first_of_several_pipelines_is_never_slower_than_all(
    profile, cluster, batch, micro_batches, case
):
    """It has the larger micro-batches, and the search skips what it proves to be too slow."""
    name, stages = case
    request = PlanRequest(profile, cluster, batch)
    lengths = (len(profile) - stages + 1, *(1,) * (stages - 1))
    proposal = Proposal(lengths, name, min(batch, micro_batches), (("replicas", 2),))
    try:
        one = representative_pipeline(request, proposal)
        placed = instantiate(request, proposal)
    except (PlanError, ScheduleError):
        return
    if one is not None:
        whole_s = simulate_schedule(placed.schedule, placed.costs).makespan
        assert simulate_schedule(one.schedule, one.costs).makespan <= whole_s * (1 + 1e-9)


def test_a_plan_of_uneven_micro_batches_predicts_what_its_simulation_gives():
    """Also from a file, without the search that made it."""
    chosen = plan(PROFILE, FOUR_GPUS, 10, micro_batches=4, stages=2, budget_s=1)
    assert chosen.predicted.step_s == simulate_plan(chosen, PROFILE, FOUR_GPUS).makespan


def test_slices_and_streams_have_equal_micro_batches():
    """Slices are parts of the mean micro-batch; the period of a stream needs equal batches."""
    assert micro_batch_sizes(10, schedule("pipedream", 2, 4)) == [2.5] * 4
    assert micro_batch_sizes(10, schedule("1f1b", 2, 4)) == [3.0, 3.0, 2.0, 2.0]


def test_a_smaller_micro_batch_also_recomputes_in_less_time():
    """Whatever a micro-batch takes depends on its size; memory is that of the largest."""
    costs = costs_by_size(
        lambda size: Costs(
            forward=[size, 2 * size],
            backward=[2 * size, size],
            recompute=[3 * size, size],
            saved_bytes=[10 * size, size],
        ),
        [3.0, 2.0, 2.0],
    )
    assert costs.forward == ((3.0, 2.0, 2.0), (6.0, 4.0, 4.0))
    assert costs.recompute == ((9.0, 6.0, 6.0), (3.0, 2.0, 2.0))
    assert costs.saved_bytes == (30.0, 3.0)


def test_entries_that_differ_by_micro_batch_are_those_of_each_micro_batch():
    """Of its size and of its number; one number of a stage is that of its size."""

    def of_size(size):
        return Costs(
            forward=[[size + number for number in range(3)], 10 * size],
            backward=[size, 2 * size],
            update=[size, size],
        )

    costs = costs_by_size(of_size, [4.0, 3.0, 2.0])
    assert costs.forward == ((4.0, 4.0, 4.0), (40.0, 30.0, 20.0))
    assert costs.backward == ((4.0, 3.0, 2.0), (8.0, 6.0, 4.0))
    assert costs.update == (4.0, 4.0)
    assert costs_by_size(of_size, [3.0, 2.0]).backward == ((3.0, 2.0), (6.0, 4.0))


def test_equal_micro_batches_have_the_costs_of_their_size_as_they_are():
    """One number per stage remains one; every size is computed once."""
    sizes = []

    def of_size(size):
        sizes.append(size)
        return Costs(forward=[size])

    assert costs_by_size(of_size, [2.0, 2.0]) == Costs(forward=(2.0,))
    costs_by_size(of_size, [3.0, 2.0, 2.0])
    assert sizes == [2.0, 3.0, 2.0]


def test_every_figure_of_time_and_traffic_follows_the_size():
    """Bytes of memory are those of the largest micro-batch."""
    by_size = ("forward", "backward", "input_grad", "weight_grad", "boundary_bytes", "recompute")

    def of_size(size):
        fields = {name: [size * (1 + place)] for place, name in enumerate(by_size)}
        return Costs(**fields, transfer=[9 * size], activation_bytes=[8 * size], update=[1.0])

    costs = costs_by_size(of_size, [4.0, 2.0])
    for place, name in enumerate(by_size):
        assert getattr(costs, name) == ((4.0 * (1 + place), 2.0 * (1 + place)),)
    assert costs.transfer == ((36.0, 18.0),)
    assert (costs.activation_bytes, costs.update) == ((32.0,), (1.0,))
