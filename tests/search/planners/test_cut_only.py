"""Planners that only cut: what all of them keep to."""

from dataclasses import replace

import pytest
from tests.search.planners.cutters import ask, profile

from penstock.cluster.cluster import cluster
from penstock.errors import PlanError
from penstock.search.catalogue import PLANNERS
from penstock.search.planners.cut_only import counts_of, replicas_of, stages_of
from penstock.verify.verify import verify

#: Those of torchgpipe's, DeepSpeed's and others' kind, and those with stages on several devices.
OWN = [
    "torchgpipe",
    "torchgpipe-size",
    "deepspeed",
    "deepspeed-uniform",
    "gpipe",
    "megatron",
    "autopipe",
    "piper",
    "alpa",
    "spp",
]
every = pytest.mark.parametrize("name", OWN)

COSTS = profile(
    [(0.01 * (1 + i % 3), 0.02) for i in range(9)],
    fixed=1e-3,
    output=[1e5] * 9,
    activation=[1e5] * 9,
)


def planned(name, request):
    """The plan of a planner by its name."""
    return PLANNERS.find(name).make(request)


@every
@pytest.mark.parametrize("where", ["4xV100-10GbE", "2x2xV100-NVLink-25GbE", "1xV100-NVLink"])
def test_every_plan_is_sound_and_says_what_its_paper_makes_least(name, where):
    """A planner's own value is how its faithfulness is tested."""
    chosen_plan = planned(name, ask(COSTS, where))
    verify(chosen_plan.schedule)
    chosen_plan.check()
    assert chosen_plan.objective is not None
    assert chosen_plan.objective.value >= 0
    assert chosen_plan.ranks <= 4


@every
def test_what_is_asked_for_is_kept(name):
    """Number of stages and of micro-batches, recomputation: a planner plans around them."""
    chosen_plan = planned(
        name, ask(COSTS, "4xV100-10GbE", stages=2, micro_batches=8, recompute="always")
    )
    assert (chosen_plan.stages, chosen_plan.micro_batches, chosen_plan.recompute) == (
        2,
        8,
        "always",
    )


@every
def test_one_copy_of_a_stage_is_kept_too(name):
    """A runtime without copies of stages has its plans as well."""
    assert (
        max(
            map(
                len,
                planned(name, ask(COSTS, "4xV100-10GbE", max_replicas=1)).schedule.ranks_of_stage,
            )
        )
        == 1
    )


@every
def test_what_no_memory_holds_is_refused(name):
    """With the amounts that lack, or where a search itself looks at memory, with its own words."""
    heavy = profile([(0.01, 0.02)] * 9, parameter_bytes=[2**30] * 9)
    with pytest.raises(PlanError, match=r"needs .* GiB, has 1\.0 GiB|fit memory|fit the memory"):
        planned(name, ask(heavy, "4xV100-10GbE", memory_limit=2**30))


@every
def test_another_schedule_or_cut_is_refused(name):
    """Each paper has its own; who wants another combination asks auto."""
    with pytest.raises(
        PlanError,
        match=r"runs .*, and zb-v is requested: leave schedules out, or use planner 'auto'",
    ):
        planned(name, ask(COSTS, "4xV100-10GbE", schedules=("zb-v",)))
    with pytest.raises(PlanError, match="cuts by its own method"):
        planned(name, ask(COSTS, "4xV100-10GbE", by=(3, 3, 3)))


@pytest.mark.parametrize("name", ["megatron", "autopipe", "piper", "alpa", "spp"])
def test_mixed_devices_are_refused_by_those_that_take_them_for_equal(name):
    """Their formulas have one speed."""
    fast, slow = (cluster(f"1x{device}-NVLink").devices[0] for device in ("A100", "V100"))
    mixed = replace(cluster("2xV100-NVLink"), devices=(fast, slow))
    with pytest.raises(PlanError, match="takes all devices for equal"):
        planned(name, ask(COSTS, mixed))


def test_pipelines_get_equally_many_micro_batches():
    """Ten pipelines share 10, 20, 40 … of the divisors of the batch, not 16 or 25."""
    request = ask(COSTS, "20xV100-10GbE", batch=200, stages=2)
    assert (stages_of(request), replicas_of(request, 2)) == (2, 10)
    assert list(counts_of(request, 2, 10)) == [10, 20, 40, 50, 80, 100, 200]
    asked = ask(COSTS, "20xV100-10GbE", batch=200, stages=2, micro_batches=12)
    assert (replicas_of(asked, 2), list(counts_of(asked, 2, 6))) == (6, [12])
    assert list(counts_of(ask(COSTS, "4xV100-10GbE"), 4)) == [1, 2, 4, 8, 16, 32]


def test_as_many_stages_as_devices_or_layers():
    """More stages than layers cannot be."""
    assert stages_of(ask(COSTS, "4xV100-10GbE")) == 4
    assert stages_of(ask(COSTS, "20xV100-10GbE")) == 9
