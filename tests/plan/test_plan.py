"""Plan: one value, its JSON, and its checks."""

import json
from dataclasses import replace

import pytest
from tests.plan.plans import full_plan, plan, stream_plan

from penstock.errors import FileError, PlanError
from penstock.plan.plan import Plan
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Schedule
from penstock.schedule.slicing import Slicing
from penstock.store import to_json


def saved(tmp_path, data=None, **changes):
    """The path of a plan whose JSON was changed."""
    path = tmp_path / "plan.json"
    (data or plan()).save(path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, **changes}))
    return path


CUSTOM = Schedule.parse(
    "rank 0 | 0F0 0F1 1F1 1B1 0B1 1F0 1B0 0B0 1U1 0U1\nrank 1 |\nrank 2 | 2F1 2B1 2F0 2I0 2W0 2U1"
)


@pytest.mark.parametrize(
    "case",
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
def test_a_plan_saved_as_json_loads_as_an_equal_plan(tmp_path, case):
    """Plans travel between machines; any schedule must survive, a user's own and idle ranks too."""
    path = tmp_path / "plan.json"
    case.save(path)
    loaded = Plan.load(path)
    assert loaded == case
    assert loaded.schedule == case.schedule


def test_the_schedule_is_read_back_whole():
    """Programs, name and options: equal to what went in."""
    case = schedule("gpipe", 2, 3, backward_order="reverse")
    assert plan(case).schedule == case
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
            {"segment_starts": [0]},
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
        ({"lengths": [1, 1]}, r"stage lengths \[1, 1\] must be positive and sum to the 3 layers"),
        ({"lengths": [1, 1, 1]}, "the programs have 2 stages, the lengths 3"),
        ({"lengths": [3]}, "the programs have 2 stages, the lengths 1"),
        ({"micro_batches": 8}, "the programs have 4 micro-batches, not 8"),
        ({"micro_batches": 2}, "the programs have 4 micro-batches, not 2"),
        ({"batch": 3}, "a batch of 3 cannot be cut into 4 micro-batches"),
        ({"programs": ["0F0 0X0"]}, "'0X0' is not an op"),
        ({"programs": ["0F0 0B0 1F99999999"]}, "stages x micro-batches may be 5,000,000 at most"),
        ({"weights": "stach"}, "no weight rule called 'stach'. Did you mean 'stash'"),
        ({"weights": "stash"}, "weight rule 'stash' does not go with 1f1b, which is synchronous"),
        (
            {"weights_options": [["decay", 0.5]]},
            "weight rule 'flush' has no option decay: it takes none",
        ),
        ({"devices": [1]}, r"devices \[1\] must be 2 different ones of the cluster's 4"),
        (
            {"devices": [0, 1, 1]},
            r"devices \[0, 1, 1\] must be 2 different ones of the cluster's 4",
        ),
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


def test_pairs_and_slices_survive_saving(tmp_path):
    """Without pairs, or with other slices, the program would be a different one."""
    case = Schedule.parse("0F0 0F1&0B0 0F2 0B2 0B1 0U1", "sliced")
    case = replace(case, slicing=Slicing("samples", ((0.25, 0.75), (1.0,))))
    sliced_plan = replace(plan(case, (3,)), slicing=case.slicing)
    sliced_plan.save(tmp_path / "p.json")
    loaded = Plan.load(tmp_path / "p.json")
    assert loaded == sliced_plan
    assert loaded.schedule == case


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
        ({"stream": {"batches": 7}}, "7 batches of 1 are not the 6 micro-batches of the programs"),
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
    data = json.loads(path.read_text())
    for name in ("stream", "weights_options"):
        del data[name]
    for row in data["candidates"]:
        del row["weights"]
    path.write_text(json.dumps(data))
    assert Plan.load(path) == plan()


def test_plans_that_differ_in_a_note_on_their_search_alone_are_equal():
    """Whether the clock cut a search short depends on the machine, and changes nothing in a run."""
    assert replace(plan(), search_note="cut short") == plan()
    assert replace(plan(), pipeline_note="faster") != plan()


def test_all_results_of_a_planner_survive_json(tmp_path):
    """They are devices, parts of memory, traffic, bounds, suggestions and the name of the planner."""
    full_plan().save(tmp_path / "p.json")
    assert Plan.load(tmp_path / "p.json") == full_plan()


@pytest.mark.parametrize("here", ["2.13.1", "2.13.0+cu128", "2.13.0a0", ""])
def test_a_torch_of_the_same_minor_version_is_accepted(here):
    """Builds and patch versions do not change times enough for a new plan; a plan without a version
    is accepted.
    """
    full_plan().check_fits("abc", 2, here)
    plan().check_fits("abc", 2, here)


def test_another_torch_is_refused_with_both_versions():
    """With all else that differs."""
    with pytest.raises(
        PlanError, match=r"made with torch 2\.13\.0\+cpu, but this is torch 2\.9\.1"
    ) as caught:
        full_plan().check_fits("xyz", 1, "2.9.1")
    assert "it uses 2 ranks, but there are 1" in str(caught.value)
    assert "this one's is xyz" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_limits": [1]}, "memory limits for 1 ranks and 1.0 optimizer states do not go"),
        ({"memory_limits": [1, 2, 3]}, "memory limits for 3 ranks .* with programs for 2 ranks"),
        ({"optimizer_states": -0.5}, "limits for 0 ranks and -0.5 optimizer states do not go"),
        ({"devices": [0, 2], "tensor_parallel": 2}, r"devices \[0, 2\] must be 2 different ones"),
        ({"fingerprint": "a\n"}, r"the model: the fingerprint 'a\\n' must be printable text"),
        ({"devices": [0, 1], "tensor_parallel": 0}, "tensor_parallel is 0; it is 1 or more"),
        ({"zero": 4}, "zero is 4; its levels are 0, 1, 2 and 3"),
    ],
)
def test_changed_limits_and_sharding_are_refused_with_the_reason(tmp_path, changes, message):
    """A group of devices counts as one device of a plan with tensor parallelism."""
    with pytest.raises(FileError, match=message):
        Plan.load(saved(tmp_path, **changes))


