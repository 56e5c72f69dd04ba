"""Configurations of copies of a pipeline, and plans whose ranks are groups of processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from penstock.errors import PlanError, SettingError
from penstock.ranks.mesh.replicated_setting import plan_for_mesh, replicated
from penstock.ranks.settings.run_config import RunConfig
from penstock.schedule.catalogue import schedule
from penstock.schedule.replicas import pipelines
from penstock.schedule.slicing import Slicing
from penstock.weights.catalogue import weight_rule


def mesh_of(copies, width=1):
    """The part of a mesh that is read."""
    return SimpleNamespace(copies=copies, width=width)


def setting_of(made, **more):
    """A configuration with a plan's devices and predictions."""
    return RunConfig(
        (1,) * made.stages,
        made,
        "never",
        weight_rule("flush"),
        devices=(0, 2),
        cluster_ranks=3,
        cluster_devices=(("h", "cpu"),),
        planned_busy_s={made.programs[0]: 1.0, made.programs[1]: 2.0},
        predicted_bytes=(10, 20),
        **more,
    )


def test_copies_have_the_times_and_bytes_of_their_pipeline_and_no_devices():
    """The mesh says where they are. Each copy has as many micro-batches as the pipeline."""
    setting = setting_of(schedule("1f1b", 2, 4))
    result = replicated(setting, mesh_of(3))
    assert result.schedule == pipelines(setting.schedule, 3, 12)
    assert result.schedule.micro_batches == 12
    busy_s = [result.planned_busy_s[program] for program in result.schedule.programs]
    assert busy_s == [1.0, 2.0] * 3
    assert result.predicted_bytes == (10, 20) * 3
    assert (result.devices, result.cluster_ranks, result.cluster_devices) == ((), 0, ())
    assert result.lengths == setting.lengths


def test_programs_without_a_planned_time_have_none():
    """A plan may not know them."""
    setting = setting_of(schedule("1f1b", 2, 4))
    del setting.planned_busy_s[setting.schedule.programs[0]]
    result = replicated(setting, mesh_of(2))
    assert list(result.planned_busy_s) == [
        result.schedule.programs[1],
        result.schedule.programs[3],
    ]


def test_one_pipeline_stays_as_it_is_but_for_its_devices_where_processes_share_layers():
    """Without a mesh, and with one process in each place, nothing is replaced."""
    setting = setting_of(schedule("1f1b", 2, 4))
    assert replicated(setting, None) is setting
    assert replicated(setting, mesh_of(1)) is setting
    shared = replicated(setting, mesh_of(1, width=2))
    assert shared.schedule is setting.schedule
    assert (shared.devices, shared.cluster_ranks, shared.cluster_devices) == ((), 0, ())
    assert shared.predicted_bytes == (10, 20)
    assert shared.planned_busy_s == setting.planned_busy_s


def test_schedules_whose_copies_cannot_have_batches_of_their_own_are_refused():
    """Streams, slices, and stages that have copies already."""
    cases = [
        (schedule("pipedream", 2, 1), "is asynchronous, and the dimension 'dp' of the mesh has 2"),
        (pipelines(schedule("1f1b", 2, 2), 2, 4), "plan for the 2 ranks of one pipeline"),
    ]
    for along in ("tokens", "samples"):
        sliced = replace(schedule("gpipe", 2, 2), slicing=Slicing(along, ((0.5, 0.5),)))
        cases.append((sliced, "slices micro-batches, which the 2 copies"))
    for made, text in cases:
        with pytest.raises(SettingError, match=text):
            replicated(setting_of(made), mesh_of(2))


@dataclass(frozen=True)
class Groups:
    """The part of a plan that is read."""

    tensor_parallel: int
    sequence_parallel: bool = True
    name: str = "p"


def test_a_plan_of_groups_is_that_of_its_ranks_where_the_mesh_has_them():
    """Of another size they are refused, with both."""
    plan = Groups(2)
    assert plan_for_mesh(plan, mesh_of(1, width=2)) == Groups(1, sequence_parallel=False)
    assert plan_for_mesh(plan, None) is plan
    assert plan_for_mesh(None, mesh_of(1, width=2)) is None
    alone = Groups(1)
    assert plan_for_mesh(alone, mesh_of(1, width=2)) is alone
    text = (
        "each rank of the plan is 2 devices, and the dimension 'tp' of the mesh has 4: make a mesh "
        "with 2 there, or plan with tensor_parallel=4"
    )
    with pytest.raises(PlanError, match=text):
        plan_for_mesh(plan, mesh_of(1, width=4))
