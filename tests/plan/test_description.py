"""The text of a plan: prediction, stages, memory, traffic, candidates and suggestions."""

from dataclasses import replace

import pytest
from tests.plan.plans import full_plan, plan, stream_plan

from penstock.plan.description import slowdown
from penstock.plan.prediction import Candidate, Prediction, Traffic
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Schedule
from penstock.schedule.streaming.streams import Stream
from penstock.verify.verify import verify


def test_a_plan_prints_its_cuts_its_prediction_and_the_limits_of_other_candidates():
    """print(plan) is the explanation of the choice."""
    assert str(plan()).splitlines() == [
        "1f1b on 2 of 4 ranks of local:2: 2 stages, batch 16 in 4 micro-batches, recompute never, weights flush",
        "  predicted: 500.0 ms a step, 32 samples/s, 1.80 times one device, bubble 20%",
        "    stage  rank  layers  from  to    peak memory of rank",
        "    0      0     2       stem  body  1000 B",
        "    1      1     1       head  head  2.0 KiB",
        "  candidates, best first:",
        "    schedule  stages  M  recompute  step              peak memory  why",
        "    1f1b      2       4  never      500.0 ms          2.0 KiB      compute of stage 1",
        "    gpipe     2       4  never      500.1 ms  equal   3.9 KiB      bubble",
        "    gpipe     2       8  never      400.0 ms  -20.0%  4.0 GiB      needs 4.0 GiB, has 2.0 GiB on rank 1",
    ]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"recompute": "selective", "recomputed": (0, 1), "segment_starts": (1,)},
            "recomputes 2 of 3 layers in 2 segments: 3.2% more",
        ),
        (
            {"recompute": "selective", "recomputed": (1, 2)},
            "recomputes 2 of 3 layers in 2 segments: 3.2% more",
        ),
        ({"recompute": "selective"}, "recomputes 0 of 3 layers: 3.2% more"),
        ({"recompute": "always"}, "recomputes all 3 layers: 3.2% more"),
        (
            {"recompute": "except_last"},
            "recomputes all 3 layers except in the last micro-batch: 3.2% more",
        ),
    ],
)
def test_a_plan_prints_its_recomputed_layers_and_the_saved_memory(changes, line):
    """Segments end where a stage does."""
    result = plan()
    text = str(
        replace(
            result, predicted=replace(result.predicted, more_work=0.032, less_kept=0.41), **changes
        )
    )
    assert f"  {line} work, 41% fewer activations saved for the backward" in text.splitlines()


def test_a_plan_of_nothing_prints_too():
    """Zero seconds divide nothing."""
    empty = replace(plan(), predicted=Prediction(0.0, 0.0, (0, 0), 0.0, 0.0))
    assert "1.00 times one device" in str(empty)
    compared = replace(empty, predicted=replace(empty.predicted, data_parallel_s=0.5))
    assert "data parallelism" not in str(compared)
    assert empty.bounds == ((0, 2), (2, 3))


def test_an_asynchronous_plan_prints_staleness_and_asynchronous_candidates():
    """Asynchronous schedules trade staleness and memory for time, so the text must show all of
    them.
    """
    rows = (
        replace(plan().candidates[0], schedule="pipedream", micro_batches=1, weights="stash"),
        plan().candidates[0],
    )
    lines = str(stream_plan(candidates=rows)).splitlines()
    assert lines[:3] == [
        "pipedream on 2 of 4 ranks of local:2: 2 stages, batch 16 in 1 micro-batch, recompute never, weights stash",
        "  predicted: 500.0 ms a batch in the steady state, 32 samples/s, 1.80 times one device, bubble 20%",
        "  asynchronous: weights stash, staleness at most 1, up to 2 versions",
    ]
    assert lines[-3:] == [
        "    schedule   weights  stages  M  recompute  step             peak memory  why",
        "    pipedream  stash    2       1  never      500.0 ms         2.0 KiB      compute of stage 1",
        "    1f1b       flush    2       4  never      500.0 ms  equal  2.0 KiB      compute of stage 1",
    ]
    text = str(stream_plan(weights="pipemare", weights_options=(("decay", 0.25),)))
    assert (
        "asynchronous: weights pipemare, decay 0.25, staleness at most 1, 1 version and extra state of 2 times the weights"
        in text
    )


