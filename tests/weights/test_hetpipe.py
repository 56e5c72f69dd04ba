"""hetpipe: two bounds of staleness, one in a virtual worker and one between them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Kind
from penstock.schedule.streaming.streams import Waves
from penstock.verify.verify import verify
from penstock.weights.catalogue import weight_rule
from penstock.weights.rule_types import Reads
from penstock.weights.weight_uses import readings, uses

RULE = weight_rule("hetpipe")


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("in_flight", [1, 3, 4, 6])
@pytest.mark.parametrize("distance", [0, 1, 3])
@pytest.mark.parametrize("virtual_workers", [2, 3])
def test_a_batch_lacks_no_more_than_the_papers_two_bounds(
    stages, in_flight, distance, virtual_workers
):
    """s_local = Nm - 1 of its own, (D + 1)(s_local + 1) + s_local - 1 of any other's; on the first
    stage, when it is full, just that.
    """
    hetpipe = schedule(
        "hetpipe",
        stages,
        1,
        virtual_workers=virtual_workers,
        in_flight=in_flight,
        distance=distance,
    )
    report = verify(hetpipe)
    local = in_flight - 1
    bound = (distance + 1) * (local + 1) + local - 1
    assert max(report.staleness_max) <= local
    assert max(report.staleness_across) <= bound
    if in_flight >= stages:
        assert (report.staleness_max[0], report.staleness_across[0]) == (local, bound)
        assert report.versions[0] == in_flight
    assert RULE.extra == 1.0


@pytest.mark.parametrize(
    ("stages", "micro_batches", "options"),
    [
        (3, 1, {}),
        (2, 1, {"distance": 2}),
        (2, 2, {"virtual_workers": 3, "distance": 1}),
        (3, 1, {"in_flight": 5}),
        (1, 1, {"in_flight": 2}),
    ],
)
def test_what_is_lacking_is_that_of_a_count_in_sets_of_batches(stages, micro_batches, options):
    """Every copy has the set of (virtual worker, batch) that its weights contain, and hands on what
    is its own wave by wave.
    """
    hetpipe = schedule("hetpipe", stages, micro_batches, batches=60, **options)
    waves, copies = hetpipe.stream.waves, len(hetpipe.ranks_of_stage[0])
    for stage in range(stages):
        missing = []
        for copy, rank in enumerate(hetpipe.ranks_of_stage[stage]):
            contained, version = {other: set() for other in range(copies)}, 0
            for kind, of, number in hetpipe.programs[rank]:
                if of != stage:
                    continue
                if kind is Kind.F:
                    q = (
                        number // micro_batches // copies + 1
                    )  # the paper counts from 1, in every virtual worker
                    missing += [
                        len(set(range(1, q)) - contained[other])
                        for other in range(copies)
                        if other != copy
                    ]
                elif kind is Kind.U:
                    version += 1
                    contained[copy].add(version)
                    wave, place = divmod(version, waves.length)
                    for other in range(copies) if place == 0 else ():
                        if other != copy:
                            contained[other] |= set(
                                range(1, (wave - waves.distance) * waves.length + 1)
                            )
        assert verify(hetpipe).staleness_across[stage] == max(missing)


def test_a_short_stream_tells_the_bound_of_the_long_one():
    """Waves are taken in from the (D + 1)-th on; the programs that show the order need not last so
    long.
    """
    short, long = (schedule("hetpipe", 2, 1, distance=8, batches=batches) for batches in (12, 100))
    assert verify(short).staleness_across == verify(long).staleness_across == (18, 17)


def test_virtual_workers_count_their_own_versions():
    """Batch t is the (t div W)-th of its own."""
    weight_uses = uses(schedule("hetpipe", 3, 1, virtual_workers=4), RULE)
    for t in range(400, 440):
        assert weight_uses.at(2, t).reads.forward == weight_uses.at(2, t).reads.backward == t // 4
        assert weight_uses.at(0, t).reads == Reads(t // 4 - 2, t // 4 - 2)


def test_one_virtual_worker_lacks_nothing_of_others():
    """There are none."""
    report = verify(schedule("hetpipe", 3, 1, virtual_workers=1))
    assert (report.staleness_across, report.staleness_max) == ((0, 0, 0), (2, 1, 0))


def test_waves_shorter_than_what_is_in_flight_are_refused():
    """The bounds are for waves of all that is in flight."""
    hetpipe = schedule("hetpipe", 4, 1, virtual_workers=2)
    short = replace(hetpipe, stream=replace(hetpipe.stream, waves=Waves(length=2)))
    with pytest.raises(
        ScheduleError,
        match=r"\[wave\] 0F\d+ on rank 0 reads weights without 2 updates .* a wave has 2: .* at most 1 may be missing",
    ):
        verify(short)


def test_copies_that_meet_at_every_update_are_refused():
    """They have no waves."""
    with pytest.raises(
        ScheduleError,
        match=r"'hetpipe' is for copies of stages that exchange their updates in waves, and pipedream has none",
    ):
        verify(schedule("pipedream", 2, 2, replicas=2), weights="hetpipe")


def test_other_rules_are_refused_where_copies_do_not_meet():
    """Their arithmetic hands nothing on."""
    with pytest.raises(
        ScheduleError,
        match=r"in hetpipe copies of a stage do not synchronise at every U.*such as 'hetpipe'",
    ):
        verify(schedule("hetpipe", 2, 1), weights="stash")
    assert readings(schedule("hetpipe", 2, 1), RULE).across


def test_waves_of_copies_that_take_turns_are_refused():
    """A rank has one copy, whose updates a wave consists of."""
    hetpipe = schedule("hetpipe", 2, 1)
    turns = replace(hetpipe, stream=replace(hetpipe.stream, pipelines=2))
    with pytest.raises(ScheduleError, match="exchange their updates in waves, and hetpipe has"):
        RULE.check(turns)
