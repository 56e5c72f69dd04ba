"""Costs: accepted and rejected values."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import SettingError
from penstock.schedule.catalogue import schedule
from penstock.simulate.costs import FIELDS, Costs
from penstock.simulate.network import Network
from penstock.simulate.simulate import simulate_schedule


@pytest.mark.parametrize(
    "bad",
    [
        -1,
        float("nan"),
        float("inf"),
        "3",
        "abc",
        [1, -1],
        [1, float("nan")],
        (1, "2"),
        ["x"],
        [None],
        [[1, -2]],
        [[[1]]],
        10**400,
        [10**400],
        1j,
        {"a": 1},
    ],
)
@pytest.mark.parametrize("name", ["forward", "transfer", "activation_bytes"])
def test_what_is_no_finite_amount_is_refused_by_name(name, bad):
    """Text of digits inside a list was once taken for a number, and other text escaped as Python's
    own error.
    """
    with pytest.raises(
        SettingError,
        match=rf"costs: {name} has .*; seconds and bytes must be finite and not negative",
    ):
        Costs(**{name: bad})


def test_lists_are_kept_as_tuples_of_floats():
    """Costs are values: equal, hashable and safe from a caller that goes on changing its list."""
    numbers = [1, np.float32(2), np.int64(3), True]
    costs = Costs(forward=numbers)
    numbers[0] = 99
    assert costs.forward == (1.0, 2.0, 3.0, 1.0)
    assert hash(costs) == hash(Costs(forward=(1, 2, 3, 1)))
    assert Costs(forward=range(1, 4)).forward == (1.0, 2.0, 3.0)
    assert Costs(forward=[range(2), 1]).forward == ((0.0, 1.0), 1.0)


def test_one_number_stands_for_all_stages():
    """Most examples have equal stages."""
    assert Costs(forward=2).spread("forward", 3) == (2.0, 2.0, 2.0)
    assert Costs(transfer=2).spread("transfer", 0) == ()
    assert Costs(transfer=()).spread("transfer", 0) == ()
    assert Costs().spread("backward", 3) is None


def test_a_list_of_another_length_is_refused():
    """Both numbers are in the message: has and needs."""
    with pytest.raises(SettingError, match="costs: update has 2 entries, the schedule needs 3"):
        Costs(update=[1, 2]).spread("update", 3)
    with pytest.raises(SettingError, match="costs: update has 4 entries, the schedule needs 3"):
        Costs(update=[1, 2, 3, 4]).spread("update", 3)


def test_numbers_may_stand_per_micro_batch_as_a_list_an_array_or_a_function():
    """Sequences have long and short micro-batches; three ways of saying so are one cost."""
    case_schedule = schedule("1f1b", 2, 3)
    table = [[1, 2, 3], [4, 5, 6]]
    ways = [
        Costs(forward=table),
        Costs(forward=np.array(table)),
        Costs(forward=lambda stage, m: table[stage][m]),
        Costs(forward=[np.array([1, 2, 3]), (4, 5, 6)]),
    ]
    lines = [simulate_schedule(case_schedule, costs) for costs in ways]
    assert {line.makespan for line in lines} == {1 + (4 + 8) + (5 + 10) + (6 + 12) + 6}
    assert lines[0].busy == (18, 45)
    mixed = simulate_schedule(case_schedule, Costs(forward=[2, [4, 5, 6]], backward=0))
    assert mixed.makespan == 2 + 4 + 5 + 6


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (
            {"forward": [[1, 2], [1, 2, 3]]},
            "costs: forward of stage 0 has 2 entries, but the schedule has 3 micro-batches",
        ),
        (
            {"transfer": [[1]]},
            "costs: transfer of stage 0 has 1 entries, but the schedule has 3 micro-batches",
        ),
        (
            {"forward": lambda stage, m: -m},
            "costs: forward of stage 0, micro-batch 1 has -1; seconds and bytes must be finite",
        ),
        (
            {"weight_bytes": [[1, 2, 3], 1]},
            r"costs: weight_bytes has \[1, 2, 3\], but cannot differ by micro-batch",
        ),
        (
            {"update": lambda stage, m: 1},
            "costs: update has <function .*; seconds and bytes must be finite",
        ),
        (
            {"links": "triplex"},
            "costs: links are one of duplex, half-duplex, shared, not 'triplex'",
        ),
        (
            {"transfer": 1, "latency": 1},
            "costs: transfer and latency both set the seconds of a message; give one of the two",
        ),
        ({"bandwidth": 1}, "costs: bandwidth has no effect without boundary_bytes"),
        (
            {"bandwidth": 0, "boundary_bytes": 1},
            "costs: bandwidth is 0 bytes/s at a boundary: no message would arrive",
        ),
        (
            {"optimizer_bytes": 1},
            "costs: optimizer_bytes has no effect without weight_bytes, of which it is a part",
        ),
        (
            {"activation_bytes_after_input_grad": 1},
            "costs: activation_bytes_after_input_grad has no effect without activation_bytes",
        ),
        (
            {"activation_bytes_after_input_grad": 3, "activation_bytes": [3, 2]},
            "costs: stage 1 has 3 activation_bytes_after_input_grad, more than its 2 activation_bytes",
        ),
        (
            {"weight_bytes": 8, "gradient_bytes": 5, "optimizer_bytes": [3, 4]},
            "costs: gradient_bytes and optimizer_bytes of stage 1 add up to more than its 8 weight_bytes",
        ),
    ],
)
def test_costs_that_contradict_themselves_or_the_schedule_are_refused(costs, message):
    """One message, with the field's name and the numbers."""
    with pytest.raises(SettingError, match=message):
        simulate_schedule(schedule("1f1b", 2, 3), Costs(**costs)).peak_memory  # noqa: B018


