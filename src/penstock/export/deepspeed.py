"""Export to DeepSpeed: `parts`, the first layer of each stage, and the number of layers."""

from __future__ import annotations

from penstock.export.catalogue import Exported, register
from penstock.export.pipelines import (
    Pipelines,
    require_pipelines,
    segment_lengths,
    selective_layers,
    uneven_batch_reasons,
    unsupported_notes,
)
from penstock.partition.uniform import partition_uniform
from penstock.plan.plan import Plan
from penstock.schedule.recompute import Recompute


@register(
    "deepspeed", source="DeepSpeed 0.19.8, runtime/pipe/module.py, PipelineModule._partition_layers"
)
def deepspeed(plan: Plan) -> Exported:
    """Export as a Python list such as `[0, 3, 7]`: stage k has the layers from entry k to entry
    k + 1, exclusive.

    `partition_method` does not accept a list, so a subclass sets it:

        class Planned(PipelineModule):
            def _partition_layers(self, method="uniform"):
                self.parts = [0, 3, 7]
                stage = self._topo.get_coord(self.global_rank).pipe
                self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    Several pipelines are the topology's data axis: `ProcessTopology(axes=["data", "pipe"],
    dims=[pipelines, stages])` numbers the ranks as the plan does. DeepSpeed runs 1F1B.

    Raises:
        PlanError: the plan has several stages on a rank, single stages with replicas, or
            micro-batches of several sizes; is asynchronous; or recomputes only some layers.
    """
    reasons = uneven_batch_reasons(plan)
    if plan.recomputed and _checkpoint_interval(plan) is None:
        reasons.append(
            f"layers {selective_layers(plan)} are recomputed, but "
            "activation_checkpoint_interval=n recomputes all layers, in segments of n"
        )
    pipelines = require_pipelines("deepspeed", plan, reasons, _placement_reasons)
    parts = [0, *(end for _, end in plan.bounds)]
    is_uniform = list(plan.lengths) == partition_uniform(plan.layers, plan.stages)
    method = ' (partition_method="uniform" does the same)' if is_uniform else ""
    use = (
        f"a subclass of PipelineModule whose _partition_layers sets parts={parts}{method}, "
        f"num_stages={plan.stages}; in the config "
        f'"gradient_accumulation_steps": {pipelines.schedule.micro_batches}, '
        f'"train_micro_batch_size_per_gpu": {plan.batch // plan.micro_batches}'
    )
    notes = unsupported_notes(plan, "1f1b", "1F1B")
    if pipelines.count > 1:
        notes.append(
            f"{pipelines.count} pipelines: topology=ProcessTopology("
            f'axes=["data", "pipe"], dims=[{pipelines.count}, {plan.stages}])'
        )
    notes += _recompute_notes(plan)
    return Exported(str(parts), use, tuple(notes))


def _placement_reasons(plan: Plan, pipelines: Pipelines) -> list[str]:
    """Return the reason why DeepSpeed cannot place the stages on the ranks, if there is one."""
    if pipelines.linear:
        return []
    return [
        (
            f"{plan.schedule_name} has {pipelines.schedule.stages} stages on "
            f"{len(pipelines.placement)} ranks, but in DeepSpeed rank k has stage k alone"
        )
    ]


def _recompute_notes(plan: Plan) -> list[str]:
    """Return the note on the setting for recomputation, if the plan has any."""
    if plan.recompute is Recompute.SELECTIVE and plan.recomputed:
        interval = _checkpoint_interval(plan)
        return [f"recomputation (selective): activation_checkpoint_interval={interval}"]
    if plan.recompute.whole:
        except_last = (
            " for the last micro-batch too" if plan.recompute is Recompute.EXCEPT_LAST else ""
        )
        return [
            (
                f"recomputation: activation_checkpoint_interval={max(plan.lengths)} "
                f"recomputes every stage whole{except_last}"
            )
        ]
    return []


def _checkpoint_interval(plan: Plan) -> int | None:
    """Return the number of layers per recomputed segment, if all layers are recomputed in segments
    of equal length; else None.
    """
    stage_segments = segment_lengths(plan)
    interval = 0
    for stage in stage_segments:
        interval = max([interval, *(end - start for start, end in stage)])
    for stage, length in zip(stage_segments, plan.lengths, strict=True):
        expected = [(start, min(start + interval, length)) for start in range(0, length, interval)]
        if stage != expected:
            return None
    return interval
