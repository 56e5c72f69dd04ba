"""`partition`, and the properties that every registered method has."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PartitionError, UnknownName
from penstock.partition import catalogue
from penstock.partition.catalogue import (
    PARTITIONERS,
    check_lengths,
    check_stages,
    option_names,
    partition,
)

#: Those that take only some numbers of stages: their laws are in their own tests.
CHOOSY = ["folded"]
#: Those that need an argument.
WITH_ARGUMENT = {"type": "type:conv"}
#: All others: a new file of the package is found by itself.
METHODS = [WITH_ARGUMENT.get(name, name) for name in PARTITIONERS.entries() if name not in CHOOSY]
every_method = pytest.mark.parametrize("by", METHODS)


@st.composite
def models(draw):
    """Arguments of make_profile and a number of stages: zeros, ties and a layer that dwarfs the
    others come often.
    """
    count = draw(st.integers(1, 14))
    cost = st.one_of(st.just(0.0), st.sampled_from([0.1, 0.5, 1.0, 1000.0]), st.floats(0, 1))

    def draw_list(values):
        return draw(st.lists(values, min_size=count, max_size=count))

    kinds = draw_list(st.sampled_from(["Conv2d", "Linear"]))
    kinds[draw(st.integers(0, count - 1))] = "Conv2d"
    return {
        "forward": draw_list(cost),
        "backward": draw_list(cost),
        "kinds": kinds,
        "parameters": draw_list(st.integers(0, 9)),
        "output_bytes": draw_list(cost),
    }, draw(st.integers(1, count))


def test_the_methods_of_the_core_are_there():
    """A file that does not import would silently not be listed."""
    assert {"bottleneck", "limited", "looped", "size", "time", "type:conv", "uniform"} <= {*METHODS}


@pytest.mark.parametrize("by", METHODS + CHOOSY)
def test_every_method_says_where_it_is_from(by):
    """A method without a source cannot be checked against it."""
    assert PARTITIONERS.find(by.partition(":")[0]).facts.get("source"), (
        f"say where {by} is from: @register(..., source=...)"
    )


@every_method
@settings(deadline=None, max_examples=60)
@given(model=models())
def test_every_method_gives_each_stage_a_layer_and_each_layer_a_stage(make_profile, by, model):
    """The law that all above this room build on; ties and zeros are where torchgpipe's own code
    breaks it.
    """
    profile, stages = make_profile(**model[0]), model[1]
    lengths = partition(profile, stages, by)
    assert len(lengths) == stages
    assert min(lengths) >= 1
    assert sum(lengths) == len(profile)
    assert all(type(length) is int for length in lengths)
    assert partition(profile, stages, by) == lengths


@every_method
def test_every_method_cuts_a_large_model(make_profile, by):
    """A thousand layers in 64 stages is within what every method is made for."""
    rng = np.random.default_rng(0)
    times, counts = rng.random(1000).tolist(), rng.integers(0, 99, 1000).tolist()
    profile = make_profile(times, kinds=["Conv2d", "ReLU"] * 500, parameters=counts)
    lengths = partition(profile, 64, by)
    assert len(lengths) == 64
    assert min(lengths) >= 1
    assert sum(lengths) == 1000


@every_method
@pytest.mark.parametrize("stages", [1, 7])
def test_one_stage_and_one_layer_each_leave_no_choice(make_profile, by, stages):
    """The two ends of the range, where an off-by-one shows first."""
    profile = make_profile([3, 1, 4, 1, 5, 9, 2], kinds=["Conv2d"] * 7)
    assert partition(profile, stages, by) == {1: [7], 7: [1] * 7}[stages]


@every_method
def test_more_stages_than_layers_are_refused_with_both_numbers(make_profile, by):
    """An empty stage would be a rank with nothing to do."""
    with pytest.raises(
        PartitionError,
        match=r"4 stages from 3 layers: every stage needs at least one\. Use at most 3",
    ):
        partition(make_profile([1, 1, 1]), 4, by)


@every_method
@pytest.mark.parametrize("stages", [0, -2])
def test_fewer_than_one_stage_is_refused(make_profile, by, stages):
    """There is no such model."""
    with pytest.raises(PartitionError, match=f"1 stage or more, not {stages}"):
        partition(make_profile([1, 1, 1]), stages, by)


@every_method
def test_a_model_without_layers_is_refused(make_profile, by):
    """An empty profile has no sizes and no kinds either; the message must still be about the
    layers.
    """
    with pytest.raises(PartitionError, match="cannot make 1 stages from 0 layers"):
        partition(make_profile([]), 1, by)


@every_method
def test_an_option_that_the_method_does_not_take_is_refused_and_its_own_listed(make_profile, by):
    """A misspelt option that is dropped in silence is a wrong plan."""
    with pytest.raises(PartitionError, match="does not take micro_bach: it takes"):
        partition(make_profile([1, 1], kinds=["Conv2d"] * 2), 2, by, micro_bach=3)


def test_options_of_every_method_can_be_listed():
    """The command line prints them; for `bottleneck` they do not stand in the signature."""
    listed = {name: option_names(entry) for name, entry in PARTITIONERS.entries().items()}
    expected = {
        "bottleneck": (
            "micro_batch",
            "bandwidth_bytes_per_s",
            "latency_s",
            "overlap",
            "costs",
            "transfer",
        ),
        "folded": ("micro_batch", "slack"),
        "limited": (
            "memory_limit",
            "in_flight",
            "micro_batch",
            "optimizer_states",
            "bandwidth_bytes_per_s",
            "latency_s",
            "overlap",
        ),
        "looped": ("ranks", "micro_batch", "slack"),
        "parameters": (),
        "size": ("batch", "micro_batches", "param_scale"),
        "time": ("micro_batch",),
        "type": ("pattern",),
        "uniform": (),
    }
    assert {name: listed[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("lengths", "message"),
    [([1, 1], None), ([2], "has 1 stages, but 2"), ([2, 1], "sums to 3"), ([2, 0], "is empty")],
)
def test_lengths_of_a_users_method_are_checked(monkeypatch, make_profile, lengths, message):
    """They may be numbers of NumPy, and come back as ints."""
    entry = SimpleNamespace(name="mine", facts={"options": ()}, make=lambda *_: np.array(lengths))
    monkeypatch.setattr(catalogue, "PARTITIONERS", SimpleNamespace(find=lambda _: entry))
    profile = make_profile([1, 1])
    if message is None:
        assert list(map(type, partition(profile, 2, "mine"))) == [int, int]
        return
    with pytest.raises(PartitionError, match=message):
        partition(profile, 2, "mine")


def test_bottleneck_is_the_default(make_profile):
    """Without `by` the cut is exact."""
    assert partition(make_profile([1] * 8 + [20]), 3) == [4, 4, 1]


@pytest.mark.parametrize("stages", [np.int64(2), np.uint8(2)])
def test_numpy_integers_are_numbers_of_stages(make_profile, stages):
    """Counts often come out of arrays."""
    assert partition(make_profile([1, 1, 1, 1]), stages, "uniform") == [2, 2]
    assert type(check_stages(4, stages)) is int


@pytest.mark.parametrize("stages", [2.0, True, "2", np.float64(2), np.True_])
def test_stages_that_are_no_whole_number_are_refused(make_profile, stages):
    """True would pass for 1, and 2.5 has no meaning at all."""
    with pytest.raises(PartitionError, match="number of stages must be a whole number, and is"):
        partition(make_profile([1, 1, 1, 1]), stages, "uniform")


def test_an_unknown_name_is_answered_with_the_closest():
    """Names are typed by hand."""
    with pytest.raises(
        UnknownName, match=r"no partition method called 'bottelneck'\. Did you mean 'bottleneck'"
    ):
        partition(None, 2, "bottelneck")  # found out before the profile is looked at


def test_a_method_without_a_number_of_stages_is_refused(make_profile):
    """Only a list of lengths knows how many it has."""
    with pytest.raises(PartitionError, match="'time' needs the number of stages"):
        partition(make_profile([1, 1]), by="time")


def test_an_argument_after_a_colon_is_refused_where_none_is_taken(make_profile):
    """`time:32` looks as if it set the size."""
    with pytest.raises(
        PartitionError, match="time takes no argument after a colon, but 'time:32' has '32'"
    ):
        partition(make_profile([1, 1]), 2, "time:32")


def test_a_pattern_given_twice_is_refused(make_profile):
    """One of the two would win in silence."""
    with pytest.raises(
        PartitionError, match="'type:conv' already contains the pattern; remove pattern='linear'"
    ):
        partition(make_profile([1, 1]), 2, "type:conv", pattern="linear")


@pytest.mark.parametrize("by", [[2, 1, 3], (2, 1, 3), np.array([2, 1, 3]), iter([2, 1, 3])])
def test_lengths_may_be_given_in_any_sequence_and_come_back_as_ints(make_profile, by):
    """Stage lengths may be set explicitly; they are ints, so that plans can be written as JSON."""
    lengths = partition(make_profile([1] * 6), by=by)
    assert lengths == [2, 1, 3]
    assert all(type(length) is int for length in lengths)


@pytest.mark.parametrize(
    ("by", "stages", "message"),
    [
        ([2, 0, 4], None, "stage 1 of .2, 0, 4. is empty"),
        ([2, -1, 5], None, "stage 1 of .2, -1, 5. is empty"),
        ([2, 3], None, "sums to 5, but the model has 6 layers"),
        ([2, 4], 3, "has 2 stages, but 3 are requested"),
        ([], None, "sums to 0, but the model has 6 layers"),
        ([2, 4.0], None, "stage 1 of .2, 4.0. has the length 4.0, which is not a whole number"),
        ([True, 5], None, "stage 0 of .True, 5. has the length True"),
        ([2, "4"], None, "stage 1 of .2, '4'. has the length '4'"),
        (np.array([2.0, 4.0]), None, "stage 0 of .* has the length .*2.0"),
        (6, None, "by is 6: it must be a method's name, or a list of stage lengths"),
        (None, 2, "by is None: it must be a method's name"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(make_profile, by, stages, message):
    """They come from configuration files; the message says which entry is off."""
    with pytest.raises(PartitionError, match=message):
        partition(make_profile([1] * 6), stages, by)


def test_no_lengths_are_refused_for_a_model_without_layers_too():
    """The sums agree, but a model of no stages cannot run."""
    with pytest.raises(PartitionError, match="sums to 0"):
        check_lengths([], 0, None)


def test_lengths_take_no_options(make_profile):
    """An option that nothing reads is a misunderstanding."""
    with pytest.raises(
        PartitionError,
        match="a list of stage lengths does not take micro_batch: it takes no options",
    ):
        partition(make_profile([1, 1]), by=[1, 1], micro_batch=4)