def test_staleness_and_versions_are_those_of_the_stage_that_has_most():
    """Stage 1 computes the gradients of its weights a batch later, stage 0 at once."""
    ops = [f"1I{n} 1W{n - 1} 1U{n} 1F{n + 1}" for n in range(1, 5)]
    rows = [
        " ".join(f"0F{n} 0B{n} 0U{n + 1}" for n in range(6)),
        f"1F0 1I0 1F1 {' '.join(ops)} 1I5 1W4 1U5 1W5 1U6",
    ]
    late = replace(
        Schedule.parse("\n".join(rows), "late", synchronous=False), stream=Stream(6, "stash")
    )
    verify(late)
    line = lines_with(stream_plan(late), "staleness")[0]
    assert line.endswith("weights stash, staleness at most 1, up to 2 versions")


@pytest.mark.parametrize(
    ("weights", "end"),
    [
        ("none", "staleness at most 1, 1 version"),
        ("pipeoptim", "staleness at most 1, 1 version and extra state of 1 times the weights"),
    ],
)
def test_an_asynchronous_plan_prints_the_extra_state_of_its_rule(weights, end):
    """One working copy is extra state too; nothing is said where there is none."""
    assert lines_with(stream_plan(weights=weights), "staleness")[0].endswith(end)


def test_all_results_of_a_planner_are_printed():
    """They are the planner and its objective, the gap to the bound, placement, memory, traffic and
    suggestions.
    """
    text = str(full_plan())
    for line in (
        "by planner dapple, which minimises its pipeline latency 450.0 ms",
        "1.80 times one device and 1.20 times data parallelism",
        "lower bound over the search space: 400.0 ms (gap 25.0%)",
        "on devices 3, 1",
        "peak memory of a rank (optimizer not named, 1 number per parameter, as SGD with momentum):",
        "traffic of a step, both ways: 0↔1 3.0 KiB",
        "twice the bandwidth  400.0 ms  -20.0%",
    ):
        assert line in text
    assert "by planner" not in str(plan())


def lines_with(text_of_plan, word):
    """The lines of a text that contain a word, without their indentation."""
    return [line.strip() for line in str(text_of_plan).splitlines() if word in line]


def wide_plan(replicas, **changes):
    """A plan of one stage on many ranks; rank r has a peak of r KiB."""
    base = plan(schedule("1f1b", 1, replicas, replicas=replicas), (3,))
    peaks = tuple(1024 * rank for rank in range(replicas))
    return replace(base, predicted=replace(base.predicted, peak_memory=peaks), **changes)


@pytest.mark.parametrize(
    ("replicas", "row"),
    [
        (4, "0      0, 1, 2, 3  3       stem  head  0 B, 1.0 KiB, 2.0 KiB, 3.0 KiB"),
        (5, "0      0, 1, 2, 3, 4  3       stem  head  0 B to 4.0 KiB"),
        (8, "0      0, 1, 2, 3, 4, 5, 6, 7  3       stem  head  0 B to 7.0 KiB"),
        (9, "0      0, 1, 2, … 8  3       stem  head  0 B to 8.0 KiB"),
    ],
)
def test_ranks_and_peaks_of_a_stage_are_shortened_where_there_are_many(replicas, row):
    """More than 8 ranks are the first three and the last one, more than 4 peaks their range."""
    assert row in lines_with(wide_plan(replicas), "stem")
    equal = wide_plan(5)
    equal = replace(equal, predicted=replace(equal.predicted, peak_memory=(1024,) * 5))
    assert lines_with(equal, "stem")[0].endswith("head  1.0 KiB")


@pytest.mark.parametrize(
    ("plan_schedule", "ranks", "stages"),
    [
        (schedule("1f1b", 2, 4), 2, "2 stages"),
        (schedule("1f1b", 2, 4, replicas=2), 4, "2 stages with 2 replicas"),
        (schedule("1f1b", 2, 4, replicas=(2, 1)), 3, "2 stages with 2, 1 replicas"),
        (schedule("1f1b", 2, 4, replicas=(1, 2)), 3, "2 stages with 1, 2 replicas"),
    ],
)
def test_the_first_line_has_the_replicas_of_the_stages(plan_schedule, ranks, stages):
    """One number if all stages have equally many."""
    assert str(plan(plan_schedule)).splitlines()[0] == (
        f"1f1b on {ranks} of 4 ranks of local:2: {stages}, batch 16 in 4 micro-batches, recompute "
        "never, weights flush"
    )