def test_spread_has_no_answer_where_micro_batches_differ():
    """Those who need one number per stage must not get a wrong one."""
    with pytest.raises(
        SettingError,
        match="costs: forward differs by micro-batch, but one number per stage is needed",
    ):
        Costs(forward=[1, [1, 2]]).spread("forward", 2)


def test_a_message_takes_latency_and_bytes_over_bandwidth():
    """As networks are measured; the way back may have seconds of its own."""
    case_schedule = schedule("gpipe", 2, 1)
    assert simulate_schedule(
        case_schedule, Costs(latency=0.5, bandwidth=4, boundary_bytes=10)
    ).makespan == 6 + 2 * (0.5 + 2.5)
    assert simulate_schedule(case_schedule, Costs(latency=0.5)).makespan == 6 + 2 * 0.5
    assert (
        simulate_schedule(
            case_schedule, Costs(latency=0.5, bandwidth=4, boundary_bytes=10, transfer_back=1)
        ).makespan
        == 6 + 3 + 1
    )


def test_fields_that_never_differ_by_micro_batch_are_refused_as_lists_and_functions():
    """Of each of them one number per stage is needed; all others may differ."""
    per_stage = {"update", "weight_bytes", "gradient_bytes", "optimizer_bytes", "weight_versions"}
    others = {"weight_bytes": 9.0, "activation_bytes": 9.0, "boundary_bytes": 9.0}
    for name in FIELDS:
        fields = {key: number for key, number in others.items() if key != name}
        if name in per_stage:
            for value in ([[1.0, 2.0]], [(1.0, 2.0), 3.0], [np.ones(2)]):
                with pytest.raises(
                    SettingError, match=f"{name} has .*cannot differ by micro-batch"
                ):
                    Costs(**fields, **{name: value})
            with pytest.raises(SettingError, match=f"costs: {name} has <function"):
                Costs(**fields, **{name: lambda stage, number: 1.0})
        else:
            assert getattr(Costs(**fields, **{name: [[1, 2], 3]}), name) == ((1.0, 2.0), 3.0)


@pytest.mark.parametrize(
    "bad",
    [
        (1.0, float("nan")),
        (float("nan"),) * 2,
        (1.0, float("inf")),
        (1.0, -0.5),
        (-1.0, 2.0),
        ((1.0, float("nan")),),
        ((-1.0, 3.0),),
    ],
)
def test_rows_of_floats_are_checked_as_any_others(bad):
    """They have a short way of their own; NaN passes no comparison."""
    with pytest.raises(SettingError, match=r"forward has .*; seconds and bytes must be finite"):
        Costs(forward=bad)


@pytest.mark.parametrize("name", ["gradient_bytes", "optimizer_bytes", "weight_versions"])
def test_each_part_needs_its_whole(name):
    """It would have no effect."""
    with pytest.raises(SettingError, match=f"costs: {name} has no effect without weight_bytes"):
        Costs(**{name: 1.0})
    assert getattr(Costs(weight_bytes=3.0, **{name: 1.0}), name) == 1.0


def test_links_are_set_in_one_way():
    """A network has links of its own; a latency needs no bytes, a bandwidth does."""
    for links in ("half-duplex", "shared"):
        message = f"links are '{links}', and a network has links of its own; leave one out"
        with pytest.raises(SettingError, match=message):
            Costs(links=links, network=Network((0, 1)))
    assert Costs(network=Network((0, 1))).links == "duplex"
    with pytest.raises(SettingError, match="transfer and bandwidth both set the seconds"):
        Costs(transfer=1.0, bandwidth=1.0, boundary_bytes=1.0)
    assert Costs(latency=1.0).bandwidth is None
    assert Costs(transfer_back=1.0, latency=1.0).transfer_back == 1.0


def test_names_before_version_0_2_still_work_with_a_warning():
    """Each by its new name."""
    names = {
        "again": "recompute",
        "kept_bytes": "saved_bytes",
        "again_bytes": "recompute_peak_bytes",
        "evict": "offload",
        "pair": "forward_backward",
    }
    for old, new in names.items():
        with pytest.warns(DeprecationWarning, match=new):
            assert getattr(Costs(**{old: 7.0}), new) == 7.0


def test_the_bytes_of_ranks_are_rows_of_three():
    """Lists become tuples, so that costs are values."""
    costs = Costs(weight_bytes=9.0, bytes_of_ranks=[[1, 2, 3]])
    assert costs.bytes_of_ranks == ((1, 2, 3),)
    for row in ([1, 2], [1, 2, 3, 4]):
        with pytest.raises(SettingError, match="bytes_of_ranks has rows of other than 3 numbers"):
            Costs(weight_bytes=9.0, bytes_of_ranks=[[1, 2, 3], row])


def test_a_bandwidth_without_bytes_is_refused_also_beside_a_latency():
    """A latency alone is what a message takes that has no bytes."""
    with pytest.raises(SettingError, match="bandwidth has no effect without boundary_bytes"):
        Costs(bandwidth=4.0, latency=1.0)
    line = simulate_schedule(schedule("gpipe", 2, 1), Costs(latency=0.5))
    assert line.makespan == 2 * 3 + 2 * 0.5


def test_a_part_of_nothing_needs_its_whole_and_a_whole_of_nothing_is_one():
    """0 is a number that was given."""
    with pytest.raises(SettingError, match="bandwidth has no effect without boundary_bytes"):
        Costs(bandwidth=0.0)
    with pytest.raises(SettingError, match="after_input_grad has no effect without activation_b"):
        Costs(activation_bytes_after_input_grad=0.0)
    assert Costs(activation_bytes=0.0, activation_bytes_after_input_grad=1.0) is not None
