"""Uses: what each micro-batch reads in an endless run, compared with a slow reference count."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from tests.weights import slow

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Schedule
from penstock.schedule.streaming.period import period_of, with_batch_count
from penstock.schedule.streaming.streams import Stream, Waves
from penstock.verify.verify import verify
from penstock.weights.catalogue import WeightRule, weight_rule
from penstock.weights.compatibility import rule_of
from penstock.weights.rule_types import Reads
from penstock.weights.weight_uses import readings, uses

#: Streams of all kinds: plain, with many micro-batches, copies that meet, copies of weights in
#: turns, waves.
STREAMS = [
    ("pipedream", 4, 1, {}), ("pipedream", 3, 2, {}), ("pipedream", 2, 5, {}), ("pipedream", 1, 1, {}),
    ("pipedream", 3, 4, {"replicas": [2, 1, 1]}), ("pipedream", 2, 4, {"replicas": 2}), ("pipedream", 3, 2, {"warm_up": [5, 3, 1]}),
    ("2bw", 3, 3, {}), ("xpipe", 4, 3, {}), ("wpipe", 4, 2, {}), ("wpipe", 6, 5, {}), ("avgpipe", 4, 2, {}),
    ("avgpipe", 3, 1, {"pipelines": 3}), ("hetpipe", 3, 1, {}), ("hetpipe", 2, 2, {"virtual_workers": 3, "distance": 1}),
]  # fmt: skip
every_stream = pytest.mark.parametrize(("name", "stages", "micro_batches", "options"), STREAMS)


def rule_that_reads(reads, **facts):
    """A rule that is not registered."""
    return WeightRule("mine", reads, synchronous=False, source="a test", **facts)


@every_stream
@pytest.mark.parametrize("weights", [None, "vertical-sync", "xpipe"])
def test_uses_for_ever_are_those_of_a_long_program(name, stages, micro_batches, options, weights):
    """A run of thousands of batches asks for every one of them; a table of a few has to answer for
    all.
    """
    family_schedule = schedule(name, stages, micro_batches, **options)
    rule = rule_of(family_schedule) if weights is None else weight_rule(weights)
    check_uses(family_schedule, rule)


def test_a_period_contains_whole_loops_and_whole_turns_of_the_copies():
    """Loops of two batches and three copies of the weights: both begin again after six batches."""
    loops = [f"0F{n} 0F{n + 1} 0B{n} 0U{n + 1} 0B{n + 1} 0U{n + 2}" for n in range(0, 12, 2)]
    stream = Stream(12, pipelines=3)
    plain = Schedule.parse(" ".join(loops), synchronous=False)
    check_uses(replace(plain, stream=stream), weight_rule("stash"))


def test_the_first_stage_may_be_on_any_rank():
    """Users number their ranks as they like."""
    pipedream = schedule("pipedream", 3, 1)
    turned = replace(pipedream, programs=pipedream.programs[::-1])
    check_uses(turned, weight_rule("vertical-sync"))


def check_uses(stream, rule):
    """Compare the uses of a stream with the reads of a longer program."""
    micro_batches = stream.micro_batches
    weight_uses = uses(stream, rule)
    long = with_batch_count(stream, stream.batches + 5)
    places = slow.places(long)
    for (stage, number), place in places.items():
        use = weight_uses.at(stage, number)
        assert use.reads == rule.reads(place)
        assert (use.batch, use.micro_batch) == (place.batch, number % micro_batches)
        assert use.first == (place.micro_batch == 0)
        after = following(long, stage, number)
        assert after is None or use.next_forward == rule.reads(places[stage, after]).forward


def following(schedule, stage, number):
    """The number of the next F on the same copy of a stage's weights, on the same rank."""
    program = schedule.programs[schedule.placement[stage, number]]
    turn, size = schedule.stream.pipelines, schedule.micro_batches
    numbers = [
        op.micro_batch
        for op in program
        if op.kind == "F"
        and op.stage == stage
        and op.micro_batch // size % turn == number // size % turn
    ]
    index = numbers.index(number) + 1
    return numbers[index] if index < len(numbers) else None


@every_stream
def test_staleness_and_versions_are_those_of_a_long_program_however_short_the_given_one(
    name, stages, micro_batches, options
):
    """The programs show the order; start and end of a few batches are not what a run of thousands
    is like.
    """
    family_schedule = schedule(name, stages, micro_batches, **options)
    rule = rule_of(family_schedule)
    period, weight_readings = (
        uses(family_schedule, rule).batches * micro_batches,
        readings(family_schedule, rule),
    )
    long = with_batch_count(family_schedule, 2 * family_schedule.batches)
    reads = {key: rule.reads(place) for key, place in slow.places(long).items()}
    assert weight_readings.versions == (
        (1,) * stages if rule.one_version else slow.version_counts(long, reads)
    )
    ages = slow.ages(long, reads)
    assert [list(row) for row in weight_readings.ages] == [
        row[: family_schedule.slices] for row in ages
    ]
    assert weight_readings.max_staleness == tuple(map(max, ages))
    assert weight_readings.mean_staleness == tuple(sum(row[-period:]) / period for row in ages)