def test_limits_states_and_groups_at_the_ends_of_their_range_are_read(tmp_path):
    """No state, one limit for each rank, the last group of devices, and micro-batches of 1 sample."""
    changes = {"memory_limits": [1, 2], "optimizer_states": 0, "tensor_parallel": 2}
    loaded = Plan.load(saved(tmp_path, **changes, devices=[1, 0], schema=3, batch=4))
    assert (loaded.memory_limits, loaded.devices, loaded.schema) == ((1, 2), (1, 0), 4)
    with pytest.raises(FileError, match="zero is for synchronous plans, and this one is async"):
        Plan.load(saved(tmp_path, stream_plan(), zero=1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor_parallel": 2}, "tensor parallel 2"),
        ({"zero": 2}, "ZeRO 2"),
        ({"tensor_parallel": 2, "zero": 1}, "tensor parallel 2, ZeRO 1"),
    ],
)
def test_a_plan_whose_stages_are_shared_does_not_fit_a_run(changes, words):
    """The runtime shares nothing but optimizer states, which ZeRO 1 is."""
    message = rf"its stages are shared \({words}\), which a plan alone does not run"
    with pytest.raises(PlanError, match=message):
        replace(plan(), **changes).check_fits("abc", 2)
    replace(plan(), zero=1).check_fits("abc", 2)


def test_the_repr_of_a_plan_is_one_line():
    """Stages and ranks, batch and micro-batches, and the predicted step."""
    replicated = plan(schedule("1f1b", 2, 4, replicas=(2, 1)))
    assert repr(replicated) == (
        "<Plan: 1f1b, 2 stages on 3 ranks of local:2, batch 16 in 4 micro-batches, predicted "
        "500.0 ms a step>"
    )


@pytest.mark.parametrize("count", [0, 1, 3])
def test_memory_is_predicted_for_every_rank(count):
    """Neither for fewer nor for more."""
    predicted = replace(plan().predicted, peak_memory=(1,) * count)
    with pytest.raises(PlanError, match=f"predicted for {count} ranks, the programs are for 2"):
        replace(plan(), predicted=predicted).check()


def test_states_that_are_no_number_are_refused():
    """They would make every comparison of memory false."""
    with pytest.raises(PlanError, match="memory limits for 0 ranks and nan optimizer states"):
        replace(plan(), optimizer_states=float("nan")).check()


def test_devices_limits_and_peaks_are_those_of_ranks_and_not_of_stages():
    """Two stages on three ranks, in the files that are read too."""
    replicated = plan(schedule("1f1b", 2, 4, replicas=(1, 2)))
    whole = replace(replicated, devices=(3, 0, 2), memory_limits=(5, 6, 7))
    whole.check()
    assert Plan.parse(to_json(whole), "x") == whole
    assert (whole.ranks, whole.stages, whole.layers) == (3, 2, 3)
    whole.check_fits("abc", 3)
    with pytest.raises(PlanError, match="it uses 3 ranks, but there are 2: start 3 ranks, or plan"):
        whole.check_fits("abc", 2)
    for changes, message in (
        ({"devices": (3, 0)}, "must be 3 different ones of the cluster's 4"),
        ({"memory_limits": (5, 6)}, "memory limits for 2 ranks .* with programs for 3 ranks"),
        (
            {"predicted": replace(whole.predicted, peak_memory=(1, 2))},
            "memory is predicted for 2 ranks, the programs are for 3",
        ),
    ):
        with pytest.raises(PlanError, match=message):
            replace(whole, **changes).check()
