"""The configuration of a run with copies of a whole pipeline, from that of one pipeline."""

from __future__ import annotations

from dataclasses import replace

from penstock.errors import PlanError, SettingError
from penstock.plan.plan import Plan
from penstock.ranks.mesh.pipeline_mesh import PipelineMesh
from penstock.ranks.settings.run_config import RunConfig
from penstock.schedule.replicas import pipelines


def replicated(setting: RunConfig, mesh: PipelineMesh | None) -> RunConfig:
    """Return the configuration of all copies of a pipeline.

    Copy n of k runs the micro-batches n, n + k, n + 2k, ... of the joined batch.

    Args:
        setting: that of one pipeline.
        mesh: where the copies are; with None there is one pipeline.

    Raises:
        SettingError: the schedule cannot be replicated.
    """
    if mesh is None or mesh.copies * mesh.width == 1:
        return setting
    if mesh.copies == 1:
        return replace(setting, devices=(), cluster_ranks=0, cluster_devices=())
    schedule, copies = setting.schedule, mesh.copies
    _check_replicable(setting, copies)
    all_copies = pipelines(schedule, copies, schedule.micro_batches * copies)
    busy_s = {}
    for rank, program in enumerate(all_copies.programs):
        planned_s = setting.planned_busy_s.get(schedule.programs[rank % schedule.ranks])
        if planned_s is not None:
            busy_s[program] = planned_s
    # The mesh says where ranks are, not the plan.
    return replace(
        setting,
        schedule=all_copies,
        devices=(),
        cluster_ranks=0,
        cluster_devices=(),
        planned_busy_s=busy_s,
        predicted_bytes=setting.predicted_bytes * copies,
    )


def plan_for_mesh(plan: Plan | None, mesh: PipelineMesh | None) -> Plan | None:
    """Return the plan of the ranks alone, if processes of a mesh share the layers of a rank.

    Args:
        plan: the caller's; its ranks may be groups of devices.
        mesh: the place of this process.

    Raises:
        PlanError: the groups are of another size than those of the mesh.
    """
    if plan is None or plan.tensor_parallel == 1 or mesh is None:
        return plan
    if plan.tensor_parallel != mesh.width:
        raise PlanError(
            f"each rank of the plan is {plan.tensor_parallel} devices, and the dimension 'tp' of "
            f"the mesh has {mesh.width}: make a mesh with {plan.tensor_parallel} there, or plan "
            f"with tensor_parallel={mesh.width}"
        )
    return replace(plan, tensor_parallel=1, sequence_parallel=False)


def _check_replicable(setting: RunConfig, copies: int) -> None:
    """Reject schedules whose copies cannot have batches of their own.

    Raises:
        SettingError: it is such a schedule.
    """
    schedule = setting.schedule
    advice = "use a synchronous schedule such as '1f1b', or mesh=mesh['pp']"
    if schedule.stream is not None:
        raise SettingError(
            f"{schedule.name} is asynchronous, and the dimension 'dp' of the mesh has {copies} "
            f"copies of the pipeline, which would update at different times: {advice}"
        )
    if schedule.slicing is not None:
        raise SettingError(
            f"{schedule.name} slices micro-batches, which the {copies} copies in the dimension "
            f"'dp' of the mesh do not support: {advice}"
        )
    if schedule.copies > 1:
        raise SettingError(
            f"the schedule has copies of stages, and the dimension 'dp' of the mesh has {copies} "
            f"copies of the pipeline: plan for the {schedule.ranks // copies or 1} ranks of one "
            "pipeline (max_replicas=1); or leave out mesh=, and the plan's copies are used"
        )