def test_memory_has_a_row_for_ranks_that_are_alike_and_no_column_of_zeros():
    """Rows are in the order of their first rank."""
    parts = [(("weights", 1024), ("boundary", 0), ("activations", size)) for size in (5, 0, 5)]
    plain = plan(schedule("1f1b", 3, 4), (1, 1, 1))
    text = replace(plain, predicted=replace(plain.predicted, memory_parts=tuple(parts)))
    lines = str(text).splitlines()
    start = next(number for number, line in enumerate(lines) if "peak memory of a rank (" in line)
    assert lines[start + 1 : start + 4] == [
        "    rank          weights  activations",
        "    0 and 1 more  1.0 KiB  5 B",
        "    1             1.0 KiB  0 B",
    ]
    assert lines[start + 4].startswith("  candidates")


@pytest.mark.parametrize("ranks", [32, 33, 40])
def test_memory_of_more_than_32_ranks_is_that_of_the_largest(ranks):
    """Rank r has r bytes of weights; no rank of the largest 32 is left out."""
    wide = wide_plan(ranks, devices=tuple(range(ranks)), cluster_ranks=ranks)
    parts = tuple((("weights", rank),) for rank in range(ranks))
    text = str(replace(wide, predicted=replace(wide.predicted, memory_parts=parts)))
    rows = text.partition("rank  weights")[2].partition("  candidates")[0].split("\n")[1:-1]
    listed = range(max(0, ranks - 32), ranks)
    assert [row.split() for row in rows] == [[str(rank), str(rank), "B"] for rank in listed]
    assert ("on devices" in text) == (ranks <= 32)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "(optimizer not named, 1 number per parameter, as SGD with momentum)"),
        ({"optimizer_states": 2.0}, "(optimizer not named, 2 numbers per parameter)"),
        ({"optimizer_states": 0.0}, "(optimizer not named, 0 numbers per parameter)"),
        ({"optimizer": "adam", "optimizer_states": 2.0}, "(optimizer adam, 2 numbers per param"),
        ({"optimizer": "sgd"}, "(optimizer sgd, 1 number per parameter)"),
    ],
)
def test_memory_names_the_optimizer_that_it_was_planned_for(changes, words):
    """A plan that names none says what its number of states stands for."""
    assert words in str(replace(full_plan(), **changes))


def test_traffic_is_the_sum_of_both_directions_of_the_busiest_links():
    """At most 8, the most bytes first, of equal links the lower ranks first."""

    def line(traffic):
        base = plan()
        return lines_with(
            replace(base, predicted=replace(base.predicted, traffic=tuple(traffic))), "traffic"
        )

    assert line([]) == []
    assert line([Traffic(1, 2, 3), Traffic(0, 1, 5), Traffic(2, 1, 2), Traffic(0, 2, 9)]) == [
        "traffic of a step, both ways: 0↔2 9 B, 0↔1 5 B, 1↔2 5 B"
    ]
    chain = [Traffic(rank, rank + 1, 100 + rank) for rank in range(9)]
    assert line(chain[:8])[0].endswith("1↔2 101 B, 0↔1 100 B")
    assert line(chain)[0].endswith("2↔3 102 B, 1↔2 101 B and 1 more")


def test_candidates_have_columns_of_weights_and_replicas_where_one_is_not_usual():
    """Each column depends on its own values only."""
    first, second = plan().candidates[:2]

    def head(*candidates):
        text = str(replace(plan(), candidates=candidates))
        return text.partition("candidates, best first:\n")[2].splitlines()

    assert head(first, second)[0].split()[:2] == ["schedule", "stages"]
    with_weights = head(first, replace(second, weights="stash"))
    assert with_weights[0].split()[:3] == ["schedule", "weights", "stages"]
    with_replicas = head(first, replace(second, replicas=(2, 1)))
    assert with_replicas[0].split()[:3] == ["schedule", "replicas", "stages"]
    assert [row.split()[1] for row in with_replicas[1:]] == ["1", "2,1"]
    assert "candidates" not in str(replace(plan(), candidates=()))


