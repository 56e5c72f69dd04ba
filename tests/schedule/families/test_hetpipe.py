"""HetPipe: where batches go, and both of its bounds on staleness."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.families.stream_laws import (
    check_batches,
    check_stream,
    expected_gap,
    gaps,
    seconds_per_batch,
)

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule, schedules
from penstock.schedule.op import Kind, Op
from penstock.schedule.streaming.streams import Waves


@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 4),
    st.none() | st.integers(1, 7),
    st.integers(0, 3),
)
@settings(deadline=None, max_examples=40)
def test_batches_go_to_the_virtual_workers_in_turn(stages, size, workers, in_flight, distance):
    """Each on ranks of its own, in the order of PipeDream, with versions of its own."""
    hetpipe = schedule(
        "hetpipe", stages, size, virtual_workers=workers, in_flight=in_flight, distance=distance
    )
    check_stream(hetpipe)
    assert hetpipe.placement == {
        (s, n): n // size % workers * stages + s
        for s in range(stages)
        for n in range(hetpipe.slices)
    }
    assert hetpipe.batches % workers == 0
    assert hetpipe.stream.waves == Waves(in_flight or stages, distance)
    one = schedule(
        "pipedream",
        stages,
        size,
        batches=hetpipe.batches // workers,
        warm_up=[
            sum(op.kind is Kind.F for op in row[: row.index(Op(Kind.B, s, 0))])
            for s, row in enumerate(hetpipe.programs[:stages])
        ],
    )

    def renumbered(op):
        """Renumbered as if no other virtual worker were there."""
        return (
            op
            if op.kind is Kind.U
            else op._replace(
                micro_batch=op.micro_batch // size // workers * size + op.micro_batch % size
            )
        )

    for rank, row in enumerate(hetpipe.programs):
        assert tuple(map(renumbered, row)) == one.programs[rank % stages]


@pytest.mark.parametrize("stages", range(1, 6))
@pytest.mark.parametrize("in_flight", range(1, 8))
def test_no_micro_batch_lacks_more_of_its_own_than_the_local_bound(stages, in_flight):
    """s_local = N_m - 1 (Park et al. 2020): N_m batches are in flight, and at most the
    others are missing in the weights of each.
    """
    hetpipe = schedule("hetpipe", stages, 1, in_flight=in_flight)
    gap_of = gaps(hetpipe)
    assert max(gap_of.values()) == in_flight - 1
    ahead = [
        in_flight - s if in_flight >= stages else -(-(stages - s) * in_flight // stages)
        for s in range(stages)
    ]
    assert check_stream(hetpipe).peak_in_flight == tuple(ahead)
    assert gap_of == {
        (stage, n): expected_gap(ahead[stage], 1, n // 2) for stage, n in hetpipe.placement
    }


def contained(schedule, rank, stage, place):
    """How many of every other virtual worker's batches are in the weights that the F at this place
    reads, by the words of waves.
    """
    waves = schedule.stream.waves
    updates = sum(op.kind is Kind.U and op.stage == stage for op in schedule.programs[rank][:place])
    return max(0, updates // waves.length - waves.distance) * waves.length


@pytest.mark.parametrize("distance", range(4))
@pytest.mark.parametrize(("stages", "in_flight"), [(1, 1), (2, 2), (4, 4), (2, 5), (4, 2), (3, 4)])
def test_no_micro_batch_lacks_more_of_the_others_than_the_global_bound(stages, in_flight, distance):
    """s_global = (D + 1)(s_local + 1) + s_local - 1: the weights of minibatch q contain 1 to q -
    (s_global + 1) of all workers. On the first stage of a full pipeline they contain no more in the
    worst case: the bound is tight.
    """
    hetpipe = schedule("hetpipe", stages, 1, in_flight=in_flight, distance=distance, batches=2 * 40)
    bound = (distance + 1) * in_flight + in_flight - 1 - 1
    spare = []
    for rank, row in enumerate(hetpipe.programs):
        for place, (kind, stage, number) in enumerate(row):
            if kind is Kind.F:
                q = number // 2 + 1
                spare.append(contained(hetpipe, rank, stage, place) - max(0, q - (bound + 1)))
    assert min(spare) == 0


def test_the_papers_example_of_the_global_bound():
    """docs/literature/hetpipe.md: with D = 0 and s_local = 3, minibatch 11 must contain everyone's 1 to 4; it
    has those and no more.
    """
    hetpipe = schedule("hetpipe", 4, 1, batches=40)
    place = hetpipe.programs[0].index(Op(Kind.F, 0, 2 * 10))
    assert contained(hetpipe, 0, 0, place) == 4


@pytest.mark.parametrize(
    ("stages", "size", "in_flight"),
    [(4, 1, None), (4, 2, None), (2, 1, 5), (4, 1, 2), (5, 2, 3), (3, 1, 1)],
)
@pytest.mark.parametrize("distance", [0, 1])
def test_virtual_workers_have_no_bubble_with_as_many_in_flight_as_stages(
    stages, size, in_flight, distance
):
    """And all of them work at the same time; with fewer in flight, stages take turns."""
    hetpipe = schedule(
        "hetpipe", stages, size, in_flight=in_flight, distance=distance, virtual_workers=3
    )
    few = -(-stages // min(stages, in_flight or stages))
    assert seconds_per_batch(hetpipe) == pytest.approx(3 * size * few)


@pytest.mark.parametrize(
    ("option", "wrong", "least"),
    [
        ("distance", -1, 0),
        ("distance", 0.5, 0),
        ("in_flight", 0, 1),
        ("in_flight", True, 1),
        ("virtual_workers", 0, 1),
        ("virtual_workers", "2", 1),
    ],
)
def test_numbers_that_make_no_waves_are_refused(option, wrong, least):
    """A distance below 0 would wait for waves that no worker has begun."""
    with pytest.raises(
        ScheduleError, match=f"hetpipe takes {option} of {least} or more, not {wrong!r}"
    ):
        schedule("hetpipe", 2, 2, **{option: wrong})


def test_its_weight_rule_is_its_own():
    """Other weight rules do not support waves."""
    assert schedules()["hetpipe"].weights == schedule("hetpipe", 2, 1).stream.weights == "hetpipe"


def test_any_number_of_batches_is_a_part_of_the_same_programs():
    """By default they have four periods more than are in flight."""
    check_batches("hetpipe", 3, 1, default_batches=14)
    check_batches("hetpipe", 2, 2, default_batches=21, virtual_workers=3, in_flight=5)