@every_stream
def test_last_is_the_micro_batch_whose_gradient_is_the_last_of_its_batch_on_its_rank(
    name, stages, micro_batches, options
):
    """What was made for a batch can go then."""
    family_schedule = schedule(name, stages, micro_batches, **options)
    weight_uses = uses(family_schedule, rule_of(family_schedule))
    for program in family_schedule.programs:
        latest = {}
        for op in program:
            if op.kind == "B":
                latest[op.stage] = op.micro_batch
            elif op.kind == "U":
                assert weight_uses.at(op.stage, latest[op.stage]).last
        total = sum(
            weight_uses.at(op.stage, op.micro_batch).last for op in program if op.kind == "F"
        )
        assert total == sum(op.kind == "U" for op in program)


@every_stream
def test_far_away_everything_is_as_it_was_a_period_before(name, stages, micro_batches, options):
    """Training does not end after a known number of batches."""
    family_schedule = schedule(name, stages, micro_batches, **options)
    weight_uses = uses(family_schedule, rule_of(family_schedule))
    period = weight_uses.batches * micro_batches
    for stage in range(family_schedule.stages):
        for number in range(10**9, 10**9 + 2 * period):
            early, late = weight_uses.at(stage, number), weight_uses.at(stage, number + period)
            step = late.reads.backward - early.reads.backward
            assert late.batch - early.batch == weight_uses.batches
            assert (
                late.reads.forward - early.reads.forward
                == late.next_forward - early.next_forward
                == step
                > 0
            )
            assert (late.first, late.last, late.micro_batch) == (
                early.first,
                early.last,
                early.micro_batch,
            )


@given(slow.streams(pipelines=2))
@settings(deadline=None, max_examples=80)
def test_any_stream_has_the_staleness_and_the_versions_of_a_slow_count(schedule):
    """No family has these orders; users' programs may."""
    if schedule.stream.pipelines == 1:
        assert verify(schedule).versions == readings(schedule, weight_rule("stash")).versions
    places = slow.places(schedule)
    for rule in (
        weight_rule("stash"),
        rule_that_reads(lambda p: Reads(p.at_forward - p.at_forward % 2, p.at_forward)),
    ):
        reads = {key: rule.reads(place) for key, place in places.items()}
        try:
            weight_readings = readings(schedule, rule)
        except ScheduleError as error:
            assert (rule.name, "which has been dropped" in str(error)) == ("mine", True)  # noqa: PT017 - it depends on the order
            continue
        assert [list(row) for row in weight_readings.ages] == slow.ages(schedule, reads)
        same_versions(schedule, weight_readings, reads)


def same_versions(schedule, weight_readings, reads):
    """As many as the slow count finds; or more, if it would find them in the batches to come."""
    counted = slow.version_counts(schedule, reads)
    try:
        period_of(schedule)
    except ScheduleError:
        assert weight_readings.versions == counted
    else:
        assert all(more >= few for more, few in zip(weight_readings.versions, counted, strict=True))


@given(slow.streams())
@settings(deadline=None, max_examples=40)
def test_any_stream_under_vertical_sync_reads_one_version_on_all_stages_or_is_refused(schedule):
    """An update that stands late may lack when the version of the first stage is asked for; then it
    is said which.
    """
    places = slow.places(schedule)
    rule = weight_rule("vertical-sync")
    reads = {key: rule.reads(place) for key, place in places.items()}
    late = {
        f"{stage}F{number}"
        for (stage, number), place in places.items()
        if reads[stage, number].forward > place.at_forward
    }
    rows = [
        [
            reads[op.stage, op.micro_batch].forward
            for op in program
            if (op.kind, op.stage) == ("F", stage)
        ]
        for program in schedule.programs
        for stage in range(schedule.stages)
    ]
    if late:
        with pytest.raises(
            ScheduleError, match=r"another update has to come before the op"
        ) as caught:
            readings(schedule, rule)
        assert late <= {finding.op for finding in caught.value.findings}
    elif all(
        row == sorted(row) for row in rows
    ):  # else forwards overtake each other from stage to stage
        weight_readings = readings(schedule, rule)
        assert [list(row) for row in weight_readings.ages] == slow.ages(schedule, reads)
        same_versions(schedule, weight_readings, reads)


