"""Plans with selective recompute: exported if the format can express them, refused with the
layers otherwise.
"""

import json

import pytest

from penstock.errors import PlanError
from penstock.export.catalogue import exported
from penstock.schedule.catalogue import schedule

#: embedding and three blocks, four blocks, five blocks, norm and head
LENGTHS = (4, 4, 7)


def selective(plan_of, recomputed, starts=()):
    """A plan of three stages that runs these layers again."""
    return plan_of(
        schedule("1f1b", 3, 6),
        LENGTHS,
        recompute="selective",
        recomputed=recomputed,
        segment_starts=starts,
    )


@pytest.mark.parametrize(
    ("recomputed", "starts", "flags"),
    [
        (range(1, 13), (3, 6, 10, 12), "--recompute-method uniform --recompute-num-layers 2"),
        (range(1, 13), (), "--recompute-method uniform --recompute-num-layers 5"),
        ((1, 2, 4, 5, 8, 9), (2, 5, 9), "--recompute-method block --recompute-num-layers 2"),
        ((1, 4, 8), (), "--recompute-method block --recompute-num-layers 1"),
    ],
)
def test_megatron_takes_all_in_equal_groups_or_the_first_of_every_stage(
    plan_of, recomputed, starts, flags
):
    """Its two methods, per stage."""
    export = exported(selective(plan_of, tuple(recomputed), starts), "megatron")
    assert f"recomputation (selective): --recompute-granularity full {flags}" in export.left_out


@pytest.mark.parametrize(
    ("recomputed", "starts"),
    [((0, 1), ()), ((2,), ()), ((1, 2, 4, 8), ()), ((1, 2, 4, 5, 8, 9), ())],
)
def test_megatron_refuses_all_others(plan_of, recomputed, starts):
    """The embedding, a block in the middle, more in one stage, two together of several."""
    with pytest.raises(
        PlanError,
        match=r"layers [\d -]+ are recomputed, but Megatron recomputes all decoder layers in groups",
    ):
        exported(selective(plan_of, recomputed, starts), "megatron")


def test_deepspeed_takes_all_layers_every_n_of_a_stage(plan_of):
    """Its interval counts from each stage's first layer, and the last group may be smaller."""
    export = exported(selective(plan_of, tuple(range(15)), (3, 7, 11, 14)), "deepspeed")
    assert "recomputation (selective): activation_checkpoint_interval=3" in export.left_out
    with pytest.raises(
        PlanError,
        match="layers 0-2 4-7 8-14 are recomputed, but activation_checkpoint_interval=n recomputes all",
    ):
        exported(selective(plan_of, (*range(3), *range(4, 15)), (8,)), "deepspeed")


@pytest.mark.parametrize("library", ["torchgpipe", "torchtitan"])
def test_who_cannot_choose_layers_refuses(plan_of, library):
    """A plan that needs less memory than what would run there would not fit."""
    with pytest.raises(PlanError, match="layers 1-2 5 6 are recomputed, but"):
        exported(selective(plan_of, (1, 2, 5, 6), (6,)), library)


def test_the_export_to_torch_names_the_modules_of_every_segment(plan_of):
    """Users of torch wrap the modules in a checkpoint."""
    export = exported(selective(plan_of, (1, 2, 5, 6), (6,)), "torch")
    assert json.loads(export.text)["recomputed"] == [
        [["blocks.0", "blocks.1"]],
        [["blocks.4"], ["blocks.5"]],
        [],
    ]
    assert any("wrap each list of modules" in note for note in export.left_out)


@pytest.mark.parametrize("library", ["torchgpipe", "torchtitan", "deepspeed", "megatron", "torch"])
def test_where_no_layer_has_to_run_again_nothing_is_said_of_it(plan_of, library):
    """Asked for, and not needed."""
    export = exported(selective(plan_of, ()), library)
    assert not any("recomputation" in note for note in export.left_out)
    assert "selective" not in export.use
