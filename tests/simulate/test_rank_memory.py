"""Bytes of ranks that are not the sum of their stages: tied parameters, and whole parameters that
replicas divide. Measured runs are in tests/agreement/test_memory.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.profile.profile import LayerProfile, Profile, Timing
from penstock.simulate.costs import Costs
from penstock.simulate.rank_memory import StoredParameters

TIME = Timing((1,), (1.0,))


def layer(sizes, tied=()):
    """Return a layer with parameters of these bytes."""
    return LayerProfile(
        "l", "L", TIME, TIME, TIME, TIME, 1, sum(sizes), 0, 1.0, 1.0,
        tensor_bytes=tuple(sizes), tied_tensors=tuple(tied),
    )  # fmt: skip


#: The last layer uses the first parameter of the first layer, and the second layer its second one.
LAYERS = (layer([8, 1]), layer([4, 2], [(0, 1)]), layer([3], [(0, 0)]))
PROFILE = Profile(LAYERS, "f", 1.0, 1, optimizer_states=2.0)


def costs(copies=1, lengths=(2, 1)):
    """Return the bytes of stages, with `copies` of their gradients."""
    ends = [sum(lengths[: stage + 1]) for stage in range(len(lengths))]
    sizes = []
    for end, length in zip(ends, lengths, strict=True):
        sizes.append(float(sum(layer.parameter_bytes for layer in LAYERS[end - length : end])))
    return Costs(
        weight_bytes=[(1 + copies + 2) * size for size in sizes],
        gradient_bytes=[copies * size for size in sizes],
        optimizer_bytes=[2 * size for size in sizes],
    )


def stored(holders, zero=0):
    """Return the parameters of two stages on these devices."""
    return StoredParameters(PROFILE, (2, 1), holders, zero)


def test_only_parameters_of_several_stages_are_tied():
    """Layers 0 and 1 share one too, but are in the same stage."""
    assert stored([(0,), (1,)]).tied == ((0, 0, 8, (0, 1)),)
    assert StoredParameters(PROFILE, (3,), [(0,)]).tied == ()


def test_a_tied_parameter_is_stored_by_all_stages_and_its_state_by_the_first():
    """Weights, gradients and states by hand: 15 bytes in stage 0, 3 and the tied 8 in stage 1."""
    placed = stored([(0,), (1,)]).add_to(costs())
    assert placed.bytes_of_ranks == ((15, 15, 30), (11, 11, 6))


def test_a_device_without_a_stage_stores_nothing():
    """A plan may leave one idle between others."""
    placed = stored([(0,), (2,)]).add_to(costs())
    assert placed.bytes_of_ranks == ((15, 15, 30), (0, 0, 0), (11, 11, 6))


def test_of_replicas_one_stores_the_state_of_tied_parameters():
    """Both stages on ranks 0 and 1, as in Chimera: each stores 8 once, and rank 0 its state."""
    placed = stored([(0, 1), (0, 1)]).add_to(costs(copies=2))
    gradients = 2 * 18 - 8
    assert placed.bytes_of_ranks == ((18, gradients, 36), (18, gradients, 20))


def test_replicas_own_whole_parameters_at_level_1():
    """Without the tied 8 bytes, stage 0 divides 4 from 2 and 1, and stage 1 gives all to rank 1."""
    divided = stored([(0, 1), (0, 1)], zero=1)
    assert divided.owned_bytes(0) == [4, 3]
    states = [row[2] for row in divided.add_to(costs()).bytes_of_ranks]
    assert states == [2 * (4 + 8), 2 * (3 + 3)]
    assert divided.largest_shares() == [4 / 7, 1.0]


def test_a_rank_that_stands_for_two_pipelines_has_the_bytes_of_the_larger():
    """Pipelines on devices 0, 1 and 2, 3: the first stores the state of the tied parameter."""
    pipelines = stored([range(0, 4, 2), range(1, 4, 2)], zero=1)
    rows = pipelines.add_to(costs()).bytes_of_ranks
    assert rows[0] != rows[2]
    largest = max(rows[::2], key=sum), max(rows[1::2], key=sum)
    assert pipelines.add_to(costs(), devices_per_rank=2).bytes_of_ranks == largest


def test_layers_of_unknown_parameters_are_divided_evenly():
    """Profiles from a formula, and older files, do not have the sizes."""
    layers = (replace(layer([10]), tensor_bytes=()), layer([6]), layer([]))
    profile = replace(PROFILE, layers=layers)
    assert StoredParameters(profile, (3,), [(0, 1)], 1).owned_bytes(0) == [5 + 6, 5]


@pytest.mark.parametrize("zero", [2, 3])
def test_higher_levels_divide_evenly_and_keep_the_sum_of_stages(zero):
    """They are not run here, but exported to systems that divide every parameter."""
    parameters = stored([(0, 1), (0, 1)], zero)
    assert parameters.largest_shares() == [0.5, 0.5]
    placed = stored([(0, 1), (0, 1)]).add_to(costs())
    assert parameters.add_to(placed) == costs()


def test_a_single_replica_and_a_stage_without_parameters_divide_nothing():
    """At level 1 the others do; a share of nothing is an even one."""
    assert stored([(0,), (1,)], zero=1).owned_bytes(0) == [15]
    assert stored([(0,), (1,)], zero=1).add_to(costs()) == stored([(0,), (1,)]).add_to(costs())
    bare = replace(PROFILE, layers=(layer([6, 2]), layer([])))
    parameters = StoredParameters(bare, (1, 1), [(0, 1), (2, 3)], 1)
    assert parameters.largest_shares() == [6 / 8, 1 / 2]
    whole = StoredParameters(bare, (1, 1), [(0, 1), (2, 3)], 0)
    assert whole.largest_shares() == [1.0, 1.0]
    assert whole.owned_bytes(0) == [8, 8]


def test_a_tied_parameter_has_its_home_at_the_layer_that_counts_it():
    """Users before and after it, several to a stage, and one that no other stage uses."""
    layers = (
        layer([1]),
        layer([8, 5]),
        layer([2], [(1, 0)]),
        layer([3], [(1, 0), (1, 1)]),
        layer([4]),
    )
    profile = replace(PROFILE, layers=layers)

    def tied(lengths):
        return StoredParameters(profile, lengths, [(0,)] * len(lengths)).tied

    assert tied((1, 1, 1, 2)) == ((1, 0, 8, (1, 2, 3)), (1, 1, 5, (1, 3)))
    assert tied((2, 2, 1)) == ((1, 0, 8, (0, 1)), (1, 1, 5, (0, 1)))
    assert tied((1, 3, 1)) == ()


def test_the_larger_of_the_devices_of_a_rank_is_that_with_most_bytes_in_all():
    """Stage 0 has more weights on devices 0 and 1, stage 1 more state on device 3 alone."""
    profile = replace(PROFILE, layers=(layer([10]), layer([100])))
    parameters = StoredParameters(profile, (1, 1), [(0, 1), (2, 3)], 1)
    bytes_ = Costs(weight_bytes=[130, 265], gradient_bytes=[10, 30], optimizer_bytes=[20, 200])
    rows = parameters.add_to(bytes_, devices_per_rank=2).bytes_of_ranks
    assert rows == ((100, 10, 20), (35, 30, 200))