@given(slow.streams(pipelines=3))
@settings(deadline=None, max_examples=40)
def test_what_only_finds_the_newest_keeps_one_version_of_every_copy(schedule):
    """`none` and what predicts never keep an old one, whatever the order."""
    ages = readings(schedule, weight_rule("none")).ages
    assert list(map(list, ages)) == slow.ages(
        schedule, {key: Reads(place.at_forward, 0) for key, place in slow.places(schedule).items()}
    )
    assert (
        readings(schedule, weight_rule("none")).versions
        == (schedule.stream.pipelines,) * schedule.stages
    )


def test_a_synchronous_schedule_goes_on_with_one_version_per_batch():
    """Every drain makes the next version, and the next batch reads it."""
    weight_uses = uses(schedule("1f1b", 3, 4), weight_rule("flush"))
    assert [weight_uses.at(1, number).reads.forward for number in (0, 3, 4, 400, 403)] == [
        0,
        0,
        1,
        100,
        100,
    ]
    assert [weight_uses.at(1, number).next_forward for number in (0, 3, 4, 402, 403)] == [
        0,
        1,
        1,
        100,
        101,
    ]
    assert [(weight_uses.at(2, n).first, weight_uses.at(2, n).last) for n in range(4)] == [
        (True, False),
        (False, False),
        (False, False),
        (False, True),
    ]
    assert (
        list(map(list, readings(schedule("1f1b", 3, 4), weight_rule("flush")).ages))
        == [[0] * 4] * 3
    )
    assert readings(schedule("chimera", 4, 4), weight_rule("flush")).versions == (1, 1, 1, 1)


def test_slices_of_micro_batches_are_counted_as_the_ops_count_them():
    """A batch of two micro-batches of three slices each has the numbers 0 to 5."""
    weight_uses = uses(schedule("terapipe", 2, 2, slices=3), weight_rule("flush"))
    reads = [weight_uses.at(1, number).reads.forward for number in (0, 5, 6, 11, 12)]
    assert reads == [0, 0, 1, 1, 2]
    assert [weight_uses.at(1, number).batch for number in (5, 6)] == [0, 1]
    # Backwards of the last slices come first.
    assert [weight_uses.at(1, number).last for number in range(6)] == [False] * 3 + [
        True,
        False,
        False,
    ]


def test_programs_without_a_stream_come_again_from_drain_to_drain():
    """A user's text of several updates says nothing of what follows it but itself."""
    schedule = Schedule.parse("0F0 0F1 0B0 0U1 0B1 0U2", synchronous=False)
    weight_uses = uses(schedule, weight_rule("stash"))
    assert [weight_uses.at(0, number).reads.forward for number in range(6)] == [0, 0, 2, 2, 4, 4]
    assert [weight_uses.at(0, number).next_forward for number in range(4)] == [0, 2, 2, 4]
    stash = readings(schedule, weight_rule("stash"))
    assert (stash.ages, stash.mean_staleness, stash.versions) == (((0, 1),), (0.5,), (2,))


def test_a_stream_that_does_not_repeat_itself_cannot_go_on_for_ever():
    """It is sound, and its own batches can be analysed, but not those after them."""
    text = "0F0 0B0 0U1 0F1 0F2 0B1 0U2 0B2 0U3"
    schedule = Schedule(Schedule.parse(text).programs, "odd", synchronous=False, stream=Stream(3))
    stash = readings(schedule, weight_rule("stash"))
    assert (stash.ages, stash.mean_staleness) == (((0, 0, 1),), (1 / 3,))
    with pytest.raises(ScheduleError, match="odd does not repeat itself"):
        uses(schedule, weight_rule("stash"))


def test_the_mean_staleness_is_that_of_the_full_pipeline():
    """Start-up is forgotten after a few batches; corrections are made for the rest of the run."""
    weight_uses = uses(schedule("pipedream", 4, 2), weight_rule("pipemare"))
    assert [weight_uses.staleness(stage) for stage in range(4)] == [1.5, 1.0, 0.5, 0.0]


def test_a_version_that_is_not_there_yet_or_no_longer_is_refused_with_op_rank_and_version():
    """On tensors it would be read as garbage, or not at all."""
    pipedream = schedule("pipedream", 3, 1)
    with pytest.raises(
        ScheduleError,
        match=r"mine: 0F1 on rank 0 reads version 1 of stage 0, where the newest is 0",
    ) as caught:
        uses(pipedream, rule_that_reads(lambda place: Reads(place.batch, place.batch)))
    assert caught.value.findings[0].rank == 0
    with pytest.raises(
        ScheduleError,
        match=r"2F4 on rank 2 reads version 0 of stage 2, which has been dropped \(kept: 3, 4\); a",
    ) as caught:
        readings(
            pipedream,
            rule_that_reads(
                lambda place: Reads(place.at_forward if place.batch < 4 else 0, place.at_forward)
            ),
        )
    assert ("2F4", 2) in [(finding.op, finding.rank) for finding in caught.value.findings]


