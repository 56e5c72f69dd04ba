"""The export for torch.distributed.pipelining, loaded by it."""

import json

import pytest
import torch
from tests.export.torch_stages import batch, play, small_model
from torch.nn import functional

from penstock.errors import PlanError
from penstock.export.catalogue import export
from penstock.ranks.processes.launch import launch
from penstock.schedule.catalogue import schedule
from penstock.schedule.torch_csv.files import from_csv

NAMES = tuple(map(str, range(7)))


def test_torchs_splitter_makes_the_plans_stages(plan_of):
    """`split_spec` is by names; the stages that torch traces must have the plan's layers, and
    compute the model.
    """
    from torch.distributed.pipelining import SplitPoint, pipeline

    chosen_plan = plan_of(schedule("1f1b", 3, 4), (2, 4, 1), NAMES)
    facts = json.loads(export(chosen_plan, "torch"))
    assert facts["split_spec"] == {"2": "BEGINNING", "6": "BEGINNING"}
    model, (x, _) = small_model(), batch(8)
    pipe = pipeline(
        model,
        mb_args=(x[:2],),
        split_spec={name: SplitPoint[point] for name, point in facts["split_spec"].items()},
    )
    assert pipe.num_stages == 3
    value = x
    for stage, names in enumerate(facts["modules_of_stage"]):
        traced = pipe.get_stage_module(stage)
        prefixes = {key.split(".")[0] for key, _ in traced.named_parameters()}
        assert prefixes == {name for name in names if list(model.get_submodule(name).parameters())}
        value = (
            traced(value)
            if stage == 0
            else traced(*value)
            if isinstance(value, tuple)
            else traced(value)
        )
    torch.testing.assert_close(value, model(x))


@pytest.mark.parametrize(
    ("example", "lengths"),
    [
        (schedule("1f1b", 2, 4), (5, 2)),
        (schedule("zb-v", 4, 4), (1, 3, 1, 2)),
        (schedule("gpipe", 1, 4, replicas=2), (7,)),
    ],
    ids=["uneven cut", "stages in a v", "two pipelines"],
)
def test_torch_trains_from_the_exported_folder_with_the_same_gradients(
    plan_of, tmp_path, example, lengths
):
    """Two real ranks build their stages by the names, load the schedule, and take a step: that is
    all that a user has.
    """
    export(plan_of(example, lengths, NAMES), "torch", tmp_path / "plan")
    gradients: dict = {}
    for rank in launch(play, 2, tmp_path / "plan", threads=1):
        for name, gradient in rank.items():
            gradients[name] = gradients.get(name, 0) + gradient
    model, (x, y) = small_model(), batch(2 * example.micro_batches)
    functional.cross_entropy(model(x), y).backward()
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-12)


def test_the_file_has_the_stages_micro_batches_and_pipelines_of_the_plan(plan_of):
    """The runtime of torch is constructed from them."""
    chosen_plan = plan_of(
        schedule("zb-v", 4, 8, replicas=2),
        (1, 3, 1, 2),
        NAMES,
        recompute="always",
        devices=(4, 5, 6, 7),
    )
    facts = json.loads(export(chosen_plan, "torch"))
    assert facts["stages_of_rank"] == [[0, 3], [1, 2]]
    assert facts["pipelines"] == [[0, 1], [2, 3]]
    assert (facts["micro_batches"], facts["batch"], facts["recompute"], facts["devices"]) == (
        4,
        16,
        "always",
        [4, 5, 6, 7],
    )
    assert from_csv(facts["schedule"]).programs == schedule("zb-v", 4, 4).programs
    assert facts["modules_of_stage"] == [["0"], ["1", "2", "3"], ["4"], ["5", "6"]]


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (schedule("bpipe", 4, 8), "hands activations to another rank"),
        (schedule("autopipe", 4, 8), "cuts micro-batches along samples"),
    ],
)
def test_what_the_csv_cannot_say_is_refused_with_its_reason(plan_of, example, message):
    """A plan without its schedule would be half of it."""
    with pytest.raises(
        PlanError, match=f"torch.distributed.pipelining cannot run this plan\n.*{message}"
    ):
        export(plan_of(example, (2, 2, 2, 1), NAMES), "torch")