@pytest.mark.parametrize(
    ("seconds", "best_s", "text"),
    [
        (1.0004, 1.0, "equal"),
        (1.0006, 1.0, "+0.1%"),
        (0.9996, 1.0, "equal"),
        (0.9994, 1.0, "-0.1%"),
        (3.0, 2.0, "+50.0%"),
        (1.0, 0.0, "equal"),
    ],
)
def test_a_slowdown_is_relative_to_the_best(seconds, best_s, text):
    """Differences below 0.05 % are called equal; zero seconds divide nothing."""
    assert slowdown(seconds, best_s) == text


def test_a_plan_that_is_no_pipeline_names_the_best_pipeline_and_the_reason():
    """With its replicas, if it has several, and both peaks."""
    pipeline = Candidate("gpipe", 2, 4, "never", (1, 2), 0.6, 3072, "")
    text = replace(plan(), pipeline=pipeline, pipeline_note="it is faster")
    lines = str(text).splitlines()
    assert lines[2:4] == [
        (
            "  best pipeline: gpipe, 2 stages of 1, 2 layers, 4 micro-batches: 600.0 ms a step "
            "(+20.0%), at most 3.0 KiB on a rank instead of 2.0 KiB"
        ),
        "    it is faster",
    ]
    falling = replace(text, predicted=replace(text.predicted, peak_memory=(4096, 1000)))
    assert "at most 3.0 KiB on a rank instead of 4.0 KiB" in str(falling)
    several = replace(text, pipeline=replace(pipeline, replicas=(2, 1), micro_batches=1))
    assert "layers with 2,1 replicas, 1 micro-batch: 600" in str(several)
    equal = replace(text, pipeline=replace(pipeline, replicas=2))
    assert "2 layers with 2 replicas, 4 micro-batches: 600" in str(equal)


def test_bounds_notes_and_sharding_have_lines_of_their_own():
    """A bound above the step, which only rounding can give, has a gap of 0."""
    base = plan()
    bounded = replace(base, predicted=replace(base.predicted, lower_bound_s=0.6))
    assert lines_with(bounded, "lower bound") == [
        "lower bound over the search space: 600.0 ms (gap 0.0%)"
    ]
    assert lines_with(base, "lower bound") == []
    for candidates in (base.candidates, ()):
        noted = replace(base, search_note="cut short", candidates=candidates)
        assert lines_with(noted, "cut") == ["cut short"]
    end = "; runs in torchtitan or Megatron: export it"
    sharded = replace(base, tensor_parallel=4, sequence_parallel=True, zero=2)
    assert lines_with(sharded, "export") == [
        f"tensor parallel 4, sequence parallel, ZeRO 2, 8 devices; each rank is 4 devices{end}"
    ]
    assert lines_with(replace(base, zero=1), "export") == [f"ZeRO 1, 2 devices{end}"]
    assert lines_with(replace(base, tensor_parallel=2), "export") == [
        f"tensor parallel 2, 4 devices; each rank is 2 devices{end}"
    ]
    assert lines_with(base, "devices") == []
    planned = replace(base, planner="gpipe")
    assert lines_with(planned, "by planner") == ["by planner gpipe"]


def test_an_unsound_asynchronous_plan_has_a_text():
    """A plan from a file may have a backward without a forward."""
    programs = tuple(line.replace("0F1 ", "") for line in stream_plan().programs)
    text = str(replace(stream_plan(), programs=programs))
    assert "  asynchronous: weights stash; unsound programs, see penstock verify" in text


def test_recompute_counts_the_segments_of_all_stages():
    """A pipeline of one stage has one segment where two stages have two."""
    one = replace(
        plan(Schedule.parse("0F0 0B0 0U1"), (3,)), recompute="selective", recomputed=(0, 1, 2)
    )
    assert "recomputes 3 of 3 layers in 1 segment:" in str(one)
    assert "recomputes" not in str(plan())
