"""Plan: one value, its JSON, its text."""

import json
from dataclasses import replace

import pytest

from penstock.errors import FileError, PlanError
from penstock.plan.plan import Plan
from penstock.plan.prediction import Candidate, Objective, Prediction, Remedy, Traffic
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Schedule
from penstock.schedule.slicing import Slicing


def plan(made: Schedule = schedule("1f1b", 2, 4), lengths: tuple[int, ...] = (2, 1)) -> Plan:
    """A plan that is whole."""
    peaks = tuple(1000 * (rank + 1) for rank in range(made.ranks))
    candidates = (
        Candidate("1f1b", 2, 4, "never", lengths, 0.5, 2000, "compute of stage 1"),
        Candidate("gpipe", 2, 4, "never", lengths, 0.5001, 4000, "bubble"),
        Candidate(
            "gpipe", 2, 8, "never", lengths, 0.4, 4 * 2**30, "needs 4.0 GiB, has 2.0 GiB on rank 1"
        ),
    )
    return Plan(
        "abc",
        ("stem", "body", "head"),
        lengths,
        made.name,
        made.lines,
        made.micro_batches,
        16,
        "local:2",
        4,
        Prediction(0.5, 0.2, peaks, 32.0, 0.9),
        made.options,
        candidates=candidates,
    )


def stream_plan(made: Schedule = schedule("pipedream", 2, 1), **changes) -> Plan:
    """An asynchronous one."""
    own = {
        "synchronous": False,
        "stream": made.stream,
        "weights": made.stream.weights,
        "candidates": (),
    }
    return replace(plan(made), **{**own, **changes})


def saved(tmp_path, found=None, **changes):
    """The path of a plan whose JSON was changed."""
    path = tmp_path / "plan.json"
    (found or plan()).save(path)
    found = json.loads(path.read_text())
    path.write_text(json.dumps({**found, **changes}))
    return path


CUSTOM = Schedule.parse(
    "rank 0 | 0F0 0F1 1F1 1B1 0B1 1F0 1B0 0B0 1U1 0U1\nrank 1 |\nrank 2 | 2F1 2B1 2F0 2I0 2W0 2U1"
)


@pytest.mark.parametrize(
    "made",
    [
        plan(),
        plan(schedule("gpipe", 2, 3, backward_order="reverse")),
        plan(CUSTOM, (1, 1, 1)),
        stream_plan(),
        stream_plan(schedule("hetpipe", 2, 2)),
        stream_plan(weights="pipemare", weights_options=(("decay", 0.25),)),
        replace(plan(), recompute="selective", recomputed=(0, 1), segment_starts=(1,)),
    ],
    ids=[
        "1f1b",
        "with options",
        "custom",
        "stream",
        "waves",
        "weights' options",
        "some layers again",
    ],
)
def test_a_plan_saved_as_json_loads_as_an_equal_plan(tmp_path, made):
    """Plans travel between machines; any schedule must survive, a user's own and idle ranks too."""
    path = tmp_path / "plan.json"
    made.save(path)
    again = Plan.load(path)
    assert again == made
    assert again.schedule == made.schedule