def test_what_a_forward_has_read_is_kept_for_its_backward_even_if_that_reads_a_newer_version():
    """Saved activations refer to it; that a rule caps what backwards read saves nothing."""
    pipedream = schedule("pipedream", 4, 1)
    capped = rule_that_reads(lambda p: Reads(p.at_forward, max(p.at_forward, p.at_backward - 1)))
    assert (
        readings(pipedream, capped).versions
        == readings(pipedream, weight_rule("stash")).versions
        == (4, 3, 2, 1)
    )


def test_a_backward_cannot_read_what_was_let_go_before_its_forward_or_comes_after_it():
    """It has been dropped, or does not exist yet."""
    pipedream = schedule("pipedream", 2, 1)
    with pytest.raises(
        ScheduleError,
        match=r"1F1 on rank 1 reads version 0 of stage 1, which has been dropped \(kept: 1\);",
    ) as caught:
        readings(
            pipedream, rule_that_reads(lambda p: Reads(p.at_forward, max(p.at_forward - 1, 0)))
        )
    assert {finding.op[1] for finding in caught.value.findings} == {"F"}
    with pytest.raises(
        ScheduleError,
        match=r"1B0 on rank 1 reads version 1 of stage 1, where the newest is 0: another update",
    ):
        readings(pipedream, rule_that_reads(lambda p: Reads(p.at_forward, p.at_backward + 1)))


def test_what_has_one_version_reads_older_ones_only_as_predictions_that_were_made_of_them():
    """A prediction is kept from the batch's first micro-batch; the weights that it was made of are
    not.
    """
    pipedream = schedule("pipedream", 4, 4)
    rule = rule_that_reads(
        lambda p: Reads(p.batch_at_forward, p.at_backward, forward_ahead=1), one_version=True
    )
    assert readings(pipedream, rule).versions == (1, 1, 1, 1)
    with pytest.raises(
        ScheduleError,
        match=r"0F7 on rank 0 reads version 0 of stage 0, which has been dropped \(kept: 1\); a",
    ):
        readings(
            pipedream,
            rule_that_reads(lambda p: Reads(p.batch_at_forward, p.at_backward), one_version=True),
        )


def test_a_place_that_a_rule_refuses_is_told_once_for_each_rank():
    """A thousand micro-batches in the same place are one reason."""

    def reads(place):
        raise ScheduleError(f"not on stage {place.stage}")

    with pytest.raises(ScheduleError, match="not on stage 1") as caught:
        uses(schedule("pipedream", 2, 1), rule_that_reads(reads))
    assert [(f.rule, f.op, f.rank) for f in caught.value.findings] == [
        ("weights", "0F0", 0),
        ("weights", "1F0", 1),
    ]


def test_staleness_is_counted_until_the_weight_gradient_and_over_a_whole_period():
    """W follows an update that comes after I; of two batches in a loop, each has an age."""
    loops = [f"0F{n} 0I{n}" + (f" 0W{n - 1} 0U{n}" if n else "") for n in range(8)]
    program = Schedule.parse(" ".join((*loops, "0W7 0U8")), synchronous=False)
    split = replace(program, stream=Stream(8))
    loops = [f"0F{n} 0F{n + 1} 0B{n} 0U{n + 1} 0B{n + 1} 0U{n + 2}" for n in range(0, 12, 2)]
    alternating = replace(Schedule.parse(" ".join(loops), synchronous=False), stream=Stream(12))
    stash = weight_rule("stash")
    assert readings(split, stash).mean_staleness == (uses(split, stash).staleness(0),) == (1.0,)
    assert readings(alternating, stash).mean_staleness == (0.5,)
    assert uses(alternating, stash).staleness(0) == 0.5
    short = replace(split, stream=Stream(8, waves=Waves(1)))
    with pytest.raises(ScheduleError, match="without 1 updates of the batches before it, and a w"):
        readings(short, weight_rule("hetpipe"))


def test_refusals_and_versions_that_lack_are_all_reported():
    """A user mends both at once."""

    def reads(place):
        if place.stage == 0:
            raise ScheduleError("not on the first stage")
        return Reads(place.at_forward + 1, place.at_forward + 1)

    with pytest.raises(ScheduleError) as caught:
        readings(schedule("pipedream", 2, 1, batches=2), rule_that_reads(reads))
    findings = caught.value.findings
    assert {(finding.rank, finding.op[:2]) for finding in findings} == {
        (0, "0F"),
        (1, "1F"),
        (1, "1B"),
    }
    assert "reads version 1 of stage 1, where the newest is 0" in str(caught.value)
