"""torchtitan's names of modules per stage."""

import json
import tomllib

import pytest
import torch
from torch import nn

from penstock.errors import PlanError
from penstock.export.catalogue import export, exported
from penstock.export.torchtitan import TORCH_SCHEDULES
from penstock.schedule.catalogue import schedule
from penstock.tracing.traced_chain import chain
from penstock.zoo.catalogue import model

LINEAR = (4, 4, 4, 3)


def test_names_are_modules_of_the_model_in_its_order(plan_of):
    """torchtitan deletes unnamed modules from the model of each stage, so an unknown name would
    leave a hole.
    """
    gpt = model("gpt", layers=12, width=8, heads=2, vocabulary=8, tokens=4)
    names = tuple(layer.name for layer in chain(gpt))
    parts = json.loads(export(plan_of(schedule("1f1b", 4, 8), LINEAR, names), "torchtitan"))
    assert [len(part) for part in parts] == list(LINEAR)
    assert tuple(name for part in parts for name in part) == names
    modules = dict(gpt.named_modules())
    assert all(name in modules for part in parts for name in part)


def test_the_list_is_toml_too(plan_of):
    """torchtitan's older configurations are TOML files."""
    text = export(plan_of(schedule("1f1b", 4, 8), LINEAR), "torchtitan")
    assert tomllib.loads(f"parts = {text}")["parts"] == json.loads(text)


@pytest.mark.parametrize(
    ("name", "stages", "theirs"),
    [
        ("1f1b", 4, "1F1B"),
        ("gpipe", 4, "GPipe"),
        ("interleaved", 8, "Interleaved1F1B"),
        ("interleaved-zero-bubble", 8, "InterleavedZeroBubble"),
        ("zb-v", 8, "ZBVZeroBubble"),
    ],
)
def test_schedules_that_torch_has_go_by_its_names(plan_of, name, stages, theirs):
    """For the others there is the CSV."""
    lengths = [15 - stages + 1, *[1] * (stages - 1)]
    result = exported(plan_of(schedule(name, stages, 8), lengths), "torchtitan")
    assert f'pipeline_parallel_schedule = "{theirs}"' in result.use
    assert "pipeline_parallel_degree = 4, pipeline_parallel_microbatch_size = 2" in result.use


def test_torch_has_every_exported_schedule_name():
    """The names are compared with the table of the installed version of torch."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    for name in TORCH_SCHEDULES.values():
        assert get_schedule_class(name)


def test_a_penstock_schedule_exports_with_a_csv_if_torchtitan_places_its_stages_so(plan_of):
    """torchtitan places modules by the name of the schedule, in a loop unless it is one of two."""
    assert (
        "pipeline_parallel_schedule_csv"
        in exported(plan_of(schedule("zb-h1", 4, 8), LINEAR), "torchtitan").use
    )
    with pytest.raises(PlanError, match=r"v-half has stages \(0, 7\)"):
        export(plan_of(schedule("v-half", 8, 8), [8, *[1] * 7]), "torchtitan")


def test_what_the_csv_cannot_say_is_refused(plan_of):
    """Evicted activations have no action there."""
    with pytest.raises(PlanError, match="hands activations to another rank"):
        export(plan_of(schedule("bpipe", 4, 8), LINEAR), "torchtitan")


class Tolerant(nn.Module):
    """A model as torchtitan wants it: layers in a ModuleDict, and a forward that passes over what
    its stage has not got.
    """

    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(3, 4)
        self.blocks = nn.ModuleDict(
            {str(i): nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for i in range(5)}
        )
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        """Run what is there."""
        x = self.embedding(x) if self.embedding is not None else x
        for block in self.blocks.values():
            x = block(x)
        x = self.norm(x) if self.norm is not None else x
        return self.head(x) if self.head is not None else x


def test_torchtitan_itself_makes_the_plans_stages(plan_of):
    """Its splitter and placement are used if it is installed."""
    theirs = pytest.importorskip("torchtitan.distributed.pipeline_parallel", exc_type=ImportError)
    names = ("embedding", *(f"blocks.{i}" for i in range(5)), "norm", "head")
    chosen_plan = plan_of(schedule("interleaved", 4, 4), (2, 3, 1, 2), names)
    model, x = Tolerant(), torch.randn(2, 3)
    value = x
    for part, (start, end) in zip(
        json.loads(export(chosen_plan, "torchtitan")), chosen_plan.bounds, strict=True
    ):
        stage = theirs._split_module(model, part)
        stage_names = {name for name, _ in stage.named_modules() if name in names}
        assert stage_names == set(names[start:end])
        value = stage(value)
    torch.testing.assert_close(value, model(x))


@pytest.mark.parametrize(
    ("name", "stages"), [("1f1b", 4), ("interleaved", 8), ("zb-v", 8), ("dualpipe-v", 8)]
)
def test_torchtitan_itself_places_stages_where_the_plan_has_them(plan_of, name, stages):
    """It knows two placements, and chooses by the schedule's name."""
    theirs = pytest.importorskip("torchtitan.distributed.pipeline_parallel", exc_type=ImportError)
    chosen_plan = plan_of(schedule(name, stages, 8), [15 - stages + 1, *[1] * (stages - 1)])
    parts = json.loads(export(chosen_plan, "torchtitan"))
    placed = [
        theirs._get_pp_rank_to_stage_indices_mapping(
            rank, chosen_plan.ranks, TORCH_SCHEDULES[name], len(parts)
        )
        for rank in range(chosen_plan.ranks)
    ]
    assert tuple(placed) == chosen_plan.schedule.stages_of_rank