def test_the_schedule_is_read_back_whole():
    """Programs, name and options: equal to what went in."""
    made = schedule("gpipe", 2, 3, backward_order="reverse")
    assert plan(made).schedule == made
    assert plan(CUSTOM, (1, 1, 1)).schedule.programs == CUSTOM.programs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, "is no plan of schema 3 or 4: its schema is 2"),
        ({"colour": "red"}, "is no plan: at colour: unknown key"),
        ({"batch": "many"}, "is no plan: at batch"),
        ({"recompute": "sometimes"}, "is no plan: at recompute"),
        (
            {"recomputed": [0]},
            'recomputed and segment_starts are for recompute="selective", but recompute is .never',
        ),
        (
            {"recompute": "selective", "recomputed": [1, 0]},
            r"recomputed \[1, 0\] must be different ones of the 3 layers, ascending",
        ),
        (
            {"recompute": "selective", "recomputed": [0, 3]},
            r"recomputed \[0, 3\] must be different ones of the 3 layers",
        ),
        (
            {"recompute": "selective", "recomputed": [1, 1]},
            r"recomputed \[1, 1\] must be different ones",
        ),
        ({"recompute": "selective", "recomputed": ["a"]}, "is no plan: at recomputed.0"),
        (
            {"recompute": "selective", "recomputed": [0, 1], "segment_starts": [2]},
            r"segment_starts \[2\] must be different ones of recomputed",
        ),
        ({"lengths": [2, 2]}, r"stage lengths \[2, 2\] must be positive and sum to the 3 layers"),
        ({"lengths": [3, 0]}, r"stage lengths \[3, 0\] must be positive"),
        ({"lengths": [1, 1, 1]}, "the programs have 2 stages, the lengths 3"),
        ({"micro_batches": 8}, "the programs have 4 micro-batches, not 8"),
        ({"batch": 3}, "a batch of 3 cannot be cut into 4 micro-batches"),
        ({"programs": ["0F0 0X0"]}, "'0X0' is not an op"),
        ({"weights": "stach"}, "no weight rule called 'stach'. Did you mean 'stash'"),
        ({"weights": "stash"}, "weight rule 'stash' does not go with 1f1b, which is synchronous"),
        (
            {"weights_options": [["decay", 0.5]]},
            "weight rule 'flush' has no option decay: it takes none",
        ),
        ({"devices": [1]}, r"devices \[1\] must be 2 different ones of the cluster's 4"),
        ({"devices": [1, 1]}, r"devices \[1, 1\] must be 2 different ones of the cluster's 4"),
        ({"devices": [0, 4]}, r"devices \[0, 4\] must be 2 different ones of the cluster's 4"),
        ({"devices": [-1, 0]}, r"devices \[-1, 0\] must be 2 different ones"),
        ({"devices": ["first", 0]}, "is no plan: at devices.0"),
        (
            {"objective": {"name": "time", "value": "little", "unit": "s"}},
            "is no plan: at objective.value",
        ),
        ({"remedies": [{"change": "more"}]}, "is no plan: at remedies.0.step_s"),
        (
            {"synchronous": False},
            "a synchronous plan has no stream, an asynchronous one has: synchronous is False, stream is None",
        ),
        ({"stream": {"batches": 1}}, r"synchronous is True, stream is Stream\(batches=1"),
        (
            {
                "predicted": {
                    "step_s": 1,
                    "bubble_ratio": 0,
                    "peak_memory": [1],
                    "samples_per_s": 1,
                    "one_device_s": 1,
                }
            },
            "memory is predicted for 1 ranks, the programs are for 2",
        ),
    ],
)
def test_a_changed_file_is_refused_with_the_reason(tmp_path, changes, message):
    """A plan is parsed, never trusted: what runs from it must be whole."""
    path = saved(tmp_path, **changes)
    with pytest.raises(FileError, match=message):
        Plan.load(path)


def test_a_plan_fits_its_model_and_number_of_ranks():
    """Four ranks in the cluster, two of them used: two are started."""
    plan().check_fits("abc", 2)


def test_another_model_or_number_of_ranks_is_refused_with_all_differences():
    """One message has both, so that the user repairs both at once."""
    with pytest.raises(
        PlanError, match="for a chain of 3 layers with fingerprint abc, but this one's is xyz"
    ) as caught:
        plan().check_fits("xyz", 4)
    assert "it uses 2 ranks, but there are 4" in str(caught.value)
    with pytest.raises(
        PlanError,
        match="it uses 2 ranks, but there are 1: start 2 ranks, or plan for a cluster of 1",
    ):
        plan().check_fits("abc", 1)


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
    made = plan()
    told = str(
        replace(made, predicted=replace(made.predicted, more_work=0.032, less_kept=0.41), **changes)
    )
    assert f"  {line} work, 41% fewer activations saved for the backward" in told.splitlines()


def test_a_plan_of_nothing_prints_too():
    """Zero seconds divide nothing."""
    empty = replace(plan(), predicted=Prediction(0.0, 0.0, (0, 0), 0.0, 0.0))
    assert "1.00 times one device" in str(empty)
    assert empty.bounds == ((0, 2), (2, 3))


