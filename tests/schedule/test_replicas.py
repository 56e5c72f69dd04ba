"""Replicas of pipelines and of stages: their micro-batches, soundness, and time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.custom_schedules import custom_schedules
from tests.schedule.families.laws import timeline_of

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule, schedules
from penstock.schedule.op import ACTIVATION_MOVES, Kind, Op, Schedule
from penstock.schedule.replicas import pipelines, round_robin, start_up
from penstock.schedule.unit_times import unit_times
from penstock.verify.verify import verify

#: Those whose copies of a stage add up their gradients. HetPipe has copies that do not.
NAMES = sorted(set(schedules()) - {"hetpipe"})


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_can_stand_there_several_times(name):
    """Data parallelism on top of any: sound, every micro-batch once, m mod R on pipeline m mod R,
    and made again by its options.
    """
    tried = 0
    for stages, micro_batches, replicas in (
        (2, 8, 2),
        (4, 16, 2),
        (2, 9, 3),
        (1, 5, 2),
        (4, 17, 2),
        (3, 7, 3),
    ):
        replicated = schedule_or_none(name, stages, micro_batches, replicas=replicas)
        if replicated is None:
            continue
        verify(replicated)
        ranks_per_replica = replicated.ranks // replicas
        assert (replicated.stages, replicated.micro_batches) == (stages, micro_batches)
        numbers = (
            replicated.slicing.micro_batch_of if replicated.slicing else range(replicated.slices)
        )
        assert all(
            rank // ranks_per_replica == numbers[number] % replicas
            for (_, number), rank in replicated.placement.items()
        )
        assert (
            schedule(
                replicated.name,
                replicated.stages,
                replicated.micro_batches,
                **dict(replicated.options),
            )
            == replicated
        )
        tried += 1
    assert tried > 0


@pytest.mark.parametrize("name", NAMES)
def test_every_pipeline_plays_the_familys_own_programs(name):
    """Twice the batch on twice the ranks takes the same time."""
    one = next(filter(None, (schedule_or_none(name, stages, 8) for stages in (4, 2, 1))))
    two = schedule(
        name, one.stages, 16, replicas=2, **({"batches": one.batches} if one.stream else {})
    )
    assert len(two.pairs) == 2 * len(one.pairs)
    for replica in range(2):
        programs = two.programs[replica * one.ranks : (replica + 1) * one.ranks]
        assert [[op[:2] for op in program] for program in programs] == [
            [op[:2] for op in program] for program in one.programs
        ]
    assert timeline_of(two, u=1).makespan == pytest.approx(timeline_of(one, u=1).makespan)
    assert verify(two).peak_on_rank == verify(one).peak_on_rank * 2


def schedule_or_none(name, stages, micro_batches, **options):
    try:
        return schedule(name, stages, micro_batches, **options)
    except ScheduleError:
        return None


@given(custom_schedules(synchronous=True), st.integers(1, 3), st.data())
@settings(deadline=None, max_examples=80)
def test_any_sound_schedule_stays_sound_several_times(schedule, replicas, data):
    """Copies of stages and split backwards too, and with batches that do not divide."""
    most = replicas * schedule.micro_batches
    micro_batches = data.draw(st.integers(max(most - replicas + 1, replicas), most))
    several = pipelines(schedule, replicas, micro_batches)
    verify(several)
    assert several.micro_batches == micro_batches


def test_slices_pairs_and_evictions_are_renumbered():
    """Every kind of op keeps its micro-batch."""
    sliced = schedule("autopipe", 2, 5, sliced=2, replicas=2)
    assert sliced.slicing.shares == ((0.5, 0.5),) * 4 + ((1.0,),)
    assert str(sliced).splitlines() == [
        "rank 0 | 0F0 0F1 0F4 0F5 0B0 0B1 0F8 0B4 0B5 0B8 0U1",
        "rank 1 | 1F0 1F1 1B0 1B1 1F4 1F5 1B4 1B5 1F8 1B8 1U1",
        "rank 2 | 0F2 0F3 0F6 0F7 0B2 0B3 0B6 0B7 0U1",
        "rank 3 | 1F2 1F3 1B2 1B3 1F6 1F7 1B6 1B7 1U1",
    ]
    paired = schedule("fbp-as", 1, 5, replicas=2)
    assert str(paired) == "rank 0 | 0F0 0F2&0B0 0F4&0B2 0B4 0U1\nrank 1 | 0F1 0F3&0B1 0B3 0U1"
    handed = schedule("bpipe", 4, 8, replicas=2)
    evicted = {
        rank: [str(op) for op in program if op.kind in ACTIVATION_MOVES]
        for rank, program in enumerate(handed.programs)
    }
    assert {rank: words for rank, words in evicted.items() if words} == {
        0: ["0E4", "0L4"],
        3: ["0E4", "0L4"],
        4: ["0E5", "0L5"],
        7: ["0E5", "0L5"],
    }


def test_in_one_stage_it_is_plain_data_parallelism():
    """There is no pipeline: every rank has the whole model."""
    gpipe = schedule("gpipe", 1, 4, replicas=4)
    assert [" ".join(map(str, program)) for program in gpipe.programs] == [
        f"0F{m} 0B{m} 0U1" for m in range(4)
    ]


@pytest.mark.parametrize(("replicas", "ahead"), [
    ((1, 1, 1, 1), (3, 2, 1, 0)), ((3, 1), (1, 0)), ((2, 1, 1), (1, 1, 0)), ((15, 1), (1, 0)), ((2, 2), (1, 0)),
])  # fmt: skip
def test_the_start_up_of_replicated_stages_is_pipedreams(replicas, ahead):
    """docs/literature/pipedream.md, from PipeDream's own code: forwards of a rank before it begins to alternate,
    forward first.
    """
    one_f_one_b = schedule("1f1b", len(replicas), 32, replicas=replicas)
    verify(one_f_one_b)
    assert start_up(replicas) == tuple(
        number * (w + 1) for number, w in zip(replicas, ahead, strict=True)
    )
    expected = [w + 1 for number, w in zip(replicas, ahead, strict=True) for _ in range(number)]
    firsts = [
        next(i for i, op in enumerate(program) if op.kind is Kind.B)
        for program in one_f_one_b.programs
    ]
    assert firsts == expected == list(verify(one_f_one_b).peak_on_rank)


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.integers(0, 12),
    st.sampled_from(["1f1b", "gpipe", "zb-h1", "naive"]),
)
@settings(deadline=None, max_examples=60)
def test_unevenly_replicated_stages_are_sound_and_take_micro_batches_in_turn(replicas, more, name):
    """1F1B-RR: micro-batch n is on replica n mod k of a stage, forward and backward."""
    micro_batches = max(replicas) + more
    family_schedule = schedule(name, len(replicas), micro_batches, replicas=replicas)
    verify(family_schedule)
    assert family_schedule.synchronous
    before = [sum(replicas[:stage]) for stage in range(len(replicas))]
    assert family_schedule.placement == {
        (s, m): before[s] + m % replicas[s]
        for s in range(len(replicas))
        for m in range(micro_batches)
    }
    assert (
        schedule(
            family_schedule.name,
            family_schedule.stages,
            family_schedule.micro_batches,
            **dict(family_schedule.options),
        )
        == family_schedule
    )


@settings(max_examples=60)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(1, 3))
def test_the_start_up_counts_the_ranks_behind_a_stage(replicas, factor):
    """w is how often all ranks of a stage fit into those after its first rank; DAPPLE's policy B
    runs 2 w + 1 ahead on each of them.
    """
    expected, passed_on = [], 10**9
    for stage, number in enumerate(replicas):
        ranks_behind = sum(replicas[stage:]) - 1
        ahead_per_rank = 1
        while ranks_behind >= number:
            ranks_behind -= number
            ahead_per_rank += factor
        passed_on = min(passed_on, number * ahead_per_rank)
        expected.append(passed_on)
    assert start_up(replicas, factor) == tuple(expected)
    assert start_up(replicas) == start_up(replicas, 1)


def test_a_slow_stage_on_more_ranks_is_no_longer_in_the_way():
    """What it is for: 3 ranks for a stage of three times the work are all busy but for start and
    end.
    """
    one_f_one_b = schedule("1f1b", 2, 24, replicas=(3, 1))

    def seconds(op):
        return {Kind.F: 1, Kind.B: 2}.get(op.kind, 0) * (3 if op.stage == 0 else 1)

    assert unit_times(one_f_one_b, seconds).end.max() == 24 * 3 + 9
    assert all(len(program) == 2 * 8 + 1 for program in one_f_one_b.programs[:3])


def test_the_start_up_is_cut_where_a_stage_gets_no_more():
    """Seven ranks after one: their own rule would have them wait for micro-batches that the first
    holds back.
    """
    assert start_up((1, 7, 2)) == (10, 10, 2)
    verify(schedule("1f1b", 3, 20, replicas=(1, 7, 2)))


def test_a_warm_up_that_is_given_counts_for_a_stages_ranks_together():
    """Both options may be given together."""
    one_f_one_b = schedule("1f1b", 2, 6, replicas=(2, 1), warm_up=(2, 1))
    assert str(one_f_one_b).splitlines()[0] == "rank 0 | 0F0 0B0 0F2 0B2 0F4 0B4 0U1"


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        (0, "1f1b needs at least 1 of replicas and got 0"),
        (True, "1f1b needs at least 1 of replicas and got True"),
        ("2", "1f1b needs at least 1 of replicas and got '2'"),
        (1.5, "1f1b needs at least 1 of replicas and got 1.5"),
        ((2, 0), "1f1b needs at least 1 of replicas and got 0"),
        ((2,), "1f1b in 2 stages takes one number of replicas, or 2, one per stage, not 1"),
        ((1, 1, 1), "1f1b in 2 stages takes one number of replicas, or 2, one per stage, not 3"),
        (5, "1f1b with replicas=5 needs at least 5 micro-batches, one for each replica, and got 4"),
        (
            (5, 1),
            "stage 0 has 5 replicas, but there are only 4 micro-batches: every replica needs one",
        ),
    ],
)
def test_replicas_that_cannot_be_are_refused(replicas, message):
    """Each says what would do."""
    with pytest.raises(ScheduleError, match=message):
        schedule("1f1b", 2, 4, replicas=replicas)


@pytest.mark.parametrize(
    ("name", "stages", "message"),
    [
        (
            "interleaved",
            4,
            "several stages on a rank, or copies: it takes only the same number of replicas for all stages, such as replicas=2",
        ),
        ("chimera", 4, "chimera has several stages on a rank, or copies"),
        (
            "seq1f1b",
            4,
            "seq1f1b pairs ops, cuts micro-batches, or moves activations to other ranks: it takes only the same number of replicas",
        ),
        ("fbp-as", 4, "fbp-as pairs ops, cuts micro-batches, or moves activations"),
        ("bpipe", 4, "bpipe pairs ops, cuts micro-batches, or moves activations"),
    ],
)
def test_uneven_replicas_of_other_forms_are_refused(name, stages, message):
    """Taking micro-batches in turn would separate the ops of a pair, or the stages of a rank."""
    with pytest.raises(ScheduleError, match=message):
        schedule(name, stages, 8, replicas=[2, 1, 1, 1])


@pytest.mark.parametrize("replicas", [(1, 3, 2, 1), (3, 1, 1, 1), (1, 1, 1, 3)])
@pytest.mark.parametrize("name", ["chimera", "bpipe"])
def test_uneven_replicas_of_other_forms_are_answered_with_the_most_of_them(name, replicas):
    """So many replicas of the whole pipeline give every stage at least what was asked for."""
    with pytest.raises(ScheduleError, match=r"for all stages, such as replicas=3$"):
        schedule(name, 4, 8, replicas=replicas)


def test_a_family_that_refuses_the_share_of_a_pipeline_says_so():
    """The number in its message is not the one the user gave."""
    with pytest.raises(
        ScheduleError,
        match=r"even number of them and got 3; .* \(with replicas=2, the first replica has 3 of the 6 micro-batches\)",
    ):
        schedule("chimera", 4, 6, replicas=2)


def test_handmade_schedules_can_be_replicated_too():
    """The passes know no names."""
    schedule = Schedule.parse("0F0 0F1 0B1 0B0 0U1\n1F0 1F1 1B1 1B0 1U1", "mine")
    verify(pipelines(schedule, 2, 4))
    assert round_robin(schedule, (1, 2)).programs[1] == tuple(map(Op.parse, ["1F0", "1B0", "1U1"]))


@pytest.mark.parametrize("replicas", [2, (2, 1)])
def test_copies_that_do_not_add_up_their_gradients_have_no_replicas(replicas):
    """Replicas share every batch, virtual workers share none."""
    with pytest.raises(
        ScheduleError,
        match="hetpipe already has copies of its stages, which do not add up their gradients: it takes no replicas, "
        "but more virtual workers",
    ):
        schedule("hetpipe", 2, 4, replicas=replicas)


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        (
            2,
            r"pipedream runs batch after batch without a flush, so with replicas=2 .*: 3 is not a multiple of 2",
        ),
        (
            (1, 2),
            r"pipedream runs batch after batch without a flush, so every replica of a stage needs .*: stage 1 has 2 replicas, but 3 is not a multiple of 2",
        ),
        (
            (1, 4),
            r"stage 1 has 4 replicas, but there are only 3 micro-batches: every replica needs one",
        ),
    ],
)
def test_replicas_that_do_not_divide_the_batches_of_a_stream_are_refused(replicas, message):
    """Their turns would shift from batch to batch, and one of them would have a batch with no
    gradient, or with fewer.
    """
    with pytest.raises(ScheduleError, match=message):
        schedule("pipedream", 2, 3, replicas=replicas)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 2))
@settings(deadline=None, max_examples=40)
def test_replicas_of_a_streams_stages_update_with_every_batch_right_after_their_own_gradients(
    replicas, rounds
):
    """PipeDream's 1F1B-RR goes on from batch to batch; what a copy reads next is as new as it can
    be, and they meet at every U.
    """
    size = rounds * 6
    pipedream = schedule("pipedream", len(replicas), size, replicas=replicas)
    verify(pipedream)
    homes = [(stage, copy) for stage, number in enumerate(replicas) for copy in range(number)]
    for (stage, copy), program in zip(homes, pipedream.programs, strict=True):
        assert all(
            op.micro_batch % replicas[stage] == copy for op in program if op.kind is not Kind.U
        )
        updates = [
            (program[place - 1], op) for place, op in enumerate(program) if op.kind is Kind.U
        ]
        numbers = [n for n in range(pipedream.slices) if n % replicas[stage] == copy]
        last = [max(n for n in numbers if n // size == batch) for batch in range(pipedream.batches)]
        assert updates == [(Op(Kind.B, stage, n), Op(Kind.U, stage, n // size + 1)) for n in last]


def test_a_pair_ends_where_a_replica_lacks_one_of_its_micro_batches():
    """The last replica may have a micro-batch less; the other op of the pair then runs alone."""
    paired = Schedule.parse("0F0 0B0&0F1 0B1 0U1")
    assert str(pipelines(paired, 2, 3)) == "rank 0 | 0F0 0B0&0F2 0B2 0U1\nrank 1 | 0F1 0B1 0U1"
    expected = {(Op.parse("0B0"), Op.parse("0F2"))}
    assert pipelines(paired, 2, 3).pairs == expected
    assert pipelines(paired, 2, 4).pairs == expected | {(Op.parse("0B1"), Op.parse("0F3"))}


def test_stages_on_ranks_of_other_numbers_take_only_whole_pipelines():
    """The program of rank s is taken for that of stage s."""
    turned = schedule("1f1b", 2, 2).on_ranks((1, 0))
    with pytest.raises(ScheduleError, match=r"1f1b has several stages on a rank, or copies: .*=2$"):
        round_robin(turned, (2, 1))
    assert pipelines(turned, 2, 4).ranks == 4
