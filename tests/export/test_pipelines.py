"""Equal pipelines side by side: the only copies that most libraries have."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.export.pipelines import compact_list, pipelines_of, why_not_pipelines
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Schedule

LAYERS = tuple(f"l{i}" for i in range(8))


def even(example: Schedule) -> list[int]:
    """As many layers in every stage as go."""
    length = 8 // example.stages
    return [length] * (example.stages - 1) + [8 - length * (example.stages - 1)]


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(
        [
            "gpipe",
            "1f1b",
            "interleaved",
            "zb-h1",
            "zb-v",
            "v-half",
            "autopipe",
            "seq1f1b",
            "dualpipe-v",
        ]
    ),
    count=st.integers(1, 4),
    per_pipeline=st.sampled_from([8, 12]),
)
def test_one_of_several_pipelines_is_the_replicated_schedule(plan_of, name, count, per_pipeline):
    """The export must be the schedule of one process group, with its numbering."""
    example = schedule(
        name,
        8 if name in ("interleaved", "zb-v", "v-half", "dualpipe-v") else 4,
        per_pipeline * count,
        replicas=count,
    )
    alone = schedule(name, example.stages, per_pipeline)
    pipelines = pipelines_of(plan_of(example, even(example), LAYERS))
    assert pipelines.count == count
    assert pipelines.schedule.programs == alone.programs
    assert (pipelines.schedule.slicing, pipelines.schedule.pairs) == (alone.slicing, alone.pairs)
    assert pipelines.ranks == tuple(
        tuple(range(j * alone.ranks, (j + 1) * alone.ranks)) for j in range(count)
    )
    assert pipelines.placement == alone.stages_of_rank


def test_every_stage_on_two_ranks_is_two_pipelines(plan_of):
    """Micro-batch n stays with ranks n mod 2 of every stage: the same as two pipelines, but for the
    ranks' numbers.
    """
    pipelines = pipelines_of(plan_of(schedule("1f1b", 2, 8, replicas=(2, 2)), (4, 4), LAYERS))
    assert pipelines.ranks == ((0, 2), (1, 3))
    assert pipelines.placement == ((0,), (1,))
    assert pipelines.schedule.micro_batches == 4


def test_placements_are_distinguished(plan_of):
    """Megatron has loops, torchtitan V shapes too, DeepSpeed neither."""
    kinds = {}
    for name, stages in (("1f1b", 4), ("interleaved", 8), ("zb-v", 8)):
        pipelines = pipelines_of(
            plan_of(schedule(name, stages, 8), even(schedule(name, stages, 8)), LAYERS)
        )
        kinds[name] = (pipelines.linear, pipelines.loop, pipelines.vee)
    assert kinds == {
        "1f1b": (True, True, False),
        "interleaved": (False, True, False),
        "zb-v": (False, False, True),
    }


@pytest.mark.parametrize(
    "example",
    [
        schedule("chimera", 4, 4),
        schedule("dualpipe", 4, 8),
        schedule("gems", 4, 4),
        schedule("1f1b", 4, 4, replicas=(2, 1, 1, 1)),
        schedule("1f1b", 2, 6, replicas=(2, 3)),
        schedule("1f1b", 4, 7, replicas=2),
        schedule("pipedream", 4, 1),
    ],
    ids=["chimera", "dualpipe", "gems", "hybrid", "2 and 3", "7 on 2", "stream"],
)
def test_other_replicas_are_not_exported_as_parallel_pipelines(plan_of, example):
    """The exported run would do other work."""
    chosen_plan = plan_of(example, even(example), LAYERS)
    assert pipelines_of(chosen_plan) is None
    assert why_not_pipelines(chosen_plan).startswith(
        (
            "chimera has 2",
            "dualpipe has 2",
            "gems has 2",
            "its stages have",
            "1f1b has 2",
            "pipedream is asynchronous",
        )
    )


def test_long_rows_of_devices_are_shortened():
    """A message with a thousand devices is unreadable."""
    assert compact_list(tuple(range(1000))) == "[0-999]"
    assert compact_list((0, 2, 4, 5, 6, 7, 8, 1)) == "[0, 2, 4-8, 1]"