def test_pairs_and_slices_survive_saving(tmp_path):
    """Without pairs, or with other slices, the program would be a different one."""
    made = Schedule.parse("0F0 0F1&0B0 0F2 0B2 0B1 0U1", "sliced")
    made = replace(made, slicing=Slicing("samples", ((0.25, 0.75), (1.0,))))
    kept = replace(plan(made, (3,)), slicing=made.slicing)
    kept.save(tmp_path / "p.json")
    again = Plan.load(tmp_path / "p.json")
    assert again == kept
    assert again.schedule == made


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"stream": None, "micro_batches": 6},
            "an asynchronous one has: synchronous is False, stream is None",
        ),
        (
            {"stream": {"batches": 0}},
            "is no plan: at stream: a stream's batches is 1 or more, not 0",
        ),
        ({"stream": {"batches": 2.5}}, "is no plan: at stream.batches"),
        ({"stream": {"batches": 6, "colour": "red"}}, "is no plan: at stream.colour: unknown key"),
        ({"stream": {"batches": 4}}, "the programs have 2 micro-batches, not 1"),
        ({"stream": {"batches": 9}}, "9 batches of 1 are not the 6 micro-batches of the programs"),
        (
            {"weights": "flush"},
            "weight rule 'flush' does not go with pipedream, which is asynchronous",
        ),
        (
            {"weights": "double-buffer"},
            "weight rule 'double-buffer' needs at least as many micro-batches",
        ),
        ({"weights_options": [["decay", "much"]]}, "is no plan: at weights_options.0.1"),
    ],
)
def test_a_changed_stream_is_refused_with_the_reason(tmp_path, changes, message):
    """The repetition of a schedule is part of the program that runs."""
    with pytest.raises(FileError, match=message):
        Plan.load(saved(tmp_path, stream_plan(), **changes))


def test_a_plan_saved_before_streams_existed_is_read(tmp_path):
    """Missing fields get the values that older versions implied."""
    path = saved(tmp_path)
    found = json.loads(path.read_text())
    for name in ("stream", "weights_options"):
        del found[name]
    for row in found["candidates"]:
        del row["weights"]
    path.write_text(json.dumps(found))
    assert Plan.load(path) == plan()


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


def told() -> Plan:
    """A plan with all that a planner may tell of it."""
    predicted = Prediction(0.5, 0.2, (1000, 2000), 32.0, 0.9, 0.6, 0.4, ((("weights", 900), ("activations", 100)), (("weights", 2000),)),
                           (Traffic(0, 1, 2048), Traffic(1, 0, 1024)))  # fmt: skip
    return replace(
        plan(),
        predicted=predicted,
        devices=(3, 1),
        torch_version="2.13.0+cpu",
        planner="dapple",
        objective=Objective("pipeline latency", 0.45, "s"),
        remedies=(Remedy("twice the bandwidth", 0.4),),
    )


def test_all_results_of_a_planner_survive_json(tmp_path):
    """They are devices, parts of memory, traffic, bounds, suggestions and the name of the planner."""
    told().save(tmp_path / "p.json")
    assert Plan.load(tmp_path / "p.json") == told()


def test_all_results_of_a_planner_are_printed():
    """They are the planner and its objective, the gap to the bound, placement, memory, traffic and
    suggestions.
    """
    text = str(told())
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


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0.45, "s", "x 450.0 ms"), (2048, "bytes", "x 2.0 KiB"), (1.25, "1", "x 1.25")],
)
def test_an_objective_prints_with_its_unit(value, unit, text):
    """Papers make least seconds, bytes, or a plain number."""
    assert str(Objective("x", value, unit)) == text


@pytest.mark.parametrize("here", ["2.13.1", "2.13.0+cu128", "2.13.0a0", ""])
def test_a_torch_of_the_same_minor_version_is_accepted(here):
    """Builds and patch versions do not change times enough for a new plan; a plan without a version
    is accepted.
    """
    told().check_fits("abc", 2, here)
    plan().check_fits("abc", 2, here)


def test_another_torch_is_refused_with_both_versions():
    """With all else that differs."""
    with pytest.raises(
        PlanError, match=r"made with torch 2\.13\.0\+cpu, but this is torch 2\.9\.1"
    ) as caught:
        told().check_fits("xyz", 1, "2.9.1")
    assert "it uses 2 ranks, but there are 1" in str(caught.value)
    assert "this one's is xyz" in str(caught.value)
